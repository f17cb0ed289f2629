"""ShareGPT conversations, with the usual filter of serving benchmarks.

The rules are those of vLLM's `benchmark_serving` and its descendants: an entry needs two turns, the
first is the prompt and the second gives the output length (roles are ignored), both are
tokenized with the tokenizer's special tokens, and pairs that are too short or too long are dropped.
Another tokenizer therefore selects other prompts, which the hash of the workload shows.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

from ...quant.base.errors import BadInput
from ...recipes import DATA
from .workload import Tokenizer, Workload, numbered

STAND_IN = DATA / "sharegpt_stand_in.json"
MIN_TOKENS = 4
MAX_PROMPT_TOKENS = 1024
MAX_TOTAL_TOKENS = 2048
STAND_IN_NOTE = (
    "the prompts are a bundled stand-in in ShareGPT's shape, not ShareGPT: give the real "
    "file with --dataset-path for numbers to compare with others"
)


def load_conversations(path: Path) -> list[dict[str, Any]]:
    """The entries of a ShareGPT file that have at least two turns.

    Raises:
        BadInput: no such file, not JSON (with the line), not a list, or nothing with two turns.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError) as error:
        raise BadInput(f"dataset {path} is not a file") from error
    except json.JSONDecodeError as error:
        raise BadInput(
            f"dataset {path}, line {error.lineno}: not JSON ({error.msg}); "
            "a ShareGPT file is one JSON list of conversations"
        ) from error
    except UnicodeDecodeError as error:
        raise BadInput(f"dataset {path} is not UTF-8 text: {error.reason}") from error
    if not isinstance(data, list):
        raise BadInput(f"dataset {path} holds a {type(data).__name__}, not a list of conversations")
    kept = [entry for entry in data if _has_two_turns(entry)]
    if not kept:
        raise BadInput(f"dataset {path} has no entry with two conversation turns")
    return kept


def _has_two_turns(entry: Any) -> bool:
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    return (
        isinstance(turns, list)
        and len(turns) >= 2
        and all(isinstance(turn, dict) and isinstance(turn.get("value"), str) for turn in turns[:2])
    )


def drop_reason(prompt_len: int, output_len: int, *, length_is_forced: bool) -> str | None:
    """Why a pair of these lengths (in tokens) is dropped, or None if it is kept."""
    if prompt_len < MIN_TOKENS:
        return f"prompt under {MIN_TOKENS} tokens"
    if output_len < MIN_TOKENS and not length_is_forced:
        return f"answer under {MIN_TOKENS} tokens"
    if prompt_len > MAX_PROMPT_TOKENS:
        return f"prompt over {MAX_PROMPT_TOKENS} tokens"
    if prompt_len + output_len > MAX_TOTAL_TOKENS:
        return f"prompt and answer over {MAX_TOTAL_TOKENS} tokens"
    return None


def sharegpt_workload(
    tokenizer: Tokenizer,
    *,
    num_prompts: int,
    max_model_len: int,
    path: Path | None = None,
    seed: int = 0,
    output_len: int | None = None,
    shuffle: bool = True,
    oversample: bool = True,
) -> Workload:
    """`num_prompts` requests from a ShareGPT file, or from the bundled stand-in when `path` is None.

    Pairs that exceed the model's context are dropped too, and counted in the notes.

    Raises:
        BadInput: the file is unusable, or the filter leaves no prompt.
    """
    entries = load_conversations(path or STAND_IN)
    if shuffle:
        random.Random(seed).shuffle(entries)
    pairs: list[tuple[list[int], int]] = []
    dropped: Counter[str] = Counter()
    for entry in entries:
        if len(pairs) == num_prompts:
            break
        prompt, answer = (turn["value"] for turn in entry["conversations"][:2])
        prompt_ids = list(tokenizer.encode(prompt))
        length = output_len if output_len is not None else len(tokenizer.encode(answer))
        reason = drop_reason(len(prompt_ids), length, length_is_forced=output_len is not None)
        if reason is None and len(prompt_ids) + length > max_model_len:
            reason = f"longer than the model's context of {max_model_len} tokens"
        if reason is None:
            pairs.append((prompt_ids, length))
        else:
            dropped[reason] += 1
    source = f"ShareGPT file {path.name}" if path else "bundled ShareGPT stand-in"
    if not pairs:
        reasons = ", ".join(f"{count} × {reason}" for reason, count in dropped.items())
        raise BadInput(f"{source}: the filter leaves no prompt ({reasons})")
    notes = [f"{count} conversations dropped: {reason}" for reason, count in dropped.items()]
    if path is None:
        notes.insert(0, STAND_IN_NOTE)
    if len(pairs) < num_prompts and oversample:
        missing = num_prompts - len(pairs)
        notes.append(f"{missing} of {num_prompts} prompts are repeats: the file has too few")
        pairs += random.Random(seed).choices(pairs, k=missing)
    return Workload("sharegpt", source, numbered(pairs), tuple(notes), is_stand_in=path is None)
