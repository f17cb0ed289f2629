"""Bodies: what is counted while they arrive, what is unpacked, and what of them is in the log."""

from __future__ import annotations

import gzip
import json
import logging
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from llmopt.engine.server.protocol import generation_protocol
from llmopt.engine.server.protocol.server_options import ServerOptions
from llmopt.engine.server.requests import observe
from llmopt.engine.server.requests.middleware import MAX_NAMES, Outline
from llmopt.engine.server.requests.observe import MAX_LOGGED_BYTES, body_text

from ...support.live_server import RunningServer, make_engine, running

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def small() -> Iterator[RunningServer]:
    with running(make_engine("stories260K"), ServerOptions(max_body_bytes=4 << 20)) as it:
        yield it


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_strings_do_not_count(size: int) -> None:
    text = {"a\\": '[,:{"\\', "b": ["\\\\", '"', "x,y"], 'c"': [{}, 1, 2]}
    body, outline = json.dumps(text).encode(), Outline()
    for start in range(0, len(body), size):
        assert outline.add(body[start : start + size], 10, 10) is None
    assert (outline._num_values, outline._num_opened, outline._num_names) == (6, 4, 3)


def test_fields_of_a_body_are_bounded(small: RunningServer) -> None:
    fields = b",".join(b'"f%d" \n :1' % number for number in range(MAX_NAMES))
    body = b'{"prompt":"a",' + fields + b"}"
    with small.http(headers=JSON) as http:
        refused = http.post("/v1/completions", content=body)
        assert refused.status_code == 413 and "names of fields" in refused.text
        text = json.dumps({"prompt": "a", "max_tokens": 1, "user": '{"a": [1,' * 150_000})
        assert http.post("/v1/completions", content=text).status_code == 200


def test_a_gzip_body_is_unpacked_within_the_limit(small: RunningServer) -> None:
    body = json.dumps({"prompt": "hi", "max_tokens": 1, "user": "x" * 300_000}).encode()
    with small.http(headers={**JSON, "Content-Encoding": "gzip"}) as http:
        assert http.post("/v1/completions", content=gzip.compress(body)).status_code == 200
        bomb = zlib.compress(b" " * (64 << 20), wbits=31)
        assert http.post("/v1/completions", content=bomb).status_code == 413
        refused = http.post("/v1/completions", content=body)
        assert refused.status_code == 400 and "not gzip" in refused.text
    with small.http(headers={**JSON, "Content-Encoding": "br"}) as http:
        refused = http.post("/v1/completions", content=body)
        assert refused.status_code == 415 and "send gzip" in refused.text


def test_the_log_of_a_body_is_bounded_and_read_in_pieces() -> None:
    """No piece is so long that the interpreter's lock is kept from the event loop while it is searched."""
    letters = (b"a" * 1023 + b" ") * 8000
    pieces = [piece[0] for piece in observe._PIECES.finditer(letters)]
    assert b"".join(pieces) == letters and max(map(len, pieces)) <= 1 << 18
    assert body_text(letters) == letters[:MAX_LOGGED_BYTES].decode() + "... (of 8192000 bytes)"
    image = b'{"url": "' + b"A" * 5000 + b'", "text": "' + b"word " * (1 << 18) + b'"}'
    text = body_text(image)
    assert len(text) < MAX_LOGGED_BYTES + 100
    assert text.startswith('{"url": "' + "A" * 32 + "... (5000 characters)")
    assert text.endswith(" bytes)")


@pytest.mark.parametrize("end", [b"", b"b" * 1023, b"b" * 1024, b" "])
@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 3000])
def test_no_byte_of_a_short_body_is_lost_but_of_images(count: int, end: bytes) -> None:
    body = b'{"a": "' + b"\\" * count + b'"}' + end
    expected = body.decode()
    for letter in ("\\", "b"):
        run = letter * max(body.count(letter.encode()), 1)
        if len(run) >= 1024:
            expected = expected.replace(run, f"{run[:32]}... ({len(run)} characters)")
    assert body_text(body) == expected


def test_hosted_tools_are_logged_a_few_times(caplog: pytest.LogCaptureFixture) -> None:
    generation_protocol._log_skipped.cache_clear()
    tools: list[dict[str, Any]] = [{"type": f"hosted_{number}"} for number in range(1000)]
    logger = logging.getLogger("llmopt")
    logger.addHandler(caplog.handler)
    try:
        generation_protocol.client_tools("function").func(tools)  # type: ignore[call-arg]
    finally:
        logger.removeHandler(caplog.handler)
        generation_protocol._log_skipped.cache_clear()
    logged = {
        record.getMessage() for record in caplog.records if "hosted by" in record.getMessage()
    }
    assert len(logged) == generation_protocol.MAX_LOGGED_KINDS
