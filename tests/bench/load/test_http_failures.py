"""Failures of a server: each has its message, none hangs, and the exit code is right."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from llmopt.base.progress import Silent
from llmopt.bench.load.address import Address
from llmopt.bench.load.exchange import EncodedRequest, Endpoint
from llmopt.bench.load.fleet import Fleet
from llmopt.bench.record.result import RunData
from llmopt.cli.bench import bench
from llmopt.cli.main import run_guarded

from ...support.cli_process import LlmoptProcess
from ...support.live_server import eventually

EVENT = b'data: {"choices":[{"index":0,"text":" x","finish_reason":%s}],"usage":{"completion_tokens":%d}}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CERTIFICATE = [
    "openssl",
    "req",
    "-x509",
    "-newkey",
    "rsa:2048",
    "-nodes",
    "-days",
    "2",
    "-subj",
    "/CN=127.0.0.1",
]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


GOOD = (
    HEAD
    + chunk(EVENT % (b"null", 1))
    + chunk(EVENT % (b'"length"', 2))
    + chunk(b"data: [DONE]\n\n")
)
GOOD += b"0\r\n\r\n"
HALF = HEAD + chunk(EVENT % (b"null", 1))
FAULT = b'{"error": {"message": "out of memory"}}'
# What is written; None waits for ever, a number of seconds waits so long. Then the connection closes,
# unless the response is complete.
SCRIPTS: dict[str, list[bytes | float | None]] = {
    "good": [GOOD],
    "slow-headers": [0.3, GOOD],
    "dribble": [*(GOOD[i : i + 1] for i in range(len(GOOD)))],
    "500": [b"HTTP/1.1 500 Oops\r\nContent-Length: %d\r\n\r\n" % len(FAULT) + FAULT],
    "500-in-stream": [HALF + chunk(b"data: " + FAULT + b"\n\n") + b"0\r\n\r\n"],
    "hang": [None],
    "hang-in-stream": [HALF, None],
    "closed-early": [b""],
    "closed-in-stream": [HALF],
    "no-json": [HEAD + chunk(b"data: {oops\n\n") + b"0\r\n\r\n"],
    "no-http": [b"SSH-2.0-OpenSSH\r\n\r\n"],
    "no-token": [HEAD + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"],
}


class Server:
    """Responds by script: the first folder of the path names it; `flaky` is good every second time."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.requests = 0
        self.connections = 0
        self.open: set[int] = set()
        self.most_open = self.counted_from = 0
        self.port = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        self.open.add(number)
        self.most_open = max(self.most_open, sum(n > self.counted_from for n in self.open))
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [
                    v for v in head.lower().split(b"\r\n") if v.startswith(b"content-length:")
                ]
                await reader.readexactly(int(length[0].split(b":")[1]) if length else 0)
                script = head.split(b" ")[1].decode().split("/")[1]
                self.requests += 1
                if script == "flaky":
                    script = "good" if self.requests % 2 else "500"
                for part in SCRIPTS.get(script, SCRIPTS["closed-early"]):
                    if isinstance(part, bytes):
                        writer.write(part)
                        await writer.drain()
                        if script == "dribble":
                            await asyncio.sleep(0)
                    else:
                        await asyncio.sleep(3600 if part is None else part)
                if script in ("closed-early", "closed-in-stream", "no-http"):
                    break
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        self.open.discard(number)
        writer.close()

    async def start(self) -> int:
        self.server = await asyncio.start_server(self.answer, "127.0.0.1", 0)
        return self.server.sockets[0].getsockname()[1]


def stop(server: Server, thread: threading.Thread) -> None:
    """End the responses that hang, then the loop."""

    def end() -> None:
        for task in asyncio.all_tasks(server.loop):
            task.cancel()
        server.loop.call_later(0.1, server.loop.stop)

    server.loop.call_soon_threadsafe(end)
    thread.join(60)
    server.loop.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    one = Server()
    one.port = one.loop.run_until_complete(one.start())
    thread = threading.Thread(target=one.loop.run_forever, daemon=True)
    thread.start()
    yield one
    stop(one, thread)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet(2) as fleet:
        yield fleet


def endpoint(url: str, timeout: float = 60.0) -> Endpoint:
    return Address.parse(url, api_key="secret").endpoint(timeout)


def requests(count: int) -> list[EncodedRequest]:
    return [EncodedRequest(f"r{number}", b"{}") for number in range(count)]


class Counted(Silent):
    def __init__(self) -> None:
        self.count = 0.0

    def advance(self, count: float = 1) -> None:
        self.count += count


