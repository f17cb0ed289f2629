"""Phase breakdown of decode steps, and why smaller weights did or did not shorten them.

Measured with the engine's step trace in a short extra pass, because timing phases on a GPU synchronises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...engine.execution.step import Phase
from ...engine.execution.step_loop import StepRecorder, StepTrace
from ..page.page import number, percent
from ..workloads.workload import Workload
from .load import Target, drive

if TYPE_CHECKING:
    from ...engine.engine import Engine

MAX_REQUESTS = 16
PARTS = {
    "scheduling": "scheduling the batch of a step, and processing its outputs",
    "preparing": "input preparation: token ids, positions, slot mapping, block tables",
    "kernels": "the model's forward pass and LM head: kernels and launching them",
    "sampling": "sampling tokens from the logits, and copying them to the host",
    "detokenizing": "tokens to text, and building the outputs",
    "rest": "everything else within the step",
}
DRAFTING = {"drafting": "proposing draft tokens"}
"""The additional phase of steps with speculative decoding."""
PART_OF: Mapping[Phase, str] = {
    "schedule": "scheduling",
    "prepare_inputs": "preparing",
    "draft": "drafting",
    "forward": "kernels",
    "sample": "sampling",
    "fetch_tokens": "sampling",
    "update": "scheduling",
    "detokenize": "detokenizing",
}
FORMULA = (
    "mean over the decode-only steps of a separate pass without async scheduling, in which the engine times "
    "every phase; on a GPU each phase waits for its kernels"
)


def step_split(
    engine: Engine, target: Target, workload: Workload, limit: int | None
) -> dict[str, Any] | None:
    """Milliseconds of a decode step by phase, with their sum; None where there is no decode-only step.

    Sends the first requests of `workload` again.
    """
    items = tuple(
        replace(item, arrival_seconds=0.0, turns=()) for item in workload.items[:MAX_REQUESTS]
    )
    few = Workload(workload.name, workload.source, items)
    engine.reset_prefix_cache()
    recorder = engine.recorder = StepRecorder(engine.scheduler, phases=True)
    try:
        # Under async scheduling the phases overlap.
        with engine.computing_serially():
            seen = drive(target, few, limit, description="step phases")
    finally:
        engine.recorder = None
    steps = [step for step in recorder.steps if step.decode_only]
    return None if seen.interrupted or not steps else mean_split(steps)


def mean_split(steps: Sequence[StepTrace]) -> dict[str, Any]:
    """Mean phase times of steps taken without async scheduling."""
    split = {part: 0.0 for part in PARTS if part != "rest"}
    for step in steps:
        for phase, seconds in step.phases.items():
            part = PART_OF[phase]
            split[part] = split.get(part, 0.0) + 1000 * seconds / len(steps)
    step_ms = 1000 * sum(step.step_seconds for step in steps) / len(steps)
    return {
        "num_steps": len(steps),
        "replayed_steps": sum(step.replayed for step in steps),
        "step_ms": step_ms,
        "parts_ms": split | {"rest": step_ms - sum(split.values())},
    }


def split_sentence(result: Mapping[str, Any]) -> str | None:
    """The largest phase of a step, and whether the forward pass is replayed from a graph."""
    if not (split := result["llmopt"].get("step_split")):
        return None
    part, spent = max(split["parts_ms"].items(), key=lambda pair: pair[1])
    return (
        f"Of the {number(split['step_ms'])} ms of a decode step {percent(spent / split['step_ms'], 0)} go to "
        f"{part} ({(PARTS | DRAFTING)[part]}).{_replayed(split)}"
    )


def _replayed(split: Mapping[str, Any]) -> str:
    """Eager or graph replay, as a sentence; empty for a record without it."""
    if (count := split.get("replayed_steps")) is None:
        return ""
    if not count:
        return " The forward pass is eager."
    share = percent(count / split["num_steps"], 0)
    return f" The forward pass is replayed from a captured graph in {share} of the steps."


def reason_in_words(base: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Explanation of a decode-time change: the saving that smaller weights allow, and the phase that changed
    most; None where the weights are not smaller, the breakdown is unknown, or its steps, which are taken one
    by one, moved against the TPOT of the runs."""
    splits = [side["llmopt"].get("step_split") for side in (base, new)]
    bytes_held = [side["llmopt"]["memory"]["weight_bytes"] for side in (base, new)]
    roofline = base["llmopt"].get("roofline")
    if None in (*splits, *bytes_held) or not roofline or bytes_held[1] >= bytes_held[0]:
        return None
    before, after = splits
    saved = 1000 * (bytes_held[0] - bytes_held[1]) / roofline["ceilings"]["bandwidth"]
    change = after["step_ms"] - before["step_ms"]
    tpot_before, tpot_after = (side.get("median_tpot_ms") for side in (base, new))
    if tpot_before and tpot_after and (tpot_after - tpot_before) * change < 0:
        return None
    moves = {
        part: after["parts_ms"].get(part, 0.0) - before["parts_ms"].get(part, 0.0)
        for part in before["parts_ms"] | after["parts_ms"]
    }
    # The phase with the largest change in the direction of the total.
    part = (min if change < 0 else max)(moves, key=lambda name: moves[name])
    share = "most" if abs(moves[part]) >= abs(change) / 2 else "the largest part"
    sentence = (
        f"The bytes saved take {number(saved, 3)} ms to read at the measured bandwidth, "
        f"{percent(saved / before['step_ms'])} of the base's decode step of "
        f"{number(before['step_ms'])} ms: more than that smaller weights alone cannot save. "
        f"The step is {number(abs(change))} ms "
        f"{'shorter' if change < 0 else 'longer'}; {share} of it is {part} ({moves[part]:+.2f} ms)"
    )
    if change >= 0 and part == "kernels":
        if before.get("replayed_steps") and not after.get("replayed_steps", True):
            return f"{sentence}: the base's forward pass is replayed from captured graphs, this one is eager."
        return f"{sentence}: dequantization costs more than the saved bytes gain."
    return f"{sentence}."
