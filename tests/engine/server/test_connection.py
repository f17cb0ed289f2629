"""Bounds of a connection: heads, bodies and chunks, and the connections that probes have for themselves."""

from __future__ import annotations

import errno
import json
import re
import socket
import threading
from asyncio import selector_events
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import h11
import pytest
from llmopt.engine.server.endpoints import page
from llmopt.engine.server.protocol.server_options import ServerOptions
from llmopt.engine.server.requests import connection
from uvicorn.protocols.http.h11_impl import H11Protocol

from ...support.live_server import (
    RunningServer,
    eventually,
    held_steps,
    make_engine,
    running,
    slow_steps,
)

OPTIONS = ServerOptions(api_keys=("sesame", "rosebud"), max_connections=6)
KEY = "Authorization: Bearer sesame"
JSON = "Content-Type: application/json"
BODY = b'{"prompt": "hi", "max_tokens": 1}'
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def strict() -> Iterator[RunningServer]:
    with running(make_engine("stories260K"), OPTIONS) as it:
        yield it


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Events that h11 makes from now on."""
    events: list[Any] = []
    next_event = connection._Parser.next_event

    def counted(self: Any) -> Any:
        events.append(next_event(self))
        return events[-1]

    monkeypatch.setattr(connection._Parser, "next_event", counted)
    return events


def head(*lines: str, request: str = "POST /v1/completions HTTP/1.1") -> bytes:
    return "\r\n".join([request, "Host: localhost", *lines, "", ""]).encode()


def talk(server: RunningServer, sent: bytes, *, num_answers: int | None = None) -> bytes:
    """What the server sends until it hangs up, or until so many responses have come."""
    parts, received = urlsplit(server.url), b""
    with socket.create_connection((parts.hostname, parts.port), timeout=120) as client:
        client.sendall(sent)
        while num_answers is None or received.count(b"HTTP/1.1 ") < num_answers:
            if not (data := client.recv(1 << 16)):
                break
            received += data
    return received


def test_chunks_are_not_parsed_without_a_key(strict: RunningServer, parsed: list[Any]) -> None:
    answer = talk(strict, head("Transfer-Encoding: chunked") + b"1\r\nx\r\n" * 50_000)
    assert answer.startswith(b"HTTP/1.1 401 ") and b"connection: close" in answer
    assert not any(isinstance(event, h11.Data) for event in parsed)


def test_chunks_of_a_byte_are_few(strict: RunningServer, parsed: list[Any]) -> None:
    sent = head(KEY, JSON, "Transfer-Encoding: chunked") + b"1\r\n \r\n" * 50_000
    answer = talk(strict, sent)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert sum(isinstance(event, h11.Data) for event in parsed) <= connection.SPARE_CHUNKS + 8


def test_chunks_of_common_clients_are_taken(strict: RunningServer) -> None:
    body = json.dumps({"prompt": "hi", "max_tokens": 1, "user": "x" * 400_000}).encode()
    pieces = [body[i : i + 1000] for i in range(0, len(body), 1000)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    sent = head(KEY, JSON, "Transfer-Encoding: chunked") + chunks
    for end in (b"0\r\n\r\n", b"0\r\nDigest: none\r\n\r\n"):
        assert talk(strict, sent + end, num_answers=1).startswith(b"HTTP/1.1 200 ")
    long = b"0\r\n" + b"a: b\r\n" * 100_000 + b"\r\n"
    assert talk(strict, sent + long).startswith(b"HTTP/1.1 400 ")


def test_a_head_is_parsed_only_within_its_limits(strict: RunningServer, parsed: list[Any]) -> None:
    for lines in (b"a: b\r\n" * 190_000, b"a:\r\n" * 2000, b"a: " + b"b" * 40_000 + b"\r\n"):
        for end in (b"\r\n", b""):
            answer = talk(strict, b"GET /health HTTP/1.1\r\n" + lines + end)
            assert answer.startswith(b"HTTP/1.1 431 ") and b"headers_too_large" in answer
    assert not any(isinstance(event, h11.Request) for event in parsed)


def test_a_body_that_is_not_read_ends_the_connection(strict: RunningServer) -> None:
    half = head("Content-Length: 100", request="GET /health HTTP/1.1") + b"x" * 50
    both = head(KEY, JSON, "Content-Length: 3", "Transfer-Encoding: chunked")
    both += b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    for sent in (half, both):  # RFC 9112, 6.1: a request with both lengths ends its connection
        answer = talk(strict, sent + HEALTH)
        assert answer.startswith(b"HTTP/1.1 200 ") and answer.count(b"HTTP/1.1 ") == 1
        assert b"connection: close" in answer


def test_requests_follow_each_other_on_a_connection(strict: RunningServer) -> None:
    asked = head(KEY, JSON, f"Content-Length: {len(BODY)}") + BODY
    answer = talk(strict, HEALTH + asked + asked + HEALTH, num_answers=4)
    assert answer.count(b"HTTP/1.1 200 ") == 4 and b"connection: close" not in answer


def test_a_client_is_told_to_continue(strict: RunningServer) -> None:
    parts = urlsplit(strict.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=120) as client:
        client.sendall(head(KEY, JSON, f"Content-Length: {len(BODY)}", "Expect: 100-continue"))
        assert client.recv(1000).startswith(b"HTTP/1.1 100 ")
        for byte in BODY:
            client.send(bytes([byte]))
        assert client.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_probes_have_connections_when_requests_have_none_left(strict: RunningServer) -> None:
    """Each of two keys has half of the connections; what is more gets 429, and then 503."""

    def ask(key: str) -> Any:
        headers = {"Authorization": f"Bearer {key}"}
        with strict.http(headers=headers) as http:
            return http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1})

    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(8))
        stack.enter_context(held_steps(strict))
        waiting = [pool.submit(ask, "sesame") for _ in range(3)]
        eventually(lambda: len(strict.loop._streams) == 3)
        refused = ask("sesame")
        assert refused.status_code == 429 and "open requests" in refused.text
        waiting += [pool.submit(ask, "rosebud") for _ in range(3)]
        eventually(lambda: len(strict.loop._streams) == 6)
        assert ask("rosebud").json()["error"]["code"] == "too_many_connections"
        with strict.http(headers={"Authorization": "Bearer sesame"}) as http:
            for path in ("/health", "/ready", "/metrics"):
                assert http.get(path).status_code == 200, path
    assert [answer.result().status_code for answer in waiting] == [200] * 6


def test_names_of_hosts_and_schemes_have_no_case(strict: RunningServer) -> None:
    with strict.http() as http:
        assert http.get("/health", headers={"Host": "LOCALHOST:80"}).status_code == 200
        for scheme in ("bearer", "BEARER"):
            headers = {"Authorization": f"{scheme} sesame"}
            assert http.get("/v1/models", headers=headers).status_code == 200


def test_a_key_waits_for_its_own_requests_alone(
    strict: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The only request of a key is served before those that another has waiting."""
    caplog.set_level("INFO", logger="llmopt")

    def ask(key: str) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        with strict.http(headers=headers) as http:
            body = {"prompt": ["hi"] * (30 if key == "sesame" else 1), "max_tokens": 11}
            http.post("/v1/completions", json=body).raise_for_status()

    with ThreadPoolExecutor(2) as pool, held_steps(strict):
        asked = [pool.submit(ask, "sesame")]
        eventually(lambda: len(strict.loop._streams) == 30)
        asked.append(pool.submit(ask, "rosebud"))
        eventually(lambda: len(strict.loop._streams) == 31)
    for answer in asked:
        answer.result()

    def keys_logged() -> list[str]:
        """The keys of this test's lines: no other test here asks for 11 tokens."""
        return re.findall(r"\+ (?:11|330) tokens, key (\S+)", caplog.text)

    # The server writes the line of a request after the client has the answer.
    eventually(lambda: len(keys_logged()) == 2)
    assert keys_logged() == ["api-key-2", "api-key-1"]


