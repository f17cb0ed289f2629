"""Where the time of a decode step goes, and why smaller weights did or did not make it shorter.

Measured in a short pass of its own behind the others, because looking takes time too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..page.page import Table
from ..page.text import number, percent
from ..workloads.workload import Workload
from .load import drive
from .target import Target

if TYPE_CHECKING:
    from ...engine.engine import Engine

MOST_REQUESTS = 16
PARTS = {
    "scheduling": "choosing what a step computes, and booking what came out of it",
    "preparing": "laying out the inputs of the step and taking its results apart",
    "kernels": "the model itself: operations and launching them",
    "sampling": "choosing the tokens",
    "detokenizing": "tokens to text, and the outputs",
    "rest": "everything else within the step",
}
FORMULA = (
    "mean over the decode-only steps of a pass of its own in a serial loop, in which every part is timed; on "
    "a GPU each part waits for its kernels"
)


def step_split(
    engine: Engine, target: Target, workload: Workload, limit: int | None
) -> dict[str, Any] | None:
    """Milliseconds of a decode step by part, with its sum; None where no step only decodes.

    Sends the first requests of `workload` once more.
    """
    items = tuple(replace(item, arrival_seconds=0.0) for item in workload.items[:MOST_REQUESTS])
    few = Workload(workload.name, workload.source, items)
    engine.reset_prefix_cache()
    # In an overlapped loop the parts lie beside each other.
    with engine.computing_serially(), _timed(engine) as steps:
        seen = drive(target, few, limit, description="where a step goes")
    pairs = zip(seen.steps, steps, strict=False)
    chosen = [parts for step, parts in pairs if step.decode_only]
    if not chosen or seen.interrupted:
        return None
    mean = {part: 1000 * sum(one[part] for one in chosen) / len(chosen) for part in PARTS}
    return {"num_steps": len(chosen), "step_ms": sum(mean.values()), "parts_ms": mean}


@contextmanager
def _timed(engine: Engine) -> Iterator[list[dict[str, float]]]:
    """Seconds of each part of every step, while the block lasts."""
    runner: Any = engine.runner
    scheduler: Any = engine.scheduler
    answers: Any = engine.answers
    wait = _waiter(str(engine.device))
    steps: list[dict[str, float]] = []
    now: dict[str, float] = {}

    def clocked(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            wait()
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                wait()
                now[part] = now.get(part, 0.0) + time.perf_counter() - start

        return timed

    def step(call: Callable[..., Any]) -> Callable[..., Any]:
        whole = clocked("whole", call)

        def timed() -> Any:
            now.clear()
            found = whole()
            steps.append(_apart(now))
            return found

        return timed

    places = [
        (scheduler, "schedule", "scheduling"),
        (scheduler, "update", "scheduling"),
        (runner, "execute", "execute"),
        (runner.decoder, "forward", "kernels"),
        (runner.decoder, "logits", "kernels"),
        (runner._sampler, "begin", "sampling"),
        (answers, "pieces", "detokenizing"),
    ]
    wrapped = [(owner, name, clocked(part, getattr(owner, name))) for owner, name, part in places]
    wrapped.append((engine, "step", step(engine.step)))
    # A sampler may be slowed on purpose in the same way: what was there comes back.
    before = [vars(owner).get(name) for owner, name, _ in wrapped]
    for owner, name, call in wrapped:
        setattr(owner, name, call)
    try:
        yield steps
    finally:
        for (owner, name, _), own in zip(wrapped, before, strict=True):
            delattr(owner, name)
            if own is not None:
                setattr(owner, name, own)


def _apart(now: Mapping[str, float]) -> dict[str, float]:
    part = {name: now.get(name, 0.0) for name in PARTS}
    execute = now.get("execute", 0.0)
    part["preparing"] = max(0.0, execute - part["kernels"] - part["sampling"])
    outside = part["scheduling"] + execute + part["detokenizing"]
    part["rest"] = max(0.0, now["whole"] - outside)
    return part


def _waiter(device: str) -> Callable[[], None]:
    if not device.startswith("cuda"):
        return lambda: None
    import torch

    return lambda: torch.cuda.synchronize(device)


def split_table(results: Mapping[str, Mapping[str, Any]]) -> Table | None:
    """The parts of a step of one or several runs, those that have them."""
    splits = {
        name: found for name, r in results.items() if (found := r["llmopt"].get("step_split"))
    }
    if not splits:
        return None
    rows = [
        [part, *(number(one["parts_ms"][part]) for one in splits.values()), words]
        for part, words in PARTS.items()
    ]
    rows.append(["whole step", *(number(one["step_ms"]) for one in splits.values()), ""])
    return Table(["ms of a decode step", *splits, ""], rows, caption=f"{FORMULA}.")


def split_sentence(result: Mapping[str, Any]) -> str | None:
    """Which part of a step is largest."""
    if not (found := result["llmopt"].get("step_split")):
        return None
    part, spent = max(found["parts_ms"].items(), key=lambda pair: pair[1])
    return (
        f"Of the {number(found['step_ms'])} ms of a decode step {percent(spent / found['step_ms'], 0)} go to "
        f"{part} ({PARTS[part]})."
    )


def reason_in_words(base: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """What smaller weights could have saved, and where the step's time went instead; None where the weights
    are not smaller or a run does not know."""
    splits = [side["llmopt"].get("step_split") for side in (base, new)]
    bytes_held = [side["llmopt"]["memory"]["weight_bytes"] for side in (base, new)]
    roofline = base["llmopt"].get("roofline")
    if None in (*splits, *bytes_held) or not roofline or bytes_held[1] >= bytes_held[0]:
        return None
    before, after = splits
    saved = 1000 * (bytes_held[0] - bytes_held[1]) / roofline["ceilings"]["bandwidth"]
    change = after["step_ms"] - before["step_ms"]
    moves = {p: after["parts_ms"][p] - before["parts_ms"][p] for p in PARTS}
    part = max(moves, key=lambda name: abs(moves[name]))
    said = (
        f"The bytes saved take {number(saved, 3)} ms to read at the measured bandwidth, "
        f"{percent(saved / before['step_ms'])} of the base's decode step of "
        f"{number(before['step_ms'])} ms: more than that smaller weights alone cannot save. "
        f"The step is {number(abs(change))} ms "
        f"{'shorter' if change < 0 else 'longer'}; most of it is {part} ({moves[part]:+.2f} ms)"
    )
    if change >= 0 and part == "kernels":
        return f"{said}: unpacking the codes costs more than the bytes saved bring."
    return f"{said}."
