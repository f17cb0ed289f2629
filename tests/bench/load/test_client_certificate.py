"""Client certification: its overhead measured against a server of known latency, judged, and high when starved."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import typer
from llmopt.bench.load.exchange import Answer, EncodedRequest, Endpoint, Exchange, WorkerJob
from llmopt.bench.load.fleet import (
    ClientError,
    Fleet,
    FleetPass,
    client_error,
    default_workers,
    judge,
    measure_client,
)
from llmopt.bench.load.known_server import known_server
from llmopt.bench.load.stream import AT_END, PER_CHUNK, chunk_tokens
from llmopt.bench.load.worker import Pass, Pool
from llmopt.bench.machine.environment import without_secrets
from llmopt.cli.bench import bench
from llmopt.cli.compare import compare
from llmopt.cli.main import run_guarded

from ...support.odd_known_server import VARIANTS, odd_server
from ...support.simulated_clock import SimulatedClock, SimulatedLoop


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet(1) as fleet:
        yield fleet


def test_errors_of_a_hand_made_pass() -> None:
    # The server read the request 1 ms after it was sent, and wrote at 51, 61 and 71 ms; the client read
    # 2, 5 and 2 ms after each.
    answer = Answer(
        times=[10.053, 10.066, 10.073],
        server_times=[10.001, 10.051, 10.061, 10.071],
        tokens=[1, 1, 1],
    )
    failed = Exchange("b", 10.0, 10.1, Answer(error="gone"))
    one = FleetPass(10.0, 10.1, [Exchange("a", 10.0, 10.1, answer), failed], {"mean": 0.1}, 0)
    found = client_error(one, 1, 1)
    assert found.client_ttft_error_ms["median"] == pytest.approx(3)
    assert found.client_itl_error_ms["mean"] == pytest.approx(3)
    assert found.server_lateness_ms["max"] == pytest.approx(0, abs=1e-9)
    assert (found.requests, found.failed) == (2, 1)


def test_the_server_answers_what_other_clients_ask() -> None:
    """AIPerf looks whether it is there by HEAD, which has no body to read; vLLM's benchmark asks for tokens."""
    with known_server(5.0, 1.0) as port:
        asked = (("HEAD", "/v1"), ("GET", "/v1/models"), ("OPTIONS", "/"), ("POST", "/tokenize"))
        for method, path in asked:
            link = HTTPConnection("127.0.0.1", port, timeout=120)
            link.request(method, path, '{"prompt": "a"}' if method == "POST" else None)
            assert link.getresponse().status == 404


def error(ttft: float = 0.5, itl: float = 0.1, failed: int = 0) -> ClientError:
    flat = {"mean": 0.0, "p99": 0.0, "max": 0.0}
    return ClientError(
        8,
        1,
        24,
        failed,
        {**flat, "median": ttft},
        {**flat, "median": itl},
        {**flat, "median": 0.0},
        flat,
    )


METRICS = {"ttft": {"median": 20.0}, "itl": {"median": 4.0}, "e2el": {"median": 200.0}}


@pytest.mark.parametrize(
    ("own", "loop_lag", "send_lag", "said"),
    [
        (error(), 0.5, None, None),
        (error(ttft=1.01), 0.5, None, "TTFT error is 1.01 ms, 5% of the median TTFT of 20.00 ms"),
        (error(itl=0.3), 0.5, None, "ITL error"),
        (error(), 1.1, None, "event loop lag"),
        (error(), 0.5, 9.9, None),
        (error(), 0.5, 10.1, "lateness of sending"),
        (error(failed=2), 0.5, None, "2 of 24 requests"),
        (None, 0.5, None, "not checked"),
    ],
)
def test_judgement(
    own: ClientError | None, loop_lag: float, send_lag: float | None, said: str | None
) -> None:
    found = judge(own, METRICS, loop_lag_ms=loop_lag, send_lag_ms=send_lag)
    assert found == [] if said is None else len(found) == 1 and said in found[0]


def test_nothing_measured_is_nothing_certified() -> None:
    nothing = {key: {"median": None} for key in METRICS}
    assert "no request succeeded" in judge(error(), nothing, loop_lag_ms=0, send_lag_ms=None)[0]


def test_the_known_server_keeps_its_timetable(fleet: Fleet) -> None:
    found = measure_client(fleet, 1, 4)
    assert found.failed == 0 and found.requests == 12
    # Every part of the way costs something, and nothing can arrive before it was written.
    assert found.client_ttft_error_ms["median"] > 0 and found.client_itl_error_ms["median"] >= 0