def held_event_loop(server: RunningServer) -> threading.Event:
    """Hold the server's event loop, so that what comes is there in one turn; the event lets it go on."""
    is_held, may_go_on = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        may_go_on.wait(60)

    server.loop._event_loop.call_soon_threadsafe(hold)
    assert is_held.wait(60)
    return may_go_on


def test_a_request_begins_between_those_of_another_key(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of 41 requests that come in one turn of the event loop has another key than the others."""
    caplog.set_level("INFO", logger="llmopt")
    parsed: list[bytes] = []
    parse = H11Protocol.data_received

    def recorded(self: H11Protocol, data: bytes) -> None:
        parsed.append(data)
        parse(self, data)

    monkeypatch.setattr(H11Protocol, "data_received", recorded)
    with ExitStack() as stack:
        options = ServerOptions(api_keys=("sesame", "rosebud"))
        server = stack.enter_context(running(make_engine("stories260K"), options))
        address = urlsplit(server.url)
        clients = [
            stack.enter_context(socket.create_connection((address.hostname, address.port)))
            for _ in range(41)
        ]
        may_go_on = held_event_loop(server)
        for number, client in enumerate(clients):
            key = "rosebud" if number == 40 else "sesame"
            client.sendall(head(f"Authorization: Bearer {key}", request="GET /v1/models HTTP/1.1"))
        may_go_on.set()

        def keys_logged() -> list[str]:
            return re.findall(r'"GET /v1/models" 200 .* key (\S+)', caplog.text)

        eventually(lambda: len(keys_logged()) == 41)
    assert keys_logged().index("api-key-2") < 20
    assert len(parsed) == 41 and b"rosebud" in b"".join(parsed[:20])


@pytest.mark.parametrize("clients_are_gone", [False, True])
def test_malformed_heads_of_a_burst_take_no_place_of_other_clients(
    clients_are_gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While they wait for their clients to close they are the first to be closed for others."""
    if clients_are_gone:

        def not_connected(_: Any) -> None:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

        monkeypatch.setattr(selector_events._SelectorSocketTransport, "write_eof", not_connected)  # pyright: ignore[reportAttributeAccessIssue]
    options = ServerOptions(max_connections=8, header_timeout_seconds=1)
    with running(make_engine("stories260K"), options) as server, ExitStack() as stack:
        address = urlsplit(server.url)

        def connected() -> socket.socket:
            return stack.enter_context(
                socket.create_connection((address.hostname, address.port), timeout=60)
            )

        clients = [connected() for _ in range(8)]
        may_go_on = held_event_loop(server)
        for client in clients:
            client.sendall(b"GET /v1/models HTTP/1.1\r\nno colon\r\n\r\n")
        may_go_on.set()
        assert {client.recv(12) for client in clients} == {b"HTTP/1.1 400"}
        idle = connected()
        with server.http() as http:
            assert http.get("/v1/models").status_code == 200
        assert idle.recv(12) == b"HTTP/1.1 408"


def test_a_head_that_waits_when_the_server_stops_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting: list[connection.BoundedConnection] = []

    def never_parsed(self: connection.BoundedConnection, client: tuple[str, bytes]) -> None:
        if self.heads[client]:
            waiting.append(self.heads[client][0][0])
        else:  # the second head comes in a later turn
            self.loop.call_soon(self._parse_waiting, client)

    monkeypatch.setattr(connection.BoundedConnection, "_parse_waiting", never_parsed)
    with running(make_engine("stories260K"), OPTIONS) as server:
        address = urlsplit(server.url)
        request = head("Authorization: Bearer sesame", request="GET /v1/models HTTP/1.1")
        with ExitStack() as stack:
            clients = [
                stack.enter_context(socket.create_connection((address.hostname, address.port)))
                for _ in range(2)
            ]
            for client in clients:
                client.sendall(request)
            eventually(lambda: waiting)
            (protocol,) = waiting
            assert protocol._head_timer is None  # the head is complete, however long it waits
            server.loop._event_loop.call_soon_threadsafe(protocol.shutdown)
            assert sorted(client.recv(12) for client in clients) == [
                b"HTTP/1.1 200",
                b"HTTP/1.1 503",
            ]


def test_a_key_that_runs_in_all_places_gives_one_to_another_key() -> None:
    """The sequences of the key that gave way go on later, with the tokens that they would have had."""
    long = {"max_tokens": 300, "temperature": 0, "ignore_eos": True}
    first, second = {"prompt": "Once", **long}, {"prompt": "Tom", **long}
    with running(make_engine("stories260K", max_num_seqs=2), OPTIONS) as server:

        def ask(key: str, body: dict[str, Any]) -> str:
            with server.http(headers={"Authorization": f"Bearer {key}"}) as http:
                answer = http.post("/v1/completions", json=body).raise_for_status()
            return answer.json()["choices"][0]["text"]

        alone = [ask("sesame", body) for body in (first, second)]
        with ThreadPoolExecutor(4) as pool, slow_steps(server):
            asked = [pool.submit(ask, "sesame", body) for body in (first, second, first)]
            server.wait_for(lambda engine: engine.stats.num_running == 2)
            server.wait_for(lambda engine: engine.stats.num_waiting == 1)
            num_steps = server.loop.metrics.num_steps
            ask("rosebud", {"prompt": "Lily", "max_tokens": 3, "ignore_eos": True})
            assert server.loop.metrics.num_steps - num_steps < 100
            assert not any(answer.done() for answer in asked)
        assert [answer.result() for answer in asked] == [*alone, alone[0]]
        assert server.wait_until_idle().num_preemptions == 1
        eventually(lambda: not server.loop._keys)


def test_sequences_and_live_views_of_a_key_are_bounded(
    strict: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strict.loop, "max_sequences_of_key", 4)
    monkeypatch.setattr(page, "MAX_VIEWERS", 2)
    with strict.http(headers={"Authorization": "Bearer sesame"}) as http:
        body = {"prompt": ["hi"] * 3, "n": 2, "max_tokens": 1}
        refused = http.post("/v1/completions", json=body)
        assert refused.status_code == 429 and "sequences" in refused.text
        with http.stream("GET", "/engine/state") as first:
            lines = first.iter_lines()  # whose end would close the stream
            next(lines)
            assert http.get("/engine/state").status_code == 429
