"""The page at `/`: a chat and a live view of the engine, fed by snapshots as server-sent events.

Its files are this package's own: no outbound requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from ...config.adapters import adapter_name
from ...core.engine import Engine
from ...scheduling.request import Request, RequestStatus
from ..protocol.errors import ApiError, Unavailable
from ..protocol.server_options import ServerOptions
from ..requests.loop import EngineLoop
from ..requests.metrics import ServerMetrics, speed_features
from ..requests.request_record import record_of
from .service import EventStream, server_sent

INTERVAL_SECONDS = 0.25
MAX_VIEWERS = 32
"""Live views at a time. Each takes one of the connections that are reserved for probes."""
MAX_WAITING = 40
"""Number of waiting sequences listed; the rest are only counted."""


class StateFeed:
    """Periodic snapshots of the engine, taken between two steps, only while a client subscribes. Subscribers
    share them, so a second one costs the engine nothing."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._taken_at = -INTERVAL_SECONDS
        self._latest = b""
        self._lock = asyncio.Lock()

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events, until the client disconnects, the server stops, or the engine has failed."""
        metrics = self._loop.metrics
        while not self._loop.is_draining:
            try:
                async with self._lock:
                    if time.perf_counter() - self._taken_at >= INTERVAL_SECONDS / 2:
                        state = await self._loop.run(lambda engine: snapshot(engine, metrics))
                        self._latest, self._taken_at = server_sent(state), time.perf_counter()
                yield self._latest
            except Unavailable as error:
                yield server_sent({"unavailable": str(error)})
                return
            await asyncio.sleep(INTERVAL_SECONDS)


def snapshot(engine: Engine, metrics: ServerMetrics) -> dict[str, Any]:
    """Requests, blocks, counters and histograms; no text. Must run on the engine thread."""
    scheduler, now = engine.scheduler, time.perf_counter()
    pool, stats = scheduler.pool, engine.stats
    waiting = [r for r in scheduler.requests() if r.status is RequestStatus.WAITING]
    ttft = metrics.distributions.time_to_first_token_seconds
    itl = metrics.distributions.inter_token_latency_seconds
    return {
        "now": now,
        "engine": {
            "device": str(engine.device),
            "dtype": str(engine.dtype).removeprefix("torch."),
            "max_model_len": engine.max_model_len,
            "max_num_seqs": scheduler.config.max_num_seqs,
            **speed_features(engine),
        },
        "blocks": {
            "total": pool.num_usable,
            "size": scheduler.config.block_size,
            "used": stats.kv_blocks_used,
            "kept": runs(pool.kept_block_ids()),
        },
        "running": [
            _sequence(r, now) | {"blocks": runs(r.held_block_ids)} for r in scheduler.running
        ],
        "waiting": [_sequence(request, now) for request in waiting[:MAX_WAITING]],
        "num_waiting": len(waiting),
        "counters": {
            "steps": metrics.num_steps,
            "prompt_tokens": metrics.num_prompt_tokens,
            "generation_tokens": metrics.num_generation_tokens,
            "preemptions": stats.num_preemptions,
            "prefix_queries": stats.prefix_cache_queries,
            "prefix_hits": stats.prefix_cache_hits,
            "kept_tokens": stats.num_kept_tokens,
            "evicted_tokens": stats.num_evicted_tokens,
            "draft_tokens": stats.num_draft_tokens,
            "accepted_tokens": stats.num_accepted_tokens,
            "finished": sum(metrics.finished.values()),
        },
        "step_seconds": metrics.step_seconds,
        "ttft": {"bounds": ttft.bounds, "counts": list(ttft.counts)},
        "itl": {"bounds": itl.bounds, "counts": list(itl.counts)},
        "preemptions": [
            {"id": name, "seconds_ago": now - at, "tokens": num_tokens}
            for name, at, num_tokens in reversed(metrics.preemptions)
        ],
    }


def runs(ids: Iterable[int]) -> list[int]:
    """Run-length encoding of ids: start, length, ...; most blocks of a sequence are contiguous."""
    encoded: list[int] = []
    for block_id in sorted(ids):
        if encoded and encoded[-2] + encoded[-1] == block_id:
            encoded[-1] += 1
        else:
            encoded += [block_id, 1]
    return encoded


def _sequence(request: Request, now: float) -> dict[str, Any]:
    return {
        "id": request.sequence_id,
        "lora": None if request.lora is None else adapter_name(request.lora),
        "prompt_tokens": request.num_prompt_tokens,
        "cached_tokens": request.num_cached_tokens,
        "computed_tokens": request.num_computed_tokens,
        "evicted_tokens": request.num_evicted_tokens,
        "output_tokens": request.num_output_tokens,
        "max_tokens": request.max_tokens,
        "preemptions": request.num_preemptions,
        "seconds": now - request.times.arrival,
    }


FOLDER = Path(__file__).with_name("static")
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Cache-Control": "no-cache",
    # Scripts are files of this package alone, and no script of theirs may make elements of text (innerHTML).
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; object-src 'none'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def add_page(app: FastAPI, loop: EngineLoop, options: ServerOptions) -> None:
    files = {path.name: path.read_bytes() for path in sorted(FOLDER.iterdir())}
    feed = StateFeed(loop)

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return await part("index.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        if name not in files:
            raise ApiError(404, f"the page has no file {name!r}")
        return Response(files[name], media_type=MEDIA_TYPES[Path(name).suffix], headers=HEADERS)

    @app.get("/engine/state", include_in_schema=False)
    async def state(request: HttpRequest) -> Response:
        """Engine snapshots as server-sent events, four per second."""
        record_of(request).hold("live views", 1, options.share_of_key(MAX_VIEWERS))
        return EventStream(feed.events(), lambda: None, "text/event-stream")
