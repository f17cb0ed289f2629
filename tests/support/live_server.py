"""A real server on a free port of this machine, in a thread, with the bundled model behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import openai
import uvicorn
from fastapi import FastAPI
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.scheduling.outputs import EngineStats, RequestOutput
from llmopt.engine.server.app import create_app
from llmopt.engine.server.launch import base_url, bind
from llmopt.engine.server.protocol.server_options import ServerOptions
from llmopt.engine.server.requests.connection import bounded_connections
from llmopt.engine.server.requests.loop import EngineLoop

T = TypeVar("T")

HANG_SECONDS = 120.0
"""After which a test gives up. It only bounds a hang: neighbours may take most of a machine."""


def eventually(condition: Callable[[], object], otherwise: str = "it does not get there") -> None:
    """Wait until `condition` holds."""
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.005)


@dataclass
class RunningServer:
    """A running server, with access to its engine."""

    url: str
    engine: Engine
    loop: EngineLoop
    event_loop: asyncio.AbstractEventLoop
    app: FastAPI

    def http(self, **options: object) -> httpx.Client:
        # Reading the certificates of authorities, which http:// does not need, takes 30 ms a client.
        plain = {"trust_env": False, "verify": False, "timeout": HANG_SECONDS}
        return httpx.Client(base_url=self.url, **plain, **options)  # type: ignore[arg-type]

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key="none",
            max_retries=0,
            http_client=openai.DefaultHttpxClient(trust_env=False, verify=False),
        )

    def on_engine(self, work: Callable[[Engine], T]) -> T:
        """Run `work` on the engine's thread."""
        future = asyncio.run_coroutine_threadsafe(self.loop.run(work), self.event_loop)
        return future.result(timeout=HANG_SECONDS)

    def wait_for(self, condition: Callable[[Engine], bool]) -> None:
        eventually(lambda: self.on_engine(condition), "the engine does not get there")

    def wait_until_idle(self) -> EngineStats:
        """Wait until the engine is idle, check its invariants, and return its counters."""
        self.wait_for(lambda engine: not engine.has_unfinished())

        def books(engine: Engine) -> EngineStats:
            engine.scheduler.check_integrity()
            return engine.stats

        return self.on_engine(books)


@contextlib.contextmanager
def running(
    engine: Engine,
    options: ServerOptions | None = None,
    *,
    is_warm: bool = True,
    **app_options: Any,
) -> Iterator[RunningServer]:
    app = create_app(engine, model_name="tiny", options=options, **app_options)
    listener, tls = bind("127.0.0.1", 0), app.state.options.tls
    config = uvicorn.Config(
        app,
        loop="asyncio",
        ws="none",
        http=bounded_connections(app.state.options),
        lifespan="on",
        log_level="critical",
        **({} if tls is None else tls.for_uvicorn()),
    )
    server = uvicorn.Server(config)
    started = threading.Event()
    event_loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        event_loops.append(asyncio.get_running_loop())
        serving = asyncio.ensure_future(server.serve([listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if is_warm:
            await app.state.loop.is_warm.wait()
        started.set()
        await serving

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert started.wait(HANG_SECONDS) and server.started
        url = base_url(listener, tls)
        yield RunningServer(url, engine, app.state.loop, event_loops[0], app)
    finally:
        server.should_exit = True
        thread.join(HANG_SECONDS)
    assert not thread.is_alive()


def make_engine(model: str = "stories3M", **options: Any) -> Engine:
    return Engine(EngineConfig(model=model, dtype="float32", num_threads=1, **options))


@contextlib.contextmanager
def slow_steps(server: RunningServer, seconds: float = 0.005) -> Iterator[None]:
    """Every step takes a while, so that a client can leave in the middle on any machine."""
    step = server.engine.step

    def slow() -> list[RequestOutput]:
        time.sleep(seconds)
        return step()

    server.engine.step = slow  # type: ignore[method-assign]
    try:
        yield
    finally:
        server.engine.step = step  # type: ignore[method-assign]


@contextlib.contextmanager
def held_steps(server: RunningServer, num_free: int = 0) -> Iterator[threading.Event]:
    """No step but the next `num_free` ends before the event is set, as it is at the end."""
    step, may_step, free = server.engine.step, threading.Event(), iter(range(num_free))

    def held() -> list[RequestOutput]:
        if next(free, None) is None:
            may_step.wait(HANG_SECONDS)
        return step()

    server.engine.step = held  # type: ignore[method-assign]
    try:
        yield may_step
    finally:
        may_step.set()
        server.engine.step = step  # type: ignore[method-assign]


def events(server: RunningServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, which must end with [DONE]."""
    with (
        server.http() as http,
        http.stream("POST", path, json={**body, "stream": True}) as response,
    ):
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
