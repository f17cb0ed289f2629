"""A server's start and end: answers while the model loads, the delay after SIGTERM, and the drain."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from asyncio import selector_events
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from llmopt.engine.scheduling.outputs import RequestOutput
from llmopt.engine.server import launch
from llmopt.engine.server.app import create_app
from llmopt.engine.server.endpoints.capabilities import Constrainer
from llmopt.engine.server.launch import base_url, bind, serve
from llmopt.engine.server.protocol.server_options import ServerOptions

from ...support.live_server import make_engine

STREAM: dict[str, Any] = {
    "prompt": "Once", "max_tokens": 60, "ignore_eos": True, "stream": True, "temperature": 0
}  # fmt: skip


def serve_while(
    client: Callable[[str], None],
    engine: Any = None,
    listener: socket.socket | None = None,
    **options: Any,
) -> bool:
    """Serve until the client, in a thread, has sent SIGTERM; what it raises is raised here. Returns True if
    the end of the process is still bounded."""
    listener, failures = listener or bind("127.0.0.1", 0), []
    app = create_app(
        engine or make_engine("stories260K"), model_name="tiny", options=ServerOptions(**options)
    )

    def run() -> None:
        try:
            client(base_url(listener))
        except BaseException as error:
            failures.append(error)
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=run)
    last_resort = serve(app, listener, on_ready=thread.start)
    is_bounded = last_resort.is_alive()
    last_resort.cancel()
    thread.join(20)
    if failures:
        raise failures[0]
    return is_bounded


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="Linux tells a socket's backlog")
def test_a_turn_of_the_event_loop_accepts_few_of_many_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """asyncio accepts as many connections at once as it lets wait in the kernel."""
    listener, accepted = bind("127.0.0.1", 0), []
    loops: Any = selector_events.BaseSelectorEventLoop
    start = loops._start_serving

    def watched(*given: Any) -> None:
        accepted.append(given[5])
        start(*given)

    monkeypatch.setattr(loops, "_start_serving", watched)
    waiting = []

    def client(_: str) -> None:
        state = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
        waiting.append(int.from_bytes(state[28:32], sys.byteorder))
        os.kill(os.getpid(), signal.SIGTERM)

    serve_while(client, listener=listener)
    limit = int(Path("/proc/sys/net/core/somaxconn").read_text())
    assert accepted == [launch.ACCEPTED_AT_A_TIME] and waiting == [min(launch.BACKLOG, limit)]


def test_while_the_model_loads_every_path_is_503() -> None:
    listener = bind("127.0.0.1", 0)
    url = base_url(listener)
    with launch.answering_while_loading(listener, None):
        for method, path in (("GET", "/health"), ("POST", "/v1/completions")):
            answer = httpx.request(method, url + path, trust_env=False)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["code"] == "loading_model"

    def client(url: str) -> None:
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
        os.kill(os.getpid(), signal.SIGTERM)

    serve_while(client, listener=listener)


def test_after_sigterm_it_is_not_ready_but_serves_until_the_delay_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers: list[launch.Server] = []

    class Listed(launch.Server):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            servers.append(self)

    monkeypatch.setattr(launch, "Server", Listed)
    engine, ended = make_engine("stories260K"), []
    step = engine.step

    def slow() -> list[RequestOutput]:
        time.sleep(0.0 if ended else 0.02)
        return step()

    engine.step = slow  # type: ignore[method-assign]

    def client(url: str) -> None:
        with httpx.Client(base_url=url, trust_env=False, timeout=120) as http:
            assert "connection" not in http.get("/ready").headers
            with http.stream("POST", "/v1/completions", json=STREAM) as response:
                lines = response.iter_lines()
                next(lines)
                os.kill(os.getpid(), signal.SIGTERM)
                while (ready := http.get("/ready")).status_code == 200:
                    time.sleep(0.01)
                assert ready.status_code == 503 and ready.headers["connection"] == "close"
                assert http.get("/health").status_code == 200
                late = http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2})
                assert late.status_code == 200 and late.headers["connection"] == "close"
                loop = servers[0]._event_loop
                assert loop is not None
                loop.call_soon_threadsafe(servers[0]._hurried.set)
                with pytest.raises(httpx.ConnectError):
                    while True:
                        # A connection that nobody had accepted yet is reset with its listener.
                        with contextlib.suppress(httpx.ReadError, httpx.RemoteProtocolError):
                            http.get("/ready")
                ended.append(True)
                assert [line for line in lines if line][-1] == "data: [DONE]"

    serve_while(client, engine, shutdown_delay_seconds=60, drain_seconds=30)
    assert ended


def test_a_second_signal_ends_the_delay() -> None:
    began = threading.Event()

    def client(url: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        while httpx.get(f"{url}/ready", trust_env=False).status_code == 200:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        began.set()

    serve_while(client, shutdown_delay_seconds=3600)
    assert began.is_set()


def test_a_request_that_no_step_computes_is_told_and_the_exit_stays_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that waits for a worker thread is cancelled after the drain; threads that go on cannot keep the
    process, because the timer of the signal still runs when `serve` returns."""
    is_reached = threading.Event()

    class Hurried(launch.Server):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.config.timeout_graceful_shutdown = 0

    async def wait_for_ever(*_: Any) -> None:
        is_reached.set()
        await asyncio.sleep(3600)

    monkeypatch.setattr(launch, "Server", Hurried)
    monkeypatch.setattr(Constrainer, "mask", wait_for_ever)
    answers: list[httpx.Response] = []

    def ask(url: str) -> None:
        body = {"prompt": "Once", "guided_regex": "a"}
        answers.append(httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=120))

    def client(url: str) -> None:
        asking = threading.Thread(target=ask, args=(url,))
        asking.start()
        assert is_reached.wait(60)
        os.kill(os.getpid(), signal.SIGTERM)
        asking.join(60)

    is_bounded = serve_while(client, drain_seconds=0)
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["message"] == "the server is stopping"
    assert is_bounded


def test_a_step_without_end_does_not_keep_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, may_step, codes = make_engine("stories260K"), threading.Event(), list[int]()
    step = engine.step

    def end(code: int) -> None:
        codes.append(code)
        may_step.set()

    def held() -> list[RequestOutput]:
        if not may_step.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
            may_step.wait()
        return step()

    def client(url: str) -> None:
        with httpx.Client(base_url=url, trust_env=False, timeout=120) as http:
            engine.step = held  # type: ignore[method-assign]
            assert http.post("/v1/completions", json=STREAM).status_code in (200, 503)

    monkeypatch.setattr(launch, "EXIT_SECONDS", 0.1)
    monkeypatch.setattr(
        launch, "os", SimpleNamespace(_exit=end, environ=os.environ, getpid=os.getpid)
    )
    serve_while(client, engine, drain_seconds=0)
    assert codes == [0]