@pytest.mark.parametrize("script", ["good", "slow-headers", "dribble"])
def test_good_responses(server: Server, fleet: Fleet, script: str) -> None:
    url, progress = f"http://127.0.0.1:{server.port}/{script}", Counted()
    found = fleet.run(endpoint(url), requests(6), 4, progress=progress)
    assert progress.count == 6
    assert [one.answer.error for one in found.exchanges] == [""] * 6
    assert all(one.answer.tokens == [1, 1] and one.answer.text == " x x" for one in found.exchanges)
    assert all(found.origin <= one.sent <= one.answer.times[0] for one in found.exchanges)
    assert found.ended >= max(e.ended for e in found.exchanges)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("500", "HTTP 500: out of memory"),
        ("500-in-stream", "the server says: out of memory"),
        ("hang", "no complete response within 1 s: no headers received"),
        ("hang-in-stream", "no complete response within 3 s: it stopped after"),
        ("closed-early", "closed before a response"),
        ("closed-in-stream", "the connection ended within the response, stopped after"),
        ("no-json", "an event is not JSON: {oops"),
        ("no-http", "not an HTTP response: it begins with b'SSH-2.0"),
    ],
)
def test_failure_messages(server: Server, fleet: Fleet, script: str, said: str) -> None:
    url = f"http://127.0.0.1:{server.port}/{script}"
    # Limits that pass in silence alone, and not while the headers of `hang-in-stream` are on their way.
    timeout = {"hang": 1.0, "hang-in-stream": 3.0}.get(script, 60.0)
    found = fleet.run(endpoint(url, timeout=timeout), requests(3), 3)
    assert len(found.exchanges) == 3
    for one in found.exchanges:
        assert said in one.answer.error


def test_refused(fleet: Fleet) -> None:
    found = fleet.run(endpoint("http://127.0.0.1:1"), requests(5), 2)
    assert [one.answer.error for one in found.exchanges] == ["connection refused"] * 5


def test_tls_against_plain(server: Server, fleet: Fleet) -> None:
    found = fleet.run(endpoint(f"https://127.0.0.1:{server.port}/good", 0.5), requests(2), 2)
    assert len(found.exchanges) == 2 and all(one.answer.error for one in found.exchanges)


def test_plain_against_tls_and_an_unknown_certificate(fleet: Fleet, tmp_path: Path) -> None:
    import ssl

    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = subprocess.run(
        [*CERTIFICATE, "-keyout", str(key), "-out", str(certificate)], capture_output=True
    )
    if made.returncode:
        pytest.skip("no openssl here")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    one = Server()

    async def start() -> int:
        one.server = await asyncio.start_server(one.answer, "127.0.0.1", 0, ssl=context)
        return one.server.sockets[0].getsockname()[1]

    one.loop.set_exception_handler(lambda *_: None)
    port = one.loop.run_until_complete(start())
    thread = threading.Thread(target=one.loop.run_forever, daemon=True)
    thread.start()
    plain = fleet.run(endpoint(f"http://127.0.0.1:{port}/good", 0.5), requests(1), 1)
    assert plain.exchanges[0].answer.error
    strict = fleet.run(endpoint(f"https://127.0.0.1:{port}/good"), requests(1), 1)
    assert strict.exchanges[0].answer.error.startswith("TLS: ")
    trusting = Address.parse(f"https://127.0.0.1:{port}/good", verify_tls=False).endpoint(60.0)
    assert fleet.run(trusting, requests(1), 1).exchanges[0].answer.error == ""
    stop(one, thread)


def test_connections_are_kept_and_reopened(server: Server, fleet: Fleet) -> None:
    before = server.connections
    fleet.run(endpoint(f"http://127.0.0.1:{server.port}/good"), requests(20), 4)
    # The four requests that begin find a connection each; a worker that gets more permits opens more.
    assert 4 <= server.connections - before <= 8
    # A server that closes after each response makes the client reconnect, while the clock runs.
    found = fleet.run(endpoint(f"http://127.0.0.1:{server.port}/closed-early"), requests(16), 4)
    # The four that were open get a second try on a fresh connection.
    assert found.late_connections == 16


def test_connections_are_opened_as_the_rate_needs(server: Server) -> None:
    url = endpoint(f"http://127.0.0.1:{server.port}/good")
    spaced = [EncodedRequest(f"r{number}", b"{}", due=number * 0.5) for number in range(6)]
    with Fleet(1) as single:
        before = server.connections
        assert single.run(url, requests(20), 4).late_connections == 0
        assert server.connections - before == 4
        server.most_open, server.counted_from = 0, server.connections
        single.run(url, spaced, None)
    # One request at a time needs one connection, though six may be in flight; on a busy machine some are
    # late and go with the next.
    assert 1 <= server.most_open < 6


def test_one_limit_holds_over_all_workers(server: Server, fleet: Fleet) -> None:
    found = fleet.run(endpoint(f"http://127.0.0.1:{server.port}/slow-headers"), requests(13), 3)
    spans = [(one.sent, one.ended) for one in found.exchanges]
    in_flight = [sum(begin <= sent < end for begin, end in spans) for sent, _ in spans]
    assert len(spans) == 13 and max(in_flight) == 3
    # With a fixed number of permits per worker one of them would end alone.
    last = max(sent for sent, _ in spans[:-1])
    assert sum(begin <= last < end for begin, end in spans) >= 2
    # All permits are released: for a larger limit, and after a pass that was cut short.
    again = fleet.run(endpoint(f"http://127.0.0.1:{server.port}/good"), requests(40), 5)
    assert len(again.exchanges) == 40


