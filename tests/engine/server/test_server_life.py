"""Clients that leave, engines that fail, and a thread that sleeps when there is nothing to do."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from live_server import RunningServer
from llmopt.engine.outputs import RequestOutput

LONG: dict[str, Any] = {"prompt": "Once", "max_tokens": 500, "ignore_eos": True, "n": 3, "seed": 1}


@contextlib.contextmanager
def slow_steps(server: RunningServer) -> Iterator[None]:
    """Every step takes a while, so that a client can leave in the middle on any machine."""
    step = server.engine.step

    def slow() -> list[RequestOutput]:
        time.sleep(0.005)
        return step()

    server.engine.step = slow  # type: ignore[method-assign]
    try:
        yield
    finally:
        server.engine.step = step  # type: ignore[method-assign]


def test_a_stream_that_is_left_frees_its_blocks(server: RunningServer) -> None:
    before = server.settle()
    with slow_steps(server):
        with (
            server.http() as http,
            http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response,
        ):
            next(response.iter_lines())
        after = server.settle()
    assert after.kv_blocks_used == 0
    assert 0 < after.num_generated_tokens - before.num_generated_tokens < 1000


def test_a_request_that_is_left_frees_its_blocks(server: RunningServer) -> None:
    before = server.settle()
    with slow_steps(server):
        with server.http() as http, pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=LONG, timeout=0.3)
        after = server.settle()
    assert after.kv_blocks_used == 0
    assert 0 < after.num_generated_tokens - before.num_generated_tokens < 1000


def test_those_who_stay_are_not_disturbed_by_one_who_leaves(server: RunningServer) -> None:
    body = {"prompt": "Tom saw a big dog", "temperature": 0, "max_tokens": 60}
    with server.http() as http:
        alone = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    answers: list[str] = []

    def stay() -> None:
        with server.http() as http:
            answers.append(http.post("/v1/completions", json=body).json()["choices"][0]["text"])

    with slow_steps(server):
        staying = threading.Thread(target=stay)
        with (
            server.http() as http,
            http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response,
        ):
            lines = response.iter_lines()  # kept: without it the client would hang up at once
            next(lines)
            staying.start()
            server.wait_for(lambda engine: engine.stats.num_running == 4)
        staying.join()
        assert server.settle().kv_blocks_used == 0
    assert answers == [alone]


def test_an_idle_engine_takes_no_steps(server: RunningServer) -> None:
    server.settle()
    calls = 0
    step = server.engine.step

    def counting() -> list[RequestOutput]:
        nonlocal calls
        calls += 1
        return step()

    server.engine.step = counting  # type: ignore[method-assign]
    try:
        time.sleep(0.1)
        assert calls == 0
        with server.http() as http:
            http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 5, "ignore_eos": True})
        assert calls == 5
    finally:
        server.engine.step = step  # type: ignore[method-assign]


def test_an_engine_fault_is_told_to_everybody(fragile_server: RunningServer) -> None:
    server = fragile_server
    step = server.engine.step
    failing = threading.Event()

    def fails_on_demand() -> list[RequestOutput]:
        if failing.is_set():
            raise RuntimeError("out of luck")
        time.sleep(0.01)
        return step()

    server.engine.step = fails_on_demand  # type: ignore[method-assign]
    whole: list[httpx.Response] = []

    def wait_for_whole() -> None:
        with server.http() as http:
            whole.append(http.post("/v1/completions", json=LONG))

    waiting = threading.Thread(target=wait_for_whole)
    with server.http() as http:
        assert http.get("/health").status_code == 200
        with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            lines = response.iter_lines()
            assert "choices" in json.loads(next(lines).removeprefix("data: "))
            waiting.start()
            server.wait_for(lambda engine: engine.stats.num_running == 6)
            failing.set()
            rest = [line for line in lines if line]
        waiting.join()
        assert "RuntimeError" in json.loads(rest[-1].removeprefix("data: "))["error"]["message"]
        assert "data: [DONE]" not in rest
        for refused in (
            whole[0],
            http.get("/health"),
            http.post("/v1/completions", json={"prompt": "hi"}),
        ):
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "engine_unavailable"
        assert http.get("/v1/models").status_code == 200


def test_a_failure_to_take_one_request_is_that_request_s_alone(
    fragile_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise TypeError("the secret prompt")

    with fragile_server.http() as http:
        with monkeypatch.context() as patch:
            patch.setattr(fragile_server.engine, "add_request", refuse)
            response = http.post("/v1/completions", json={"prompt": "hi"})
        assert response.status_code == 500
        assert "secret" not in response.text and "TypeError" in response.text
        assert http.post("/v1/completions", json={"prompt": "hi"}).status_code == 200


def test_stragglers_are_told_that_the_server_stops(fragile_server: RunningServer) -> None:
    server = fragile_server
    with (
        slow_steps(server),
        server.http() as http,
        http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        server.event_loop.call_soon_threadsafe(server.loop.fail, "the server is stopping")
        rest = [line for line in lines if line]
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["message"] == (
        "the server is stopping"
    )
