"""Clients that leave, engines that fail, and a thread that sleeps when there is nothing to do."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from llmopt.base.errors import Failure
from llmopt.engine.core.engine import Engine
from llmopt.engine.execution.step import StepResult, StepTimer
from llmopt.engine.scheduling.outputs import RequestOutput
from llmopt.engine.scheduling.step_plan import StepPlan
from llmopt.engine.server.app import create_app
from llmopt.engine.server.launch import base_url, bind, serve
from llmopt.engine.server.protocol.server_options import ServerOptions
from llmopt.engine.server.requests.request_record import OutputStream

from ...support.live_server import (
    HANG_SECONDS,
    RunningServer,
    eventually,
    make_engine,
    running,
    slow_steps,
)

LONG: dict[str, Any] = {"prompt": "Once", "max_tokens": 500, "ignore_eos": True, "n": 3, "seed": 1}


def test_a_stream_that_is_left_frees_its_blocks(server: RunningServer) -> None:
    before = server.wait_until_idle()
    with slow_steps(server):
        with (
            server.http() as http,
            http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response,
        ):
            next(response.iter_lines())
        after = server.wait_until_idle()
    assert after.kv_blocks_used == 0
    assert 0 < after.num_generated_tokens - before.num_generated_tokens < 1000


def test_a_request_that_is_left_frees_its_blocks(server: RunningServer) -> None:
    before = server.wait_until_idle()
    with slow_steps(server):
        body, address = json.dumps(LONG).encode(), urlsplit(server.url)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        )
        with socket.create_connection((address.hostname, address.port)) as client:
            client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            begun = before.num_generated_tokens
            server.wait_for(lambda engine: engine.stats.num_generated_tokens > begun)
        after = server.wait_until_idle()
    assert after.kv_blocks_used == 0
    assert 0 < after.num_generated_tokens - before.num_generated_tokens < 1000


def test_a_burst_of_calls_does_not_put_off_steps(fragile_server: RunningServer) -> None:
    """Each call has the next one in the inbox before it ends, as a burst of requests does."""
    loop, num_calls_at_work = fragile_server.loop, 0
    num_tokens = num_before = fragile_server.engine.stats.num_generated_tokens

    async def submit_next() -> None:
        await loop.run(work)

    def work(engine: Engine) -> None:
        nonlocal num_calls_at_work, num_tokens
        num_calls_at_work += engine.has_work()
        num_tokens = engine.stats.num_generated_tokens
        if num_tokens == num_before and num_calls_at_work < 100:
            num_queued = loop._inbox.qsize()
            asyncio.run_coroutine_threadsafe(submit_next(), loop._event_loop)
            eventually(lambda: loop._inbox.qsize() > num_queued)

    asyncio.run_coroutine_threadsafe(submit_next(), loop._event_loop)
    with fragile_server.http() as http:
        body = {"prompt": "Once", "max_tokens": 40, "ignore_eos": True}
        http.post("/v1/completions", json=body).raise_for_status()
    assert num_tokens > num_before and num_calls_at_work < 100


def test_blocks_are_free_within_one_step_of_the_client_s_leaving(
    fragile_server: RunningServer,
) -> None:
    server, step, steps = fragile_server, fragile_server.engine.step, threading.Semaphore(0)
    asked_for = threading.Semaphore(0)

    def on_demand() -> list[RequestOutput]:
        asked_for.release()
        steps.acquire(timeout=HANG_SECONDS)
        return step()

    server.engine.step = on_demand  # type: ignore[method-assign]
    steps.release(3)
    with (
        server.http() as http,
        http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response,
    ):
        lines = response.iter_lines()  # which ends the connection when it is forgotten
        next(lines)
        for _ in range(4):  # the engine has done three steps and is in the fourth
            assert asked_for.acquire(timeout=HANG_SECONDS)
    eventually(lambda: not server.loop._streams)
    assert server.engine.stats.kv_blocks_used > 0
    before = server.engine.stats.num_steps
    steps.release()
    stats = server.on_engine(lambda engine: engine.stats)
    assert (stats.kv_blocks_used, stats.num_running) == (0, 0)
    assert stats.num_steps - before <= 1


@pytest.mark.parametrize("is_stream", [False, True])
def test_nothing_keeps_the_outputs_of_a_response_that_has_ended(
    server: RunningServer, is_stream: bool
) -> None:
    """A deadline's timer, cancelled, stays in the event loop, with the request's context, for minutes."""
    name = f"kept-{is_stream}"
    with server.http(headers={"x-request-id": name}) as http:
        http.post("/v1/completions", json={**LONG, "max_tokens": 2, "stream": is_stream}).read()

    def kept() -> list[OutputStream]:
        gc.collect()
        streams = [one for one in gc.get_objects() if isinstance(one, OutputStream)]
        return [one for one in streams if name in one.jobs[0].request_id]

    eventually(lambda: not kept(), "its stream is kept")


def test_it_is_ready_only_when_warm() -> None:
    engine, may_step = make_engine("stories260K"), threading.Event()
    step = engine.step

    def held() -> list[RequestOutput]:
        may_step.wait(HANG_SECONDS)
        return step()

    engine.step = held  # type: ignore[method-assign]
    with running(engine, is_warm=False) as server, server.http() as http:
        assert http.get("/health").status_code == 200
        early = http.get("/ready")
        assert early.status_code == 503
        assert early.json()["error"]["message"] == "the engine is warming up"
        assert "llmopt_ready{" in (scraped := http.get("/metrics").text)
        assert 'llmopt_ready{engine="0",model_name="tiny"} 0.0' in scraped
        may_step.set()
        # A request that came early is served all the same, and leaves no trace of the warm-up.
        assert http.post("/v1/completions", json={"prompt": "Hi"}).status_code == 200
        assert http.get("/ready").json() == {"status": "ready"}
        assert server.wait_until_idle().prefix_cache_queries < 10


def test_other_streams_are_not_disturbed_by_one_that_is_closed(server: RunningServer) -> None:
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
        assert server.wait_until_idle().kv_blocks_used == 0
    assert answers == [alone]


def test_a_long_prompt_is_computed_in_parts_beside_a_stream() -> None:
    """A block a step, where no step may take longer; without a stream beside it all at once."""
    options = ServerOptions(max_step_seconds=1e-9)
    prompt = {"prompt": [300 + number % 90 for number in range(200)], "max_tokens": 1}
    engine, chunks = make_engine("stories260K", block_size=16), []
    schedule = engine.scheduler.schedule

    def noted(*arguments: Any) -> StepPlan:
        plan = schedule(*arguments)
        chunks.append(max((row.num_tokens for row in plan.rows), default=0))
        return plan

    with running(engine, options=options) as server, server.http() as http:
        engine.scheduler.schedule = noted  # type: ignore[method-assign]
        http.post("/v1/completions", json=prompt).raise_for_status()
        assert max(chunks) == 200
        chunks.clear()
        engine.reset_prefix_cache()
        long = {**LONG, "n": 1, "stream": True}
        with slow_steps(server), http.stream("POST", "/v1/completions", json=long) as response:
            lines = response.iter_lines()  # which ends the connection when it is forgotten
            next(lines)
            http.post("/v1/completions", json=prompt).raise_for_status()
    assert 1 < max(chunks) <= 16


def test_an_idle_engine_takes_no_steps(server: RunningServer) -> None:
    server.wait_until_idle()
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


def test_an_engine_fault_is_reported_to_every_client(fragile_server: RunningServer) -> None:
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
            http.get("/ready"),
            http.post("/v1/completions", json={"prompt": "hi"}),
        ):
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "engine_unavailable"
        assert http.get("/v1/models").status_code == 200
        assert 'llmopt_ready{engine="0",model_name="tiny"} 0.0' in http.get("/metrics").text


def test_a_failed_step_ends_its_requests_and_not_the_engine(
    fragile_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = fragile_server
    execute, poison = server.engine.runner.execute, [7, 7, 7]

    def fails_on_poison(plan: StepPlan, timer: StepTimer) -> StepResult:
        if any([*row.tokens[:3]] == poison for row in plan.rows):
            raise RuntimeError("illegal token")
        return execute(plan, timer)

    monkeypatch.setattr(server.engine.runner, "execute", fails_on_poison)
    with server.http() as http:
        for _ in range(5):  # more than may fail in a row, but a good one lies between
            bad = http.post("/v1/completions", json={"prompt": poison})
            assert bad.status_code == 500 and bad.json()["error"]["code"] == "step_failed"
            streamed = http.post("/v1/completions", json={"prompt": poison, "stream": True})
            assert '"code":"step_failed"' in streamed.text and "[DONE]" not in streamed.text
            assert http.post("/v1/completions", json={"prompt": "hi"}).status_code == 200
        assert http.get("/health").status_code == 200
        text = http.get("/metrics").text
        assert 'llmopt_failed_steps_total{engine="0",model_name="tiny"} 10.0' in text
    assert server.wait_until_idle().kv_blocks_used == 0


def test_a_failure_before_any_request_runs_counts_and_the_request_goes_on(
    fragile_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = fragile_server.engine.scheduler
    schedule, failures = scheduler.schedule, [RuntimeError("out of luck")]

    def fails_once(now: float) -> StepPlan:
        if failures:
            raise failures.pop()
        return schedule(now)

    monkeypatch.setattr(scheduler, "schedule", fails_once)
    with fragile_server.http() as http:
        assert http.post("/v1/completions", json={"prompt": "hi"}).status_code == 200
        text = http.get("/metrics").text
    assert 'llmopt_failed_steps_total{engine="0",model_name="tiny"} 1.0' in text


def test_a_step_that_hangs_is_seen_by_the_health_probe() -> None:
    engine, resume = make_engine("stories260K"), threading.Event()
    with running(engine, ServerOptions(step_timeout_seconds=1)) as server:
        step = engine.step

        def hangs() -> list[RequestOutput]:
            resume.wait(HANG_SECONDS)
            return step()

        engine.step = hangs  # type: ignore[method-assign]
        with server.http() as http, ThreadPoolExecutor() as clients:
            asked = clients.submit(http.post, "/v1/completions", json={"prompt": "hi"})
            eventually(lambda: http.get("/health").status_code != 200)
            for path in ("/health", "/ready"):
                assert "has not ended" in http.get(path).json()["error"]["message"]
            resume.set()
            assert asked.result().status_code == 200
            assert http.get("/health").status_code == 200


def test_a_server_whose_engine_cannot_go_on_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, listener = make_engine("stories260K"), bind("127.0.0.1", 0)
    app = create_app(engine, model_name="tiny")
    url, answers = base_url(listener), []

    def lost(*_: object) -> None:
        raise Failure("worker 1 has ended")

    def ask() -> None:
        monkeypatch.setattr(engine.runner, "execute", lost)
        answers.append(httpx.post(f"{url}/v1/completions", json={"prompt": "hi"}, trust_env=False))

    asking = threading.Thread(target=ask)
    with pytest.raises(Failure, match="restart the server"):
        serve(app, listener, on_ready=asking.start)
    asking.join()
    assert answers[0].status_code == 503


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


def test_late_clients_get_an_event_that_the_server_stops(fragile_server: RunningServer) -> None:
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
