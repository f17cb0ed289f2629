"""API keys and limits, against a real server and raw sockets."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from llmopt.base.errors import BadInput
from llmopt.cli.serve_local import server_options, warn_if_open
from llmopt.engine.server.launch import own_names
from llmopt.engine.server.protocol.server_options import ServerOptions
from llmopt.engine.server.requests import middleware
from llmopt.engine.server.requests.middleware import MAX_VALUES

from ...support.live_server import (
    HANG_SECONDS,
    RunningServer,
    eventually,
    held_steps,
    make_engine,
    running,
    slow_steps,
)

LONG = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "seed": 1}
KEYS = ("sesame", "rosebud")
OPTIONS = ServerOptions(
    api_keys=KEYS,
    cors_origins=("https://app.example",),
    host_names=frozenset({"models.example"}),
    max_body_bytes=20_000,
    max_header_bytes=4_000,
    log_prompts=True,
)


@pytest.fixture(scope="module")
def strict() -> Iterator[RunningServer]:
    with running(make_engine("stories260K"), OPTIONS) as it:
        yield it


def key(name: str = "sesame") -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    found = response.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return found


def test_every_path_but_probes_and_the_page_needs_a_key(strict: RunningServer) -> None:
    with strict.http() as http:
        for path in ("/health", "/ready"):
            assert http.get(path).status_code == 200
        for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/frobnicate"):
            refused = http.get(path)
            assert error(refused, 401)["code"] == "invalid_api_key"
            assert refused.headers["www-authenticate"] == "Bearer"
        for name in KEYS:
            assert http.get("/v1/models", headers=key(name)).status_code == 200
        for wrong in ("Bearer sesam", "Bearer sesame ", "sesame", "Basic sesame", "Bearer \xff"):
            headers = [(b"authorization", wrong.encode("latin-1") + b"x")]
            assert http.get("/v1/models", headers=headers).status_code == 401


def test_pages_of_the_named_origin_may_call_and_no_others(
    strict: RunningServer, server: RunningServer
) -> None:
    asks = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    with strict.http() as http:
        allowed = http.options("/v1/models", headers={"Origin": "https://app.example", **asks})
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
        refused = http.get("/v1/models", headers={"Origin": "https://app.example"})
        assert refused.status_code == 401  # a page reads its refusals too
        assert refused.headers["access-control-allow-origin"] == "https://app.example"
        other = http.options("/v1/models", headers={"Origin": "https://evil.example", **asks})
        assert "access-control-allow-origin" not in other.headers
    with server.http() as http:
        closed = http.get("/v1/models", headers={"Origin": "https://app.example"})
        assert "access-control-allow-origin" not in closed.headers


def test_a_page_elsewhere_cannot_make_the_browser_post(server: RunningServer) -> None:
    """A form or a cross-origin script sends text/plain, which is not read as JSON."""
    with server.http() as http:
        response = http.post(
            "/v1/completions",
            content=json.dumps({"prompt": "hi"}),
            headers={"Content-Type": "text/plain", "Origin": "https://evil.example"},
        )
    assert response.status_code in (400, 415)


def test_a_foreign_host_name_is_refused(strict: RunningServer, server: RunningServer) -> None:
    with strict.http() as http:
        for host in (
            "localhost:1",
            "127.0.0.1",
            "[::1]:8000",
            "models.example",
            "models.example:80",
        ):
            assert http.get("/health", headers={"Host": host}).status_code == 200, host
        for host in ("evil.example:8000", "localhost.evil.example", "", "127.0.0.1.evil.example"):
            refused = http.get("/health", headers={"Host": host})
            assert error(refused, 421)["code"] == "unknown_host", host
    with server.http() as http:
        assert http.get("/health", headers={"Host": "any.example"}).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_is_refused(strict: RunningServer, chunked: bool) -> None:
    body = json.dumps({"prompt": "x" * 30_000}).encode()
    content: Any = (body[i : i + 1000] for i in range(0, len(body), 1000)) if chunked else body
    with strict.http(headers=key() | {"Content-Type": "application/json"}) as http:
        refused = http.post("/v1/completions", content=content)
        assert error(refused, 413)["code"] == "body_too_large"
        fits = http.post("/v1/completions", json={"prompt": "x", "user": "y" * 15_000})
        assert fits.status_code == 200


def test_a_large_body_is_read_beside_the_event_loop(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsed and validated on a worker, with the answers that small ones get, while others are answered."""
    threads, may_end = [], threading.Event()
    read = middleware.parsed

    def slow(*arguments: Any) -> Any:
        if len(arguments[1]) > 100_000:
            threads.append(threading.current_thread().name)
            may_end.wait(HANG_SECONDS)
        return read(*arguments)

    monkeypatch.setattr(middleware, "parsed", slow)
    long = {"user": "x" * 300_000}
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, **long}
    ollama = {"model": "tiny", **chat, "stream": False}
    asked: list[tuple[str, bytes, dict[str, str]]] = [
        (path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        for path, body in (
            ("/v1/completions", {"prompt": "hi", "max_tokens": 1, **long}),
            ("/v1/completions", {"prompt": "hi", "max_tokens": -1, "n": "many", **long}),
            ("/v1/chat/completions", chat),
        )
    ]
    asked.append((*asked[0][:1], asked[0][1] + b"}", asked[0][2]))
    asked.append(("/api/chat", json.dumps(ollama).encode(), {}))
    with server.http() as http, ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(http.post, p, content=c, headers=h) for p, c, h in asked]
        eventually(lambda: threads)
        assert http.post("/v1/completions", json={"prompt": "hi"}).status_code == 200
        assert not any(one.done() for one in answers)
        may_end.set()
        found = [one.result() for one in answers]
    assert [one.status_code for one in found] == [200, 400, 200, 400, 200]
    assert error(found[1], 400)["param"] == "n"
    assert error(found[3], 400)["message"].startswith("the body is not valid JSON")
    assert len(threads) == 5 and all(name.startswith("llmopt-json") for name in threads)


