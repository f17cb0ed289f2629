"""Log lines of a server: text and JSON, one object a line, with request ids and without secrets."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pytest
from llmopt.engine.server.protocol.server_options import LogFormat, ServerOptions
from llmopt.engine.server.requests.observe import LEVELS, configure_logging

from ....support.live_server import RunningServer, eventually, make_engine, running

OPTIONS = ServerOptions(api_keys=("sesame",), log_prompts=True, max_body_bytes=2000)
NASTY = 'one\n{"level": "error"}\r\x1b[31m\u2028two'


@pytest.fixture(scope="module")
def strict() -> Iterator[RunningServer]:
    with running(make_engine("stories260K"), OPTIONS) as it:
        yield it


@contextlib.contextmanager
def logging_as(
    form: LogFormat, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], list[str]]]:
    """The lines so far of a log of that format."""
    before = {
        name: (logger.handlers, logger.propagate, logger.level)
        for name in LEVELS
        for logger in [logging.getLogger(name)]
    }
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    configure_logging(form)
    try:
        # Not splitlines: what it takes for the end of a line must be escaped, too.
        yield lambda: stream.getvalue().removesuffix("\n").split("\n")
    finally:
        logging.captureWarnings(False)
        for name, (handlers, propagate, level) in before.items():
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)


def ask(server: RunningServer, lines: Callable[[], list[str]], **fields: Any) -> None:
    """Four requests, and their four access lines."""
    headers = {"Authorization": "Bearer sesame", "X-Request-Id": "abc"}
    body = {"prompt": NASTY, "max_tokens": 3, "ignore_eos": True, **fields}
    with server.http(headers=headers) as http:
        assert http.post("/v1/completions", json=body).status_code == 200
        server.wait_until_idle()
        http.get("/v1/models/%0aERROR:%20x")
        http.post("/v1/completions", content=b"x" * 3000)
        http.get("/health", headers={"Authorization": "Bearer wrong"})
    eventually(lambda: any("/health" in line for line in lines()))


def test_json_is_an_object_a_line(strict: RunningServer, monkeypatch) -> None:
    with logging_as("json", monkeypatch) as lines:
        ask(strict, lines)
        logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
        logging.getLogger("llmopt.engine").error("a\nb")
        try:
            raise ValueError("c\nd")
        except ValueError:
            logging.getLogger("llmopt.engine").exception("failed")
        entries = [json.loads(line) for line in lines()]
    text = "\n".join(lines())
    assert "sesame" not in text and "\u2028" not in text
    for entry in entries:
        assert {"ts", "level", "logger", "message"} <= set(entry)
        assert datetime.fromisoformat(entry["ts"]).utcoffset() is not None
    prompts = [entry for entry in entries if entry["message"] == "request body"]
    assert json.loads(prompts[0]["body"])["prompt"] == NASTY
    requests = [entry for entry in entries if entry["message"] == "request"]
    assert [entry["status"] for entry in requests] == [200, 404, 413, 200]
    assert {entry["request_id"] for entry in (*requests, *prompts)} == {"abc"}
    first = requests[0]
    expected = {"key": "api-key-1", "method": "POST", "path": "/v1/completions", "model": "tiny"}
    assert {name: first[name] for name in expected} == expected
    assert (first["completion_tokens"], first["finish_reason"]) == (3, "length")
    assert first["response_id"] == "cmpl-abc" and first["prompt_tokens"] > 3
    assert 0 <= first["queue_seconds"] <= first["ttft_seconds"] <= first["seconds"]
    assert requests[1]["path"] == "/v1/models/%0AERROR%3A%20x" and "model" not in requests[1]
    assert requests[3]["key"] is None
    of_uvicorn, of_engine, failed = entries[-3:]
    assert (of_uvicorn["logger"], of_uvicorn["level"]) == ("uvicorn.error", "warning")
    assert of_engine["message"] == "a\nb" and "request_id" not in of_engine
    assert failed["exception"].endswith("ValueError: c\nd")


def test_text_has_the_id_and_no_raw_newline(strict: RunningServer, monkeypatch) -> None:
    with logging_as("text", monkeypatch) as lines:
        ask(strict, lines)
        logging.getLogger("llmopt.engine").error("a\nb\x1b")
        *of_requests, last = lines()
    assert last.endswith("a\\nb\\x1b")
    assert all(line.startswith("INFO: ") and line.endswith(" [abc]") for line in of_requests)
    (access,) = [line for line in of_requests if '"POST /v1/completions" 200' in line]
    assert " + 3 tokens, key api-key-1 [abc]" in access
    assert "sesame" not in "".join(of_requests)


def test_a_stream_that_is_left_is_logged_with_what_it_had(
    strict: RunningServer, monkeypatch
) -> None:
    body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with logging_as("json", monkeypatch) as lines:
        headers = {"Authorization": "Bearer sesame"}
        with (
            strict.http(headers=headers) as http,
            http.stream("POST", "/v1/completions", json=body) as response,
        ):
            next(response.iter_lines())
        eventually(lambda: any('"finish_reason"' in line for line in lines()))
        entry = next(json.loads(line) for line in lines() if '"finish_reason"' in line)
    assert (entry["status"], entry["finish_reason"]) == (200, "abort")
    assert 1 <= entry["completion_tokens"] < 400


def test_a_failed_request_s_traceback_has_its_id(strict: RunningServer, monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise TypeError("no\nluck")

    with logging_as("json", monkeypatch) as lines, strict.http() as http:
        with monkeypatch.context() as patch:
            patch.setattr(strict.engine, "add_request", fail)
            headers = {"Authorization": "Bearer sesame", "X-Request-Id": "bad"}
            answer = http.post("/v1/completions", json={"prompt": "hi"}, headers=headers)
        assert answer.status_code == 500 and answer.headers["x-request-id"] == "bad"
        entries = [json.loads(line) for line in lines()]
    failed = next(entry for entry in entries if entry["level"] == "error")
    assert failed["request_id"] == "bad" and "TypeError: no\nluck" in failed["exception"]


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_log_that_nobody_reads_stops_nobody(
    form: LogFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe holds some 64 kB; once it is read again, a line says how many are missing."""
    reading, writing = os.pipe()
    with (
        logging_as(form, monkeypatch),
        os.fdopen(writing, "w") as pipe,
        os.fdopen(reading, "rb", 0) as end,
    ):
        monkeypatch.setattr(sys, "stderr", pipe)
        log = logging.getLogger("llmopt.access")
        writer = threading.Thread(
            target=lambda: [log.info("line %d %s", number, "x" * 99) for number in range(2000)],
            daemon=True,
        )
        writer.start()
        writer.join(30)
        assert not writer.is_alive()
        kept = end.read(2**20).decode().count("x" * 99)
        assert 100 < kept < 2000
        log.info("read again")
        told, again = end.read(2**20).decode().splitlines()
        assert f"{2000 - kept} lines of the log are lost" in told and "read again" in again
