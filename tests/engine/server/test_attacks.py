"""Requests that mean harm: what each may cost the server and the other clients."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from llmopt.base import build
from llmopt.engine.sampling import grammar
from llmopt.engine.server.endpoints import capabilities, completions, service
from llmopt.engine.server.protocol import structure
from llmopt.engine.server.protocol.server_options import ServerOptions
from llmopt.engine.server.requests import connection, request_record

from ...support.live_server import RunningServer, make_engine, running, slow_steps
from ...support.native_paths import needs_compiler

KEYS = ("sesame", "rosebud")
LONG = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "seed": 1}
OPTIONS = ServerOptions(api_keys=KEYS, header_timeout_seconds=2, max_connections=12)


@pytest.fixture(scope="module")
def strict() -> Iterator[RunningServer]:
    with running(make_engine("stories260K"), OPTIONS) as it:
        yield it


def key(name: str = "sesame") -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


def connect(server: RunningServer) -> socket.socket:
    parts = urlsplit(server.url)
    assert parts.hostname is not None and parts.port is not None
    return socket.create_connection((parts.hostname, parts.port), timeout=120)


def test_half_a_head_is_closed_in_time(strict: RunningServer) -> None:
    with connect(strict) as silent, connect(strict) as client:
        for byte in b"GET /health HTTP/1.1\r\nHost: x\r\nA: ":  # more bytes give no more time
            client.send(bytes([byte]))
        for each in (silent, client):
            assert each.recv(1000).startswith(b"HTTP/1.1 408 ")
            assert each.recv(1000) == b""


def test_a_head_that_is_whole_stops_the_clock(strict: RunningServer) -> None:
    with connect(strict) as client:
        for idle in (0.0, OPTIONS.header_timeout_seconds + 0.2):
            time.sleep(idle)  # between two requests: the keep-alive's matter
            client.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += client.recv(1000)
            assert answer.startswith(b"HTTP/1.1 200 ")


def test_a_reader_that_stops_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its events would fill buffers that nobody empties, and its connection would count for good."""
    made = connection.BoundedConnection.connection_made

    def with_small_buffer(self: Any, transport: asyncio.Transport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(self, transport)

    monkeypatch.setattr(connection.BoundedConnection, "connection_made", with_small_buffer)
    options = ServerOptions(send_timeout_seconds=1)
    body = json.dumps({**LONG, "logprobs": 20, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    with running(make_engine("stories260K"), options) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", urlsplit(server.url).port))
        client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        deadline = time.monotonic() + 60
        while not server.loop._streams:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        while server.loop._streams:
            assert time.monotonic() < deadline, "the response waits for its reader"
            time.sleep(0.01)
        received = [client.recv(1 << 20)]
        while received[-1]:
            received.append(client.recv(1 << 20))
        assert b"[DONE]" not in b"".join(received)


def test_connections_are_bounded_and_come_back(strict: RunningServer) -> None:
    silent = [connect(strict) for _ in range(OPTIONS.max_connections)]
    try:
        with connect(strict) as last:  # in place of the oldest
            assert silent[0].recv(1000).startswith(b"HTTP/1.1 503 ")
            assert silent[0].recv(1000) == b""
            assert all(b"408" in client.recv(1000) for client in (*silent[1:], last))
    finally:
        for client in silent:
            client.close()
    with strict.http() as http:
        assert http.get("/health").status_code == 200


def test_silent_connections_of_one_address_do_not_refuse_another(strict: RunningServer) -> None:
    silent = [connect(strict) for _ in range(OPTIONS.max_connections)]
    parts = urlsplit(strict.url)
    asked = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    try:
        for _ in range(2):
            with socket.socket() as client:
                client.bind(("127.0.0.2", 0))
                client.connect((parts.hostname, parts.port))
                client.sendall(asked)
                assert client.recv(1000).startswith(b"HTTP/1.1 200 ")
        with connect(strict) as client:  # the address itself loses another
            client.sendall(asked)
            assert client.recv(1000).startswith(b"HTTP/1.1 200 ")
        assert sorted(client.recv(1000)[:12] for client in silent)[-1] == b"HTTP/1.1 503"
    finally:
        for client in silent:
            client.close()


def test_no_key_no_body_and_no_turn(strict: RunningServer) -> None:
    """A POST to an open path would be buffered, and would take the only turn of the first key."""
    with strict.http() as http, slow_steps(strict):
        for path in ("/health", "/ready", "/", "/page/x"):
            assert http.post(path, content=b"x" * 100_000).status_code == 401
        with http.stream(
            "POST", "/v1/completions", json={**LONG, "stream": True}, headers=key()
        ) as response:
            next(response.iter_lines())
            assert http.get("/health").status_code == 200


def test_a_key_aborts_its_own_requests_only(strict: RunningServer) -> None:
    with strict.http() as http, slow_steps(strict):
        body = {**LONG, "stream": True, "request_id": "mine"}
        with http.stream("POST", "/v1/completions", json=body, headers=key()) as response:
            lines = response.iter_lines()
            next(lines)
            for name, aborted in (("rosebud", False), ("sesame", True)):
                answer = http.post("/abort", json={"id": "cmpl-mine"}, headers=key(name))
                assert answer.json() == {"id": "cmpl-mine", "aborted": aborted}


def test_a_key_cannot_probe_the_prompts_of_another(strict: RunningServer) -> None:
    """Blocks of the prefix cache are shared within a key and a salt, and seen in `cached_tokens`."""
    prompt = [7] * 100

    def cached(name: str, **fields: Any) -> int:
        body = {"prompt": prompt, "max_tokens": 1, **fields}
        answer = http.post("/v1/completions", json=body, headers=key(name)).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    with strict.http() as http:
        assert cached("sesame") == 0 and cached("sesame") > 0
        assert cached("rosebud") == 0 and cached("rosebud") > 0
        assert cached("sesame", cache_salt="a") == 0 and cached("sesame", cache_salt="a") > 0
        assert cached("sesame", cache_salt="b") == 0


def propagate_once(caplog: pytest.LogCaptureFixture) -> None:
    """Let `caplog` have each record of ours once: it is on loggers that do not propagate when a test begins."""
    logger = logging.getLogger("llmopt")
    logger.propagate = caplog.handler not in logger.handlers


def test_a_log_of_prompts_is_one_line_each(caplog: pytest.LogCaptureFixture) -> None:
    options = ServerOptions(log_prompts=True)
    with running(make_engine("stories260K"), options) as server, server.http() as http:
        propagate_once(caplog)
        with caplog.at_level(logging.INFO):
            http.post("/v1/x%0aINFO: y", content=b'{"prompt":\n"hi"}\nERROR: the disk is full')
    lines = [r.getMessage() for r in caplog.records if "disk" in r.getMessage()]
    assert len(lines) == 1 and "\n" not in lines[0]
    fields = json.loads(lines[0].removeprefix("request body "))
    assert fields["body"].endswith("\nERROR: the disk is full")


def test_a_log_of_prompts_holds_no_pictures(caplog: pytest.LogCaptureFixture) -> None:
    data = "iVBORw0KGgo" + "Ab+/" * 5000
    with running(make_engine("stories260K"), ServerOptions(log_prompts=True)) as server:
        propagate_once(caplog)
        with caplog.at_level(logging.INFO), server.http() as http:
            for sent in (data, data.replace("/", "\\/")):
                http.post("/v1/x", content=f'{{"url": "data:image/png;base64,{sent}", "n": 1}}')
    lines = [r.getMessage() for r in caplog.records if "iVBOR" in r.getMessage()]
    assert len(lines) == 2 and max(map(len, lines)) < 300
    body = json.loads(json.loads(lines[0].removeprefix("request body "))["body"])
    assert body["url"].endswith("(20011 characters)") and body["n"] == 1


def test_a_schema_has_a_size_and_a_time(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(properties: int) -> tuple[int, str]:
        schema = {
            "type": "object",
            "properties": {f"property_number_{i}": {} for i in range(properties)},
        }
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {"prompt": "hi", "max_tokens": 1, "response_format": form}
        answer = http.post("/v1/completions", json=body)
        return answer.status_code, answer.text

    with server.http() as http:
        status, text = ask(10_000)
        assert status == 400 and "more than 262144 characters" in text
        resume = threading.Event()
        with monkeypatch.context() as patch:
            patch.setattr(capabilities, "COMPILE_SECONDS", 0.2)
            patch.setattr(capabilities.Constrainer, "_mask", lambda *_: resume.wait(20))
            status, text = ask(1)
            assert status == 400 and "not compiled after 0.2 s" in text
            for _ in range(capabilities.COMPILERS_PER_KEY - 1):
                ask(1)
            status, text = ask(1)  # one that waits for those ends too
            assert status == 429 and "try again later" in text
            resume.set()
        assert ask(1)[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_fails_is_an_error_of_its_request(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    body = {"prompt": "hi", "max_tokens": 5, "guided_regex": "[a-z ]+", "stream": stream, "n": 2}
    with server.http() as http:
        with monkeypatch.context() as patch:
            patch.setattr(grammar, "BURST_SECONDS", -1)
            answer = http.post("/v1/completions", json=body)
        assert answer.status_code == (200 if stream else 400)
        assert "grammar_failed" in answer.text and "[DONE]" not in answer.text
        assert http.post("/v1/completions", json={**body, "stream": False}).status_code == 200


def test_a_schema_is_not_compiled_for_a_client_that_left(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    resume, compiled = threading.Event(), []

    def slow(_: object, constraint: structure.Constraint, __: int) -> None:
        compiled.append(constraint.value)
        resume.wait(20)

    monkeypatch.setattr(capabilities.Constrainer, "_mask", slow)
    clients = []
    for number in range(capabilities.COMPILERS_PER_KEY + 1):
        body = json.dumps({"prompt": "hi", "guided_regex": f"a{number}"}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
        )
        clients.append(connect(server))
        clients[-1].sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        while len(compiled) < min(number + 1, capabilities.COMPILERS_PER_KEY):
            time.sleep(0.01)
    with server.http() as http:
        http.get("/health")  # the last request has been read by now
        for client in clients:
            client.close()
        http.get("/health")
        time.sleep(0.2)
    resume.set()
    time.sleep(0.2)
    assert compiled == ["a0", "a1"]


def test_long_lists_are_refused_before_they_cost(server: RunningServer) -> None:
    message = {"role": "user", "content": "x"}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/detokenize", {"tokens": [1] * 1_000_000}),
        ("/v1/chat/completions", {"messages": [message] * 100_000}),
        ("/tokenize", {"messages": [message] * 100_000}),
        ("/v1/responses", {"input": [message] * 100_000}),
    ]
    with server.http() as http:
        for path, body in bodies:
            assert http.post(path, json=body).status_code in (400, 413)


def test_log_probabilities_that_are_held_are_bounded(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "MAX_LOGPROBS", 200)
    body = {**LONG, "n": 4, "logprobs": 5, "max_tokens": 20}
    with server.http() as http:
        refused = http.post("/v1/completions", json=body)
        assert refused.status_code == 400 and "stream them" in refused.text
        streamed = http.post("/v1/completions", json={**body, "stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
    assert server.wait_until_idle().kv_blocks_used == 0


def test_log_probabilities_of_prompts_leave_as_they_come_and_are_bounded(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They become JSON beside the event loop, the same as on it, and a key may have so many at a time."""
    body = {"prompt": [[1, 317, 403, 261], [5] * 40], "max_tokens": 2, "temperature": 0}
    body |= {"prompt_logprobs": 3, "logprobs": 2, "echo": True}
    with server.http() as http:
        on_loop = http.post("/v1/completions", json=body).json()
        monkeypatch.setattr(completions, "LOGPROBS_ON_LOOP", 0)
        large = http.post("/v1/completions", json=body)
        assert large.headers["content-type"] == "application/json"
        assert large.json()["choices"] == on_loop["choices"]
        del body["prompt_logprobs"]
        streamed = http.post("/v1/completions", json={**body, "stream": True}).text
        scored = [json.loads(line[6:]) for line in streamed.splitlines() if line[6:7] == "{"]
        first = [one for one in scored if one["choices"][0]["index"] == 0]
        tokens = [each for one in first for each in one["choices"][0]["logprobs"]["tokens"]]
        assert tokens == on_loop["choices"][0]["logprobs"]["tokens"]
        monkeypatch.setattr(completions, "MAX_LOGPROBS_PER_KEY", 100)
        for _ in range(2):  # what was refused is not counted
            refused = http.post("/v1/completions", json=body)
            assert refused.status_code == 429 and "at most 100 may be" in refused.text
            small = http.post("/v1/completions", json={**body, "prompt": "Once"})
            assert small.status_code == 200


def test_echoes_of_all_choices_are_bounded(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": ["Once upon a time"] * 2, "max_tokens": 1, "echo": True, "logprobs": 2}
    monkeypatch.setattr(completions, "MAX_LOGPROBS", 100)
    with server.http() as http:
        assert http.post("/v1/completions", json=body).status_code == 200
        for more in ({"n": 8}, {"n": 8, "stream": True}):
            refused = http.post("/v1/completions", json={**body, **more})
            assert refused.status_code == 400 and "log-probabilities of prompts" in refused.text
        monkeypatch.setattr(completions, "MAX_ECHOED", 100)
        del body["logprobs"]
        assert http.post("/v1/completions", json=body).status_code == 200
        refused = http.post("/v1/completions", json={**body, "n": 8})
        assert refused.status_code == 400 and "echo: 256 characters" in refused.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "hi", "max_output_tokens": 1}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 1, "stream": True}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/api/chat", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 1, "echo": True}),
    ],
)
def test_large_bodies_are_translated_on_worker_threads(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """The answer is that of a small body, whose translation runs on the event loop."""
    threads: list[str] = []
    large, off_loop = {**body, "user": "x" * 100_000}, service.Service.off_loop

    async def noting(self: Any, request: Any, work: Any) -> Any:
        def noted() -> Any:
            threads.append(threading.current_thread().name)
            return work()

        return await off_loop(self, request, noted)

    monkeypatch.setattr(service.Service, "off_loop", noting)
    with server.http() as http:
        assert [http.post(path, json=sent).status_code for sent in (body, large)] == [200, 200]
    assert [name.startswith("llmopt-json") for name in threads] == [False, True]


def test_a_response_repeats_its_tools(server: RunningServer) -> None:
    """In all events, as JSON that is written once."""
    parameters = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(50)}}
    tool = {"type": "function", "name": "f", "parameters": parameters}
    body = {"input": "hi", "max_output_tokens": 2, "tools": [tool], "tool_choice": "none"}
    with server.http() as http:
        whole = http.post("/v1/responses", json=body).json()
        lines = http.post("/v1/responses", json={**body, "stream": True}).text.splitlines()
    sent = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    shown = [whole, *(event["response"] for event in sent if "response" in event)]
    assert len(shown) == 4 and shown[3]["status"] == whole["status"] == "incomplete"
    assert all(response["tools"][0]["parameters"] == parameters for response in shown)


def test_an_unread_stream_holds_its_sequences_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold the request: its tokens are not computed, its blocks are free, others go on, and it goes on where it is read."""
    monkeypatch.setattr(request_record, "UNREAD", 30)
    made = connection.BoundedConnection.connection_made

    def with_small_buffer(self: Any, transport: asyncio.Transport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(self, transport)

    monkeypatch.setattr(connection.BoundedConnection, "connection_made", with_small_buffer)
    body = json.dumps({**LONG, "n": 2, "logprobs": 5, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    head += "Connection: close\r\nContent-Type: application/json\r\n\r\n"
    with running(make_engine("stories260K")) as server, server.http() as http:
        waiting = server.engine.scheduler.waiting
        for is_read in (False, True):
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect(("127.0.0.1", urlsplit(server.url).port))
                client.sendall(head.encode() + body)
                server.wait_for(lambda _: waiting.num_held == 2)
                assert http.post("/v1/completions", json={"prompt": "hi"}).status_code == 200
                server.wait_for(lambda e: waiting.num_held == 2 and not e.stats.kv_blocks_used)
                assert server.on_engine(lambda e: e.stats.num_generated_tokens) < 800
                if is_read:
                    received = [client.recv(1 << 20)]
                    while received[-1]:
                        received.append(client.recv(1 << 20))
                    text = b"".join(received)
                    assert text.count(b'"finish_reason":"length"') == 2 and b"[DONE]" in text
            server.wait_until_idle()
            assert waiting.num_held == 0 and not waiting.held_ids


@needs_compiler
def test_a_library_that_others_could_write_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "one.c"
    source.write_text("int one(void) { return 1; }\n")
    library = build.compiled(source, ())
    assert library.parent == build.cache_folder()
    assert library.parent.stat().st_mode & 0o777 == 0o700
    library.write_bytes(b"planted")
    library.chmod(0o666)
    assert build.compiled(source, ()).read_bytes()[:4] == b"\x7fELF"
    build.cache_folder().chmod(0o777)
    assert build.compiled(source, ()).parent != build.cache_folder()


def test_the_slow_and_the_silent_do_not_hold_up_the_rest(strict: RunningServer) -> None:
    silent = [connect(strict) for _ in range(5)]
    with strict.http() as http, ThreadPoolExecutor(4) as pool:
        body = {"prompt": "hi", "max_tokens": 4}
        for answers in [
            list(
                pool.map(
                    lambda name: http.post("/v1/completions", json=body, headers=key(name)), KEYS
                )
            )
            for _ in range(3)
        ]:
            assert [answer.status_code for answer in answers] == [200, 200]
    for client in silent:
        client.close()
