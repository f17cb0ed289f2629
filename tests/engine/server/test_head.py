"""HEAD on every path that has a GET."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import httpx
import pytest
from fastapi.routing import iter_route_contexts
from llmopt.engine.server.protocol.server_options import ServerOptions
from llmopt.engine.server.requests.middleware import HeadMiddleware

from ...support.live_server import RunningServer, make_engine, running

PARAMETERS = {"{name:path}": "tiny", "{name}": "index.html", "{response_id}": "resp_none"}
KEY = {"Authorization": "Bearer sesame"}


def gets(server: RunningServer) -> list[str]:
    """The paths of all GET routes, their parameters filled in."""
    paths: list[str] = []
    for context in iter_route_contexts(server.app.routes):
        if "GET" in (context.methods or ()):
            path = context.path or ""
            for name, value in PARAMETERS.items():
                path = path.replace(name, value)
            paths.append(path)
    return paths


def told(http: httpx.Client, method: str, path: str) -> tuple[int, dict[str, str]]:
    """Status and headers, for a stream too."""
    with http.stream(method, path, headers={"X-Request-Id": "mine"}) as response:
        headers = dict(response.headers)
        if method == "HEAD":
            assert response.read() == b""
    headers.pop("date")
    if path == "/metrics":  # it counts the requests before it
        assert int(headers.pop("content-length")) > 0
    return response.status_code, headers


@pytest.mark.parametrize("key", [{}, KEY], ids=["no key", "key"])
def test_head_tells_what_get_does(key: dict[str, str]) -> None:
    options = ServerOptions(api_keys=("sesame",))
    with running(make_engine("stories260K"), options) as server, server.http(headers=key) as http:
        paths = [*gets(server), "/page/none.css", "/v1/models/other", "/v1/completions"]
        assert {"/", "/health", "/ready", "/metrics", "/v1/models", "/v1/models/tiny"} <= {*paths}
        assert {"/page/index.html", "/engine/state", "/openapi.json", "/api/tags"} <= {*paths}
        for path in paths:
            assert told(http, "HEAD", path) == told(http, "GET", path), path


def test_a_page_elsewhere_may_ask_for_heads() -> None:
    options = ServerOptions(cors_origins=("https://app.example",))
    asks = {"Origin": "https://app.example", "Access-Control-Request-Method": "HEAD"}
    with running(make_engine("stories260K"), options) as server, server.http() as http:
        assert http.options("/v1/models", headers=asks).status_code == 200


def test_a_response_that_fails_behind_its_start_leaves_no_task(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fails(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("behind the start")

    async def ask() -> list[str]:
        sent: list[str] = []

        async def send(message: Any) -> None:
            sent.append(message["type"])

        scope: Any = {"type": "http", "method": "HEAD"}
        await HeadMiddleware(fails)(scope, lambda: asyncio.sleep(0), send)  # pyright: ignore
        gc.collect()
        return sent

    assert asyncio.run(ask()) == ["http.response.start", "http.response.body"]
    assert "never retrieved" not in caplog.text