def simulated_lag_ms(burden: float, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, float]:
    """The lag that a client measures in three seconds on a simulated clock."""
    clock = SimulatedClock(read_seconds=1e-4)
    monkeypatch.setattr("time.perf_counter", clock)
    endpoint = Endpoint("127.0.0.1", 1, b"")

    async def lag_ms() -> Mapping[str, float]:
        stop = asyncio.Event()
        job = WorkerJob(endpoint, (EncodedRequest("later", b"", 3.0),), None, burden)
        client = Pass(job, Pool(endpoint), BytesIO(), stop)
        asyncio.get_running_loop().call_later(2.9, stop.set)
        await client.run(time.perf_counter())
        return client.report(0).lag_ms

    with asyncio.Runner(loop_factory=lambda: SimulatedLoop(clock)) as runner:
        return runner.run(lag_ms())


def test_the_lag_of_a_starved_client_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that is busy for 100 ms of every 150 ms; `make bench-check` starves a real one."""
    assert simulated_lag_ms(0.0, monkeypatch)["max"] == 0
    starved = simulated_lag_ms(0.1, monkeypatch)
    assert 20 < starved["mean"] < starved["max"] < 100 < starved["max"] + 20


def llmopt(*words: str | Path) -> int:
    app = typer.Typer(pretty_exceptions_enable=False)
    for command in (bench, compare):
        app.command()(command)
    return run_guarded(lambda: app(list(map(str, words)), standalone_mode=False), debug=False)


def test_a_starved_run_is_marked_and_gets_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "stories3M", "--num-prompts", "16", "--num-runs", "1", "--output-len", "6"]
    with known_server(40.0, 5.0) as port:
        code = llmopt(
            "bench", *words, "--base-url", f"http://127.0.0.1:{port}", "--client-burden-ms", "100",
            "--result-dir", tmp_path,
        )  # fmt: skip
    assert code == 0
    assert "Not certified: the client's" in capsys.readouterr().out
    (folder,) = tmp_path.iterdir()
    result = json.loads((folder / "result.json").read_text())
    client = result["llmopt"]["client"]
    assert not client["certified"] and client["reasons"] and client["burden_ms"] == 100
    assert result["completed"] == 16
    assert "Not certified" in (folder / "report.html").read_text()
    assert llmopt("compare", folder, folder) == 3
    assert "the client disturbed the base run" in capsys.readouterr().out


@pytest.mark.whole
def test_the_table_of_the_clients_error(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    from llmopt.bench.load import fleet

    check = fleet.check_client
    monkeypatch.setattr(fleet, "check_client", lambda *a, **k: check(*a, streams=(1, 3), **k))
    assert llmopt("bench", "--check-client", "--client-workers", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["streams"] for one in found["errors"]] == [1, 3]
    assert [one["requests"] for one in found["errors"]] == [3, 9]
    assert found["formulas"].keys() == {
        "client_ttft_error_ms",
        "client_itl_error_ms",
        "loop_lag_ms",
    }


def test_workers_leave_cores_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    assert [default_workers(n) for n in (1, 64, 65, 256, 5000)] == [1, 1, 2, 4, 8]


def test_secrets_stay_out_of_the_record() -> None:
    words = ["bench", "--api-key", "k", "--header=X=y", "--seed", "1"]
    assert without_secrets(words) == ["bench", "--api-key", "...", "--header=...", "--seed", "1"]


def test_requests_wait_for_others_and_are_left(fleet: Fleet) -> None:
    def request(name: str, tokens: int, due: float = 0.0, **more: Any) -> EncodedRequest:
        body = json.dumps({"max_tokens": tokens}).encode()
        return EncodedRequest(f"bench-{name}", body, due, **more)

    last = request("2", 2, 0.05)
    child = request("1", 4000, 0.03, waiting=((0, last),), cancel=0.1)
    with known_server(20.0, 10.0) as port:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        opening = request("0", 3, waiting=((0, child),))
        found = fleet.run(Endpoint("127.0.0.1", port, head), [opening, request("3", 1)], None)
    by_id = {one.request_id: one for one in found.exchanges}
    first, left, after = (by_id[f"bench-{number}"] for number in range(3))
    assert left.due == pytest.approx(first.ended - found.origin + 0.03) and left.cancelled
    assert len(left.answer.times) < 4000 and not first.cancelled
    assert after.due == pytest.approx(left.ended - found.origin + 0.05)
    assert len(after.answer.times) == 2 and not after.answer.error


@pytest.mark.parametrize("variant", VARIANTS)
def test_requests_succeed_on_servers_of_every_form(variant: str, fleet: Fleet) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 4, "stream": True}).encode()
    requests = [EncodedRequest(f"r{number}", body, number * 0.02) for number in range(24)]
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    with odd_server(10.0, 2.0, variant) as port:
        sent = fleet.run(Endpoint("127.0.0.1", port, head, timeout=120), requests, None)
    assert [exchange.answer.error for exchange in sent.exchanges] == [""] * 24
    by_end = VARIANTS[variant].usage_at_end
    counts = [chunk_tokens(exchange.answer, None) for exchange in sent.exchanges]
    assert counts == [([1] * 4, AT_END if by_end else PER_CHUNK)] * 24
