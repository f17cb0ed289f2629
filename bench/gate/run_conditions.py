"""Conditions that forbid a verdict on speed alone: failed, truncated and disturbed runs, other lengths."""

from __future__ import annotations

from collections.abc import Sequence

from ..record.comparable import DISTURBANCE, FAILURE, PROMPTS, Difference
from ..record.result import RunData
from .counts import length_change, mean_value, relative_change
from .limits import COUNTED
from .measured import is_paired
from .sequential import FALSE_PASS

LENGTH_TOLERANCE = 0.10
MIN_REQUESTS = 8
# Above this share of failed requests the speeds are those of the survivors.
MOST_FAILED = 0.01


def unusable(
    base: RunData, new: RunData, sides: tuple[str, str] = ("base", "new")
) -> Difference | None:
    """The condition for which speed cannot be judged although the work is the same: a failed, truncated or
    disturbed run, or other lengths. `sides` are what the words call the runs."""
    for side, data in zip(sides, (base, new), strict=True):
        result = data.result
        if result["llmopt"]["interrupted"]:
            return Difference(FAILURE, f"the {side} run was interrupted")
        if result["failed"] > MOST_FAILED * (result["failed"] + result["completed"]):
            said = f"{result['failed']} requests failed in the {side} run"
            return Difference(FAILURE, said)
        if result["completed"] < MIN_REQUESTS:
            said = f"the {side} run has {result['completed']} requests: too few to judge"
            return Difference(FAILURE, said)
        client = result["llmopt"].get("client")
        if client and not client["certified"]:
            said = f"the client disturbed the {side} run: {client['reasons'][0]}"
            return Difference(DISTURBANCE, said)
    return one_disturbed(base, new, sides) or other_lengths([base], [new])


def one_disturbed(base: RunData, new: RunData, sides: tuple[str, str]) -> Difference | None:
    """Disturbance of one side alone: every pass of it, and not of the other; passes in turns share theirs."""
    left = [len(disturbed(side)) == len(side.result["llmopt"]["runs"]) for side in (base, new)]
    if left[0] == left[1] or is_paired(base, new):
        return None
    side, data = (sides[0], base) if left[0] else (sides[1], new)
    why = data.result["llmopt"]["runs"][0].get("disturbed_because") or "by their own evidence"
    return Difference(DISTURBANCE, f"every pass of the {side} run was disturbed: {why}")


def disturbed(data: RunData) -> list[int]:
    """Numbers of the passes that were disturbed by their own evidence."""
    passes = data.result["llmopt"]["runs"]
    return [number for number, one in enumerate(passes) if one.get("disturbed")]


def other_lengths(base: Sequence[RunData], new: Sequence[RunData]) -> Difference | None:
    """Why the speeds are of different work: a mean output length that is not shown to be within 10 %."""
    lengths = [mean_value(COUNTED["mean_output_len"], side) or 0.0 for side in (base, new)]
    if lengths[0] == lengths[1]:
        return None
    change = length_change(base, new)
    reach = change.half_width(1 - FALSE_PASS) if change else 0.0
    relative = change.log_ratio if change else relative_change(*lengths)
    if abs(relative) + reach <= LENGTH_TOLERANCE:
        return None
    return Difference(
        PROMPTS,
        f"the mean output length went from {lengths[0]:.1f} to {lengths[1]:.1f} tokens"
        f"{f' (± {reach:.1%})' if reach else ''}: the speeds are of different work (fix the lengths with "
        "--ignore-eos)",
    )
