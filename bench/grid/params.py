"""Parameter files of a grid, as those of `vllm bench sweep serve`: lists of mappings, or mappings by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ...quant.base.errors import BadInput

NAME_KEY = "_benchmark_name"
# Spellings of the command line that are not the name of a field of `BenchOptions`.
ALIASES = {
    "dataset_name": "dataset",
    "sharegpt_output_len": "output_len",
    "custom_output_len": "output_len",
    "hf_output_len": "output_len",
}


@dataclass(frozen=True, slots=True)
class Combination:
    """One entry of a parameter file: its name and its parameters as written."""

    name: str
    params: Mapping[str, Any]


def read_combinations(path: Path | None, flag: str) -> tuple[Combination, ...]:
    """The entries of a YAML or JSON file; without a file, one entry that changes nothing.

    Raises:
        BadInput: no such file, another form, an empty list, or two entries of one name.
    """
    if path is None:
        return (Combination("", {}),)
    try:
        written = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{flag} {path}: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        raise BadInput(f"{flag} {path} is neither YAML nor JSON: {_one_line(error)}") from error
    if isinstance(written, Mapping):
        entries = [_named(path, flag, name, entry) for name, entry in written.items()]
    else:
        entries = written
    if not isinstance(entries, list) or not entries:
        raise BadInput(f"{flag} {path}: write a list of mappings, or mappings by name")
    combinations = tuple(_combination(path, flag, n, entry) for n, entry in enumerate(entries, 1))
    names = [combination.name for combination in combinations]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise BadInput(f"{flag} {path}: two entries are {twice!r}: give each its {NAME_KEY}")
    return combinations


def _one_line(error: object) -> str:
    return " ".join(str(error).split())


def _named(path: Path, flag: str, name: object, entry: object) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        raise BadInput(f"{flag} {path}: {name}: write a mapping of parameters")
    return {NAME_KEY: str(name), **entry}


def _combination(path: Path, flag: str, number: int, entry: object) -> Combination:
    if not isinstance(entry, Mapping):
        raise BadInput(f"{flag} {path}: entry {number} is no mapping of parameters")
    params = {str(key): value for key, value in entry.items() if key != NAME_KEY}
    if any(value is None for value in params.values()):
        empty = next(key for key, value in params.items() if value is None)
        raise BadInput(f"{flag} {path}: entry {number}: {empty} has no value")
    name = str(entry.get(NAME_KEY) or "-".join(f"{k}={flat(v)}" for k, v in params.items()))
    return Combination(name or "default", params)


def flat(value: Any) -> str:
    """A parameter's value as text; mappings and lists as JSON."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value) if isinstance(value, Mapping | list) else str(value)


def server_words(params: Mapping[str, Any]) -> list[str]:
    """Command-line words of a server's parameters, as vLLM makes them.

    `max_num_seqs: 8` is `--max-num-seqs 8`; true and false are `--x` and `--no-x`, of a nested parameter
    (`a.b`) `--a.b=true`; a list repeats the option; a mapping is JSON.
    """
    words: list[str] = []
    for key, value in params.items():
        head, dot, rest = key.partition(".")
        flag = "--" + head.replace("_", "-") + dot + rest
        if isinstance(value, bool):
            negative = flag.replace("--", "--no-", 1)
            words.append(
                f"{flag}={flat(value)}" if dot else flag if value else negative,
            )
            continue
        for each in value if isinstance(value, list) else [value]:
            words += [flag, flat(each)]
    return words


def bench_fields(params: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `BenchOptions` from a benchmark's parameters, with dashes or underscores."""
    fields = {key.replace("-", "_"): value for key, value in params.items()}
    return {ALIASES.get(key, key): value for key, value in fields.items()}


def bench_words(params: Mapping[str, Any]) -> list[str]:
    """Command-line words of a benchmark's parameters, for people to run a cell by hand."""
    words: list[str] = []
    for key, value in params.items():
        flag = "--" + key.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, list):
            words += [flag, ",".join(map(flat, value))]
        else:
            words += [flag, flat(value)]
    return words
