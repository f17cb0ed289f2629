"""ASGI middleware that responds to HEAD wherever there is a GET."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadMiddleware:
    """Sends the status and headers that GET has, and ends the response there: a stream never does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        started = asyncio.get_running_loop().create_future()

        async def start(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                started.set_result(None)

        getting = asyncio.ensure_future(self._app({**scope, "method": "GET"}, receive, start))
        try:
            await asyncio.wait({getting, started}, return_when=asyncio.FIRST_COMPLETED)
            if not started.done():
                getting.result()
        finally:
            getting.cancel()
            await asyncio.wait({getting})
            if not getting.cancelled():
                getting.exception()  # the response has begun: its log line is the app's
        await send({"type": "http.response.body"})