def test_the_bodies_of_a_key_are_bounded_together(
    strict: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "BODIES_PER_KEY", 1)
    half = json.dumps({**LONG, "user": "y" * 12_000, "max_tokens": 60})
    words = {"headers": key() | {"Content-Type": "application/json"}, "content": half}
    with strict.http() as http, ThreadPoolExecutor(2) as pool:
        with held_steps(strict):
            first = pool.submit(http.post, "/v1/completions", **words)
            eventually(lambda: strict.loop._streams)
            refused = error(http.post("/v1/completions", **words), 429)
            assert "bytes of bodies" in refused["message"]
            other = key("rosebud") | {"Content-Type": "application/json"}
            answered = pool.submit(http.post, "/v1/completions", headers=other, content=half)
            eventually(lambda: len(strict.loop._streams) == 2)
        assert first.result().status_code == answered.result().status_code == 200
        assert http.post("/v1/completions", **words).status_code == 200


@pytest.mark.parametrize("prompt", ["1", "[1]", "[[1]]", '"a"'])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/tokenize"])
def test_a_body_of_many_values_is_refused_before_they_are_read(
    server: RunningServer, path: str, prompt: str
) -> None:
    body = b'{"prompt":[' + b",".join([prompt.encode()] * (MAX_VALUES + 2)) + b"]}"
    with server.http(headers={"Content-Type": "application/json"}) as http:
        assert error(http.post(path, content=body), 413)["code"] == "body_too_large"


def test_large_headers_and_addresses_are_refused(strict: RunningServer) -> None:
    with strict.http(headers=key()) as http:
        for request in ({"headers": {"X-Large": "x" * 5000}}, {"params": {"q": "x" * 5000}}):
            assert error(http.get("/v1/models", **request), 431)["code"] == "headers_too_large"  # type: ignore[arg-type]


def talk(server: RunningServer, sent: bytes) -> bytes:
    """The server's response to these bytes before it hangs up."""
    host, port = server.url.removeprefix("http://").split(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=HANG_SECONDS) as plug:
        plug.sendall(sent)
        while piece := plug.recv(65536):
            received += piece
    return received


def head(*lines: str) -> bytes:
    return "\r\n".join(
        ["POST /v1/completions HTTP/1.1", "Host: localhost", *lines, "", ""]
    ).encode()


def test_a_body_that_never_ends_is_given_up() -> None:
    options = ServerOptions(body_timeout_seconds=1)
    with running(make_engine("stories260K"), options) as server:
        words = ("Content-Type: application/json", "Content-Length: 100")
        answer = talk(server, head(*words) + b'{"prompt": "')
    assert answer.startswith(b"HTTP/1.1 408")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "timeout"


@pytest.mark.parametrize(
    "sent",
    [
        head("Content-Length: " + "9" * 5000),
        head("Content-Length: -1"),
        head("Content-Length: 5", "Content-Length: 6"),
        head("Transfer-Encoding: chunked") + b"zz\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 40 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 2_000_000,
    ],
    ids=["endless number", "negative", "two lengths", "no chunk", "TLS", "endless header"],
)
def test_malformed_http_is_refused_and_the_server_stays_ready(
    strict: RunningServer, sent: bytes
) -> None:
    try:
        answer = talk(strict, sent)
    except ConnectionError:
        answer = b""
    assert not answer or answer.startswith(b"HTTP/1.1 4"), answer
    with strict.http() as http:
        assert http.get("/ready").status_code == 200


def post(server: RunningServer, name: str, **fields: Any) -> httpx.Response:
    with server.http(headers=key(name)) as http:
        return http.post("/v1/completions", json={**LONG, **fields})


