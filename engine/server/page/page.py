"""The page at `/`: a chat and a live view of the engine, from static files of this package only."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import Response, StreamingResponse

from ..loop.loop import EngineLoop
from ..metrics.state import StateFeed
from ..protocol.errors import ApiError

FOLDER = Path(__file__).with_name("static")
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def page_router(loop: EngineLoop) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    files = {path.name: path.read_bytes() for path in sorted(FOLDER.iterdir())}
    feed = StateFeed(loop)

    @router.get("/")
    async def index() -> Response:
        return _file("index.html", files["index.html"])

    @router.get("/page/{name}")
    async def part(name: str) -> Response:
        if name not in files:
            raise ApiError(404, f"the page has no file {name!r}")
        return _file(name, files[name])

    @router.get("/engine/state")
    async def state() -> Response:
        """Engine snapshots as server-sent events, four per second."""
        return StreamingResponse(
            feed.events(),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    return router


def _file(name: str, content: bytes) -> Response:
    return Response(content, media_type=MEDIA_TYPES[Path(name).suffix], headers=HEADERS)
