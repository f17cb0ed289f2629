"""Closed loop of a server in its steady state: TTFT, TPOT and throughput from the step model alone.

Each of `concurrency` clients sends its next request when the last one ends. While a request decodes, the
other residents are prefilled once each, which its decode steps wait for; a prompt waits for the step in
flight, for prompts before it, for its share of the clients' first burst, and where the cache holds fewer
sequences than there are clients, for a place in it. The event simulation refines these means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .step_model import Loads, StepModel, StepWork, operator_seconds

CHUNK_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class SteadyState:
    """Mean TTFT and TPOT in seconds, and output tokens per second of the whole deployment."""

    ttft_seconds: float
    tpot_seconds: float
    throughput: float


class LoopTimes(NamedTuple):
    """Seconds of the steps that a closed loop consists of: a decode of its residents, the same with one
    prompt in it, and a prompt's part of a step that is full of prompts."""

    decode: Any
    mixed: Any
    packed: Any


class Loop(NamedTuple):
    """A closed loop: prompt and output tokens, clients, and the sequences that are resident at once."""

    prompt: Any
    output: Any
    concurrency: Any
    resident: Any


class LoopWorks(NamedTuple):
    """Works whose seconds are `LoopTimes`; `packed` holds `packed_prompts`."""

    decode: StepWork
    mixed: StepWork
    packed: StepWork
    packed_prompts: int


def loop_works(loop: Loop, chunk_tokens: int = CHUNK_TOKENS) -> LoopWorks:
    """Steps of a loop. A prompt longer than a chunk counts as one step."""
    context = loop.prompt + loop.output / 2
    prompts = max(1, min(loop.concurrency, chunk_tokens // loop.prompt))
    attended = prompts * loop.prompt * (loop.prompt + 1) / 2
    return LoopWorks(
        StepWork.of(loop.resident, context),
        StepWork.of(loop.resident, context, loop.prompt),
        StepWork(0, 0, prompts * loop.prompt, attended, prompts),
        prompts,
    )


def loop_times(loads: tuple[Loads, Loads, Loads], prompts: Any, roofs: Any, p: Any) -> LoopTimes:
    """Times of a loop's steps from their loads; of numbers or columns."""
    decode, mixed, packed = (sum(operator_seconds(x, roofs, p).values()) for x in loads)
    return LoopTimes(decode, mixed, packed / prompts)


def closed_loop(loop: Loop, times: LoopTimes, p: Mapping[str, Any]) -> tuple[Any, Any]:
    """TTFT and TPOT in seconds of a loop; of numbers or columns."""
    added = times.mixed - times.decode
    others = loop.resident - 1
    tpot = times.decode + p["load.interference"] * others / loop.output * added
    prefilling = loop.resident * added
    busy = prefilling / (prefilling + loop.output * times.decode)
    queued = p["load.queue"] * busy / (1 - busy + 1 / (loop.resident + 1)) * added
    burst = p["load.burst"] * (loop.concurrency - 1) / 2 * times.packed
    turns = loop.concurrency / loop.resident - 1
    ttft = (
        p["load.fixed"]
        + p["load.prompt"] * added
        + p["load.steps"] * times.decode
        + queued
        + burst
        + turns * loop.output * tpot
    )
    return ttft, tpot


def throughput(loop: Loop, ttft: Any, tpot: Any) -> Any:
    """Output tokens per second of all clients."""
    return loop.concurrency * loop.output / (ttft + (loop.output - 1) * tpot)


def steady_state(
    model: StepModel,
    prompt: int,
    output: int,
    concurrency: int,
    *,
    resident: float | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> SteadyState:
    """Means of `concurrency` clients with prompts of `prompt` and answers of `output` tokens, of which the
    cache holds `resident` at once (by default what the step model expects)."""
    if resident is None:
        resident = model.resident_sequences(prompt, output)
    loop = Loop(prompt, output, concurrency, min(concurrency, resident))
    works, known = loop_works(loop, chunk_tokens), model.parameters
    loads = (model.loads(works.decode), model.loads(works.mixed), model.loads(works.packed))
    times = loop_times(loads, works.packed_prompts, model.roofs, known.values)
    ttft, tpot = closed_loop(loop, times, known.values)
    ttft *= known.ttft_factor({"prompt": prompt, "answer": output, "clients": concurrency})
    tpot *= known.tpot_factor
    return SteadyState(ttft, tpot, throughput(loop, ttft, tpot))
