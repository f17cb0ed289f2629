"""Load generation: sends a workload to a target in a closed or open loop."""

from __future__ import annotations

import gc
import math
import time
from dataclasses import dataclass
from datetime import datetime

from ...quant.base.errors import BadInput
from ...quant.base.progress import Progress, Silent
from ..metrics.trace import LoadPass, RequestTrace
from ..workloads.workload import Workload
from .dialogue import Dialogue, Dialogues
from .pass_progress import PassProgress
from .target import Chunk, Target


@dataclass(frozen=True, slots=True)
class Load:
    """Load settings: request rate, burstiness, concurrency.

    Attributes:
        request_rate: requests per second; infinity means that all are due at once.
        burstiness: shape of the gamma gaps; 1 is Poisson.
        max_concurrency: maximum requests in flight; None is no limit. With an infinite rate this is a
            closed loop of that many users.
    """

    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None

    def __post_init__(self) -> None:
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise BadInput(f"--max-concurrency is {self.max_concurrency}: it must be at least 1")


def drive(
    target: Target,
    workload: Workload,
    max_concurrency: int | None,
    *,
    window: float | None = None,
    progress: Progress | None = None,
    description: str = "bench",
) -> LoadPass:
    """Send every item when it is due and the concurrency limit allows, and record the deliveries.

    A conversation occupies its place until its last answer has ended: each turn is due its think time after
    the answer before, and a failed turn ends it. With a `window` (seconds) the workload is repeated until it
    closes, and what is in flight then is drained.

    An interrupt ends the pass: finished requests are kept, requests in flight are dropped, and the pass is
    marked as interrupted.
    """
    shown = PassProgress(progress or Silent(), description, workload.num_requests, window)
    dialogues = Dialogues(workload, max_concurrency, window)
    in_flight: dict[str, tuple[RequestTrace, Dialogue]] = {}
    ended: list[RequestTrace] = []
    interrupted = False
    # Garbage collection would pause the loop at arbitrary moments.
    gc.collect(1)
    gc.freeze()
    origin, began_at = time.perf_counter(), datetime.now().timestamp()
    try:
        while True:
            while dialogue := dialogues.take_due(time.perf_counter() - origin):
                now = time.perf_counter() - origin
                in_flight[dialogue.request_id] = dialogue.trace(now), dialogue
                target.send(dialogue.request())
            due = dialogues.next_due()
            if due is None and not in_flight:
                break
            for chunk in target.receive(None if due is None else origin + due):
                trace, dialogue = in_flight[chunk.request_id]
                if record(trace, chunk, origin):
                    ended.append(trace)
                    del in_flight[chunk.request_id]
                    dialogues.answered(dialogue, trace)
                    shown.request_ended(trace.ended)
    except KeyboardInterrupt:
        interrupted = True
        target.cancel()
    finally:
        seconds = time.perf_counter() - origin
        gc.unfreeze()
        shown.finish()
    order = {item.request_id: place for place, item in enumerate(workload.items)}
    ended.sort(key=lambda trace: (trace.cycle, order[trace.conversation], trace.turn))
    duration = seconds if window is None else window_duration(window, seconds, interrupted)
    steps = [step for step in target.take_steps(origin) if step.end <= duration or window is None]
    return LoadPass(
        ended,
        duration,
        steps,
        interrupted,
        began_at,
        window=None if window is None else duration,
        drain_seconds=seconds - duration if window is not None else 0.0,
    )


def window_duration(window: float, seconds: float, interrupted: bool) -> float:
    """Seconds that a pass of fixed duration counts: the window, or what an interrupt left of it."""
    return min(window, seconds) if interrupted else window


def record(trace: RequestTrace, chunk: Chunk, origin: float) -> bool:
    """Record a chunk on its request's trace; True when the request has finished."""
    if chunk.num_tokens:
        trace.chunk_times.append(chunk.time - origin)
        trace.chunk_tokens.append(chunk.num_tokens)
    trace.text += chunk.text
    if trace.prompt_token_ids:
        trace.token_ids.extend(chunk.token_ids)
    trace.cached_tokens = max(trace.cached_tokens, chunk.cached_tokens)
    if chunk.finished:
        trace.error = chunk.error or ("" if trace.chunk_times else "the response has no token")
        trace.success = not trace.error
    return chunk.finished
