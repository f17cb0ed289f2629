"""Load generation: sends a workload to a target in a closed or open loop."""

from __future__ import annotations

import gc
import math
import time
from collections import deque
from dataclasses import dataclass
from datetime import datetime

from ...quant.base.errors import BadInput
from ...quant.base.progress import Progress, Silent
from ..metrics.trace import LoadPass, RequestTrace
from ..workloads.workload import Workload
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
    progress: Progress | None = None,
    description: str = "bench",
) -> LoadPass:
    """Send every item when it is due and the concurrency limit allows, and record the deliveries.

    An interrupt ends the pass: finished requests are kept, requests in flight are dropped, and the pass is
    marked as interrupted.
    """
    progress = progress or Silent()
    pending = deque(sorted(workload.items, key=lambda item: item.arrival_seconds))
    in_flight: dict[str, RequestTrace] = {}
    ended: list[RequestTrace] = []
    limit = max_concurrency or len(pending)
    interrupted = False
    progress.start(description, len(pending), "requests")
    # Garbage collection would pause the loop at arbitrary moments.
    gc.collect(1)
    gc.freeze()
    origin, began_at = time.perf_counter(), datetime.now().timestamp()
    try:
        while pending or in_flight:
            now = time.perf_counter() - origin
            while pending and len(in_flight) < limit and pending[0].arrival_seconds <= now:
                item = pending.popleft()
                now = time.perf_counter() - origin
                in_flight[item.request_id] = RequestTrace(
                    item.request_id,
                    len(item.prompt_token_ids),
                    item.output_len,
                    scheduled=item.arrival_seconds,
                    sent=now,
                )
                target.send(item)
            may_send = pending and len(in_flight) < limit
            until = origin + pending[0].arrival_seconds if may_send else None
            for chunk in target.receive(until):
                if record(in_flight[chunk.request_id], chunk, origin):
                    ended.append(in_flight.pop(chunk.request_id))
                    progress.advance()
    except KeyboardInterrupt:
        interrupted = True
        target.cancel()
    finally:
        duration = time.perf_counter() - origin
        gc.unfreeze()
        progress.finish()
    order = {item.request_id: place for place, item in enumerate(workload.items)}
    ended.sort(key=lambda trace: order[trace.request_id])
    return LoadPass(ended, duration, target.take_steps(origin), interrupted, began_at)


def record(trace: RequestTrace, chunk: Chunk, origin: float) -> bool:
    """Record a chunk on its request's trace; True when the request has finished."""
    if chunk.num_tokens:
        trace.chunk_times.append(chunk.time - origin)
        trace.chunk_tokens.append(chunk.num_tokens)
    trace.text += chunk.text
    trace.cached_tokens = max(trace.cached_tokens, chunk.cached_tokens)
    if chunk.finished:
        trace.error = chunk.error or ("" if trace.chunk_times else "the response has no token")
        trace.success = not trace.error
    return chunk.finished
