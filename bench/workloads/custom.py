"""Custom prompts from a JSON-lines file."""

from __future__ import annotations

import json
import random
from pathlib import Path

from ...quant.base.errors import BadInput
from .workload import Tokenizer, Workload, numbered

DEFAULT_OUTPUT_LEN = 256


def custom_workload(
    tokenizer: Tokenizer,
    path: Path,
    *,
    num_prompts: int,
    max_model_len: int,
    output_len: int | None = None,
    seed: int = 0,
    shuffle: bool = True,
    oversample: bool = True,
) -> Workload:
    """Requests from a JSON-lines file of `{"prompt": …}` with an optional `"output_len"`.

    The output length is the line's, else `output_len`, else 256. It is cut to the model's context; a prompt
    that does not fit is left out; both are counted in the notes.

    Raises:
        BadInput: no such file, an invalid line (with its number), or no prompt left.
    """
    default = output_len if output_len is not None else DEFAULT_OUTPUT_LEN
    prompts = read_prompts(path)
    if shuffle:
        random.Random(seed).shuffle(prompts)
    pairs: list[tuple[list[int], int]] = []
    too_long = cut = 0
    for prompt, wanted in prompts:
        if len(pairs) == num_prompts:
            break
        ids = list(tokenizer.encode(prompt))
        max_output_len = max_model_len - len(ids)
        if max_output_len < 1:
            too_long += 1
            continue
        length = wanted or default
        cut += length > max_output_len
        pairs.append((ids, min(length, max_output_len)))
    if not pairs:
        raise BadInput(f"dataset {path}: every prompt is longer than the context, {max_model_len}")
    notes = []
    if too_long:
        notes.append(f"{too_long} prompts left out: longer than the context of {max_model_len}")
    if cut:
        notes.append(f"{cut} output lengths cut to the context of {max_model_len}")
    if len(pairs) < num_prompts and oversample:
        missing = num_prompts - len(pairs)
        notes.append(f"{missing} of {num_prompts} prompts are repeats: the file has too few")
        pairs += random.Random(seed).choices(pairs, k=missing)
    return Workload("custom", f"prompts of {path.name}", numbered(pairs), tuple(notes))


def read_prompts(path: Path) -> list[tuple[str, int | None]]:
    """(prompt, output length or None) of every line that is not blank."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, IsADirectoryError) as error:
        raise BadInput(f"dataset {path} is not a file") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"dataset {path} is not UTF-8 text: {error.reason}") from error
    prompts: list[tuple[str, int | None]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"dataset {path}, line {number}"
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadInput(f"{where}: not JSON ({error.msg}); each line is one object") from error
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
            raise BadInput(f'{where}: wants an object with a text "prompt"')
        length = entry.get("output_len")
        if length is not None and (type(length) is not int or length < 1):
            raise BadInput(f'{where}: "output_len" is {length!r}, not a positive whole number')
        prompts.append((entry["prompt"], length))
    if not prompts:
        raise BadInput(f'dataset {path} is empty: each line is one object with a "prompt"')
    return prompts