def test_a_page_of_another_origin_gets_no_answer_without_asking(strict: RunningServer) -> None:
    body = json.dumps({"prompt": "hi", "max_tokens": 1})
    own = strict.url.replace("127.0.0.1", "localhost")
    with strict.http(headers=key()) as http:
        for origin, kind, status in (
            ("https://evil.example", None, 400),
            ("https://evil.example", "text/plain", 400),
            ("null", None, 400),
            ("https://evil.example", "application/json", 200),  # the browser asks before
            ("https://app.example", None, 400),
            (strict.url, None, 400),
            (own, "text/plain", 400),
        ):
            headers = {"Origin": origin} | ({} if kind is None else {"Content-Type": kind})
            answer = http.post("/v1/completions", content=body, headers=headers)
            assert answer.status_code == status, (origin, kind)
            is_ours = origin in ("https://app.example", strict.url)
            refused = "unsupported_media_type" if is_ours else "foreign_origin"
            code = None if status == 200 else refused
            assert answer.json().get("error", {}).get("code") == code
        assert http.post("/api/show", content='{"model": "tiny"}').status_code == 200
        headers = {"Origin": "https://evil.example"}
        assert (
            http.post("/api/show", content='{"model": "tiny"}', headers=headers).status_code == 400
        )


@pytest.mark.parametrize(
    ("host", "words", "names", "warns"),
    [
        ("127.0.0.1", {}, frozenset(), False),
        ("0.0.0.0", {}, own_names("0.0.0.0"), True),
        (
            "0.0.0.0",
            {"allowed_host": ["llm.example"]},
            {"llm.example", *own_names("0.0.0.0")},
            True,
        ),
        ("0.0.0.0", {"allowed_host": ["*"]}, None, True),
        ("0.0.0.0", {"api_key": ["k"]}, None, False),
    ],
)
def test_a_server_beyond_the_loopback_knows_its_names(
    host: str, words: dict[str, Any], names: Any, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    options = server_options(words, host=host)
    assert options.host_names == names
    warn_if_open(options, host)
    assert ("without --api-key: whoever reaches" in caplog.text) == warns


def test_a_response_that_takes_too_long_is_ended() -> None:
    # Of 8 s of steps, the first is to end in time.
    options = ServerOptions(api_keys=KEYS, request_timeout_seconds=3)
    with running(make_engine("stories260K"), options) as hurried:
        with slow_steps(hurried, seconds=0.02):
            whole = post(hurried, "sesame")
            assert error(whole, 504)["code"] == "timeout"
            with (
                hurried.http(headers=key()) as http,
                http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response,
            ):
                lines = [line for line in response.iter_lines() if line]
            last = json.loads(lines[-1].removeprefix("data: "))
            assert last["error"]["code"] == "timeout" and len(lines) > 1
        assert hurried.wait_until_idle().kv_blocks_used == 0


def test_the_engine_s_queue_is_bounded() -> None:
    with running(make_engine("stories260K", max_num_seqs=2), ServerOptions(max_waiting=3)) as it:
        with slow_steps(it), it.http() as http:
            gone = threading.Event()

            def hold() -> None:
                body = {**LONG, "prompt": ["a", "b", "c", "d"], "stream": True}
                with (
                    it.http() as other,
                    other.stream("POST", "/v1/completions", json=body) as response,
                ):
                    lines = response.iter_lines()
                    next(lines)
                    gone.wait(HANG_SECONDS)

            holding = threading.Thread(target=hold)
            holding.start()
            it.wait_for(lambda engine: engine.stats.num_waiting == 2)
            refused = http.post("/v1/completions", json={"prompt": ["x", "y"]})
            assert error(refused, 429)["code"] == "rate_limit_exceeded"
            assert "retry-after" in refused.headers
            gone.set()
            holding.join()
            it.wait_until_idle()
            assert http.post("/v1/completions", json={"prompt": ["x"] * 5}).status_code == 200
            assert http.post("/v1/completions", json={"prompt": ["x"] * 6}).status_code == 429
        assert it.wait_until_idle().kv_blocks_used == 0


def test_prompts_are_in_the_log_only_when_asked(
    strict: RunningServer, server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="llmopt")
    for one, headers in ((server, {}), (strict, key())):
        with one.http(headers=headers) as http:
            assert http.post("/v1/completions", json={"prompt": "hush hush"}).status_code == 200
            http.post("/v1/completions", json={"prompt": "hush hush", "n": "many"})
        assert ("hush hush" in caplog.text) == (one is strict)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"api_keys": ("",)}, "API key"),
        ({"api_keys": ("käse",)}, "API key"),
        ({"cors_origins": ("example.org",)}, "--cors-origin"),
        ({"cors_origins": ("https://example.org/page",)}, "--cors-origin"),
        ({"max_body_bytes": 0}, "--max-body"),
        ({"max_waiting": -1}, "--max-waiting"),
        ({"drain_seconds": -1}, "--drain-seconds"),
        ({"shutdown_delay_seconds": -1}, "--shutdown-delay"),
        ({"request_timeout_seconds": 0}, "--request-timeout"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(BadInput, match=named):
        ServerOptions(**options)
