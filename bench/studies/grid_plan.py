"""Cells of a grid: the product of two parameter files, checked before anything starts.

The files are those of `vllm bench sweep serve`: lists of mappings, or mappings by name.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ...quant.base.errors import BadInput
from ..options.options import BenchOptions, checked
from ..record.result import plain

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
    except (yaml.YAMLError, ValueError, RecursionError) as error:
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


NUM_RUNS = 3  # passes of a cell, as in vLLM's sweep
# Fields that a cell may not change: the grid itself sets them.
RESERVED = ("serve", "serve_args", "serve_program", "base_url", "model", "started_server")
SECRET = ("api_key", "header")
LONGEST_NAME = 80


@dataclass(frozen=True, slots=True)
class Cell:
    """One server configuration under one benchmark configuration.

    Attributes:
        key: its folder's name, unique in the grid.
        options: those of its benchmark, with the server's arguments in `serve_args`.
    """

    key: str
    serve: Combination
    bench: Combination
    options: BenchOptions


@dataclass(frozen=True, slots=True)
class GridPlan:
    """A grid: its cells, row by row, and what they were made from."""

    name: str
    cells: tuple[Cell, ...]
    spec: Mapping[str, Any]

    def rows(self) -> list[list[Cell]]:
        """The cells that share a server, in order."""
        rows: dict[str, list[Cell]] = {}
        for cell in self.cells:
            rows.setdefault(cell.serve.name, []).append(cell)
        return list(rows.values())


def plan_grid(
    given: Mapping[str, Any],
    serve_params: Path | None,
    bench_params: Path | None,
    link_vars: str | None = None,
) -> GridPlan:
    """The grid of the fields `given` and two parameter files.

    Raises:
        BadInput: server parameters without a server to start, an unreadable file, an invalid option in any
            cell, or links that leave no cell.
    """
    base = checked(BenchOptions, {"num_runs": NUM_RUNS, **given}, "option")
    if serve_params is not None and base.serve is None:
        raise BadInput("--serve-params needs --serve: they are flags of the server that it starts")
    serves = read_combinations(serve_params, "--serve-params")
    benches = read_combinations(bench_params, "--bench-params")
    links = parse_links(link_vars)
    cells: list[Cell] = []
    for serve in serves:
        for bench in benches:
            options = _options(given, base, serve, bench)
            if all(linked(serve, bench, *link) for link in links):
                key = f"{len(cells):03d}-{_slug(serve.name, bench.name)}"
                cells.append(Cell(key, serve, bench, options))
    if not cells:
        raise BadInput(f"--link-vars {link_vars}: no cell has equal values")
    spec = {
        "options": plain(base.model_dump(mode="json", exclude={*SECRET, "started_server"})),
        "serve_params": [{"name": each.name, "params": plain(each.params)} for each in serves],
        "bench_params": [{"name": each.name, "params": plain(each.params)} for each in benches],
        "link_vars": link_vars,
    }
    name = base.name or base.label or Path(base.model or base.serve or "bench").name
    return GridPlan(f"{name}-grid", tuple(cells), spec)


def _options(
    given: Mapping[str, Any], base: BenchOptions, serve: Combination, bench: Combination
) -> BenchOptions:
    fields = bench_fields(bench.params)
    if taken := [key for key in fields if key in RESERVED]:
        raise BadInput(f"--bench-params {bench.name}: {taken[0]} is set by the grid, not by a cell")
    options = checked(
        BenchOptions, {"num_runs": NUM_RUNS, **given, **fields}, f"--bench-params {bench.name}"
    )
    if not serve.params:
        return options
    words = " ".join(filter(None, [base.serve_args, shlex.join(server_words(serve.params))]))
    return options.model_copy(update={"serve_args": words})


def changed_fields(options: BenchOptions) -> dict[str, Any]:
    """The options of a cell that are not at their default, without what names its server or is secret."""
    return unusual(plain(options.model_dump(mode="json", exclude={*SECRET, *RESERVED})))


def unusual(written: Mapping[str, Any]) -> dict[str, Any]:
    """The written options that are not at their default."""
    usual = plain(BenchOptions().model_dump(mode="json"))
    return {name: value for name, value in written.items() if value != usual[name]}


def parse_links(text: str | None) -> list[tuple[str, str]]:
    """`max_num_seqs=max_concurrency,…` as (server parameter, benchmark parameter).

    Raises:
        BadInput: another form.
    """
    links = []
    for word in filter(None, (text or "").split(",")):
        serve, equals, bench = word.strip().partition("=")
        if not (serve and equals and bench):
            raise BadInput(f"--link-vars {text!r}: write SERVE_PARAM=BENCH_PARAM")
        links.append((serve, bench))
    return links


def linked(serve: Combination, bench: Combination, serve_key: str, bench_key: str) -> bool:
    """Whether both have the linked parameters, with equal values."""
    left, right = _underscored(serve.params), _underscored(bench.params)
    serve_key, bench_key = serve_key.replace("-", "_"), bench_key.replace("-", "_")
    return (
        serve_key in left and bench_key in right and str(left[serve_key]) == str(right[bench_key])
    )


def _underscored(params: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("-", "_"): value for key, value in params.items()}


def _slug(*names: str) -> str:
    words = [re.sub(r"[^\w.=-]+", "_", name).strip("_.") for name in names if name]
    return "--".join(words)[:LONGEST_NAME] or "cell"


def spec_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Sequence[str]:
    """Names of what differs between two specs."""
    names = []
    for key in now:
        if before.get(key) == now[key]:
            continue
        if key == "options":
            old = before.get(key) or {}
            names += [
                f"--{name.replace('_', '-')}"
                for name in now[key]
                if old.get(name) != now[key][name]
            ]
        else:
            names.append(f"--{key.replace('_', '-')}")
    return names