def llmopt(*words: str | Path) -> int:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(bench)
    return run_guarded(lambda: app(list(map(str, words)), standalone_mode=False), debug=False)


FAST = [
    "--model",
    "stories3M",
    "--num-prompts",
    "8",
    "--num-runs",
    "1",
    "--output-len",
    "2",
    "--num-warmups",
    "0",
]
FAST += ["--no-check-client", "--max-concurrency", "2", "--api-key", "sk-secret"]


def test_some_failures_are_counted(server: Server, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{server.port}/flaky"
    assert llmopt(*FAST, "--base-url", url, "--result-dir", tmp_path, "--save-detailed") == 0
    (folder,) = tmp_path.iterdir()
    result = json.loads((folder / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (4, 4)
    assert sorted(result["errors"]) == [""] * 4 + ["HTTP 500: out of memory"] * 4
    assert result["total_output_tokens"] == 8 and result["backend"] == "openai"
    assert "sk-secret" not in "".join(path.read_text(errors="replace") for path in folder.iterdir())
    report = (folder / "report.html").read_text()
    assert "4 requests failed" in report and "Not certified" in report
    table = RunData.read(folder).requests or {}
    assert table["cached_tokens"] == [None] * 8, "this server says nothing of them"


def test_when_all_fail_the_exit_code_is_1(server: Server, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{server.port}/no-token"
    assert llmopt(*FAST, "--base-url", url, "--result-dir", tmp_path) == 1
    (folder,) = tmp_path.iterdir()
    result = json.loads((folder / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (0, 8) and result["mean_ttft_ms"] is None
    assert not result["llmopt"]["client"]["certified"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--base-url", "ftp://127.0.0.1"], "--base-url"),
        (["--base-url", "127.0.0.1:1"], "no server answers at http://127.0.0.1:1"),
        (["--base-url", "http://user:word@127.0.0.1"], "password"),
        (["--base-url", "http://127.0.0.1:x"], "--base-url"),
        (["--base-url", "http://127.0.0.1:1"], "no server answers"),
        (["--base-url", "http://127.0.0.1:1", "--backend", "tgi"], "--backend"),
        (["--base-url", "http://127.0.0.1:1", "--model", "nobody-has-it"], "--tokenizer"),
        (["--base-url", "http://127.0.0.1:1", "--header", "X"], "KEY=VALUE"),
        (["--base-url", "http://127.0.0.1:1", "--header", "X=a\r\nB: c"], "--header"),
        (["--base-url", "http://127.0.0.1:1", "--extra-body", "["], "--extra-body"),
        (["--base-url", "http://127.0.0.1:1", "--extra-body", "[]"], "--extra-body"),
        (["--base-url", "http://127.0.0.1:1", "--request-timeout", "0"], "request_timeout"),
        (["--base-url", "http://127.0.0.1:1", "--slowdown", "2"], "not on a server"),
    ],
)
def test_bad_input_in_one_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert llmopt(*words, "--no-check-client", "--result-dir", tmp_path / "runs") == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line and not (tmp_path / "runs").exists()


def test_ctrl_c_writes_what_finished(server: Server, tmp_path: Path) -> None:
    # Every response takes 0.3 s, so that hundreds of them leave time to interrupt on any machine.
    url = f"http://127.0.0.1:{server.port}/slow-headers"
    words = [
        "bench",
        *FAST,
        "--num-prompts",
        "400",
        "--base-url",
        url,
        "--result-dir",
        tmp_path,
    ]
    before = server.requests
    with LlmoptProcess(*words) as process:
        eventually(lambda: server.requests >= before + 20)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130 and "interrupted: what finished" in errors
    (folder,) = tmp_path.iterdir()
    result = json.loads((folder / "result.json").read_text())
    assert result["llmopt"]["interrupted"] and 4 <= result["completed"] < 400


def test_addresses() -> None:
    one = Address.parse(
        "http://host:8000/api/v1/", backend="openai-chat", headers={"X-Team": "a b"}
    )
    assert (one.url, one.path) == ("http://host:8000/api", "/api/v1/chat/completions")
    assert (
        b"X-Team: a b\r\n" in one.endpoint(1).head
        and b"Host: host:8000\r\n" in one.endpoint(1).head
    )
    assert Address.parse("https://host").endpoint(1).port == 443
    assert Address.parse("http://[::1]:80").endpoint(1).host == "::1"
    assert Address.parse("http://h", endpoint="v2/x").path == "/v2/x"
