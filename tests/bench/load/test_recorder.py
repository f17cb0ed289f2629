"""The recording proxy: bytes as they were, a trace without text, and what goes wrong on the way."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from aiohttp import web
from llmopt.bench.load.trace_writer import Lineage, prompt_of, usage_of
from llmopt.bench.workloads.trace_rows import block_hashes
from llmopt.bench.workloads.traces import read_trace

SYSTEM = "You navigate zeppelins over unpronounceable mountains. " * 12
USAGE = {"prompt_tokens": 300, "completion_tokens": 3, "total_tokens": 303}


async def answer(request: web.Request) -> web.StreamResponse:
    """The upstream: streams three pieces, a compressed document, or breaks off."""
    if request.method == "GET":
        return web.json_response({"path": request.raw_path, "agent": request.headers["User-Agent"]})
    body = await request.json()
    if body.get("zip"):
        data = gzip.compress(json.dumps({"choices": [], "usage": USAGE}).encode(), mtime=0)
        return web.Response(body=data, headers={"Content-Encoding": "gzip", "X-Two": "a"})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    for number in range(body.get("pieces", 3)):
        piece = {"choices": [{"delta": {"content": f"kumquat{number}"}}]}
        await response.write(f"data: {json.dumps(piece)}\n\n".encode())
        await asyncio.sleep(body.get("pause", 0.01))
        if body.get("breaks"):
            assert request.transport is not None
            request.transport.abort()
    if "silent" not in body:
        await response.write(f"data: {json.dumps({'choices': [], 'usage': USAGE})}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


@pytest.fixture(scope="module")
def upstream() -> Iterator[int]:
    ports: list[int] = []
    loop = asyncio.new_event_loop()

    async def start() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ports.append(runner.addresses[0][1])

    def run() -> None:
        loop.run_until_complete(start())
        loop.run_forever()

    thread = Thread(target=run, daemon=True)
    thread.start()
    while not ports:
        time.sleep(0.01)
    yield ports[0]
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@contextmanager
def recording(upstream: int, trace: Path, *words: str) -> Iterator[tuple[subprocess.Popen, int]]:
    """A recorder as a process of its own, and its port."""
    line = ["record", "--upstream", f"http://127.0.0.1:{upstream}", "--port", "0", "-o", str(trace)]
    with subprocess.Popen(
        [sys.executable, "-m", "llmopt.cli.main", *line, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.search(r"http://127.0.0.1:(\d+)", said)
        assert found, said
        try:
            yield process, int(found[1])
        finally:
            process.kill()


def post(port: int, body: dict[str, Any], **headers: str) -> tuple[int, dict[str, str], bytes]:
    link = HTTPConnection("127.0.0.1", port, timeout=20)
    link.request("POST", "/v1/chat/completions?key=hush", json.dumps(body), headers)
    answer = link.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read()


def chat(*said: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    turns = [{"role": roles[n % 2], "content": text} for n, text in enumerate(said)]
    messages = [{"role": "system", "content": SYSTEM}, *turns]
    return {"model": "m", "messages": messages, "stream": True, **more}


def rows_of(trace: Path, count: int) -> list[dict[str, Any]]:
    """The requests of a trace, as soon as there are so many."""
    lines = []
    for _ in range(200):
        whole = [line for line in trace.read_text().splitlines() if line.endswith("}")]
        lines = [json.loads(line) for line in whole]
        if len(rows := [row for row in lines if "id" in row]) >= count:
            return rows
        time.sleep(0.02)
    raise AssertionError(lines)


def test_what_passes_is_what_was_sent_and_the_trace_has_no_word_of_it(
    upstream: int, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    first = chat("Which quince variety withstands northern blizzards?" * 4)
    asked = first["messages"][1]["content"]
    second = chat(asked, "kumquat0kumquat1kumquat2", "Harvest marmalade tomorrow!" * 3)
    with recording(upstream, trace) as (process, port):
        for body in ({**first, "zip": True}, {"zip": True, "input": "fig"}, first, second):
            through, plain = post(port, body, Authorization="Bearer s3cret"), post(upstream, body)
            for headers in (through[1], plain[1]):
                headers.pop("Date")
            assert through == plain
        link = HTTPConnection("127.0.0.1", port)
        link.request("GET", "/v1/mo%2Fdels?a=%20b", headers={"User-Agent": "quiet/1"})
        assert json.loads(link.getresponse().read()) == {
            "path": "/v1/mo%2Fdels?a=%20b",
            "agent": "quiet/1",
        }
        post(port, chat(asked + " Parallel.", pieces=2), **{"x-session-id": "night"})
        post(port, chat("Compacted.", silent=1), **{"x-session-id": "night"})
        zipped, _, one, two, other, after = rows_of(trace, 6)
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        summary = process.stdout.read()
        assert process.wait(20) == 0
    assert "6 requests: 6 answered" in summary and "of 1 requests estimated" in summary
    assert [row["prompt_tokens"] for row in (zipped, one, two)] == [300] * 3
    assert (one["output_tokens"], one["tokens_by"]) == (3, "usage")
    assert (after["output_tokens"], after["tokens_by"]) == (4, "estimate")
    assert one["path"] == "/v1/chat/completions" and one["client"] == two["client"]
    assert two["parent"] == one["id"] and two["extends"] and two["gap"] > 0
    shared = sum(a == b for a, b in zip(one["hash_ids"], two["hash_ids"], strict=False))
    assert shared == len(one["hash_ids"]) - 1 < len(two["hash_ids"])
    assert other["session"] == after["session"] != None  # noqa: E711
    assert (after["parent"], after["extends"]) == (other["id"], False)
    written = trace.read_text().lower()
    said = " ".join(message["content"] for message in [*first["messages"], *second["messages"]])
    said += " kumquat s3cret hush night Parallel Compacted"
    for word in {word.lower() for word in re.findall(r"[A-Za-z0-9]{4,}", said)}:
        assert word not in written, word


def test_clients_that_leave_and_upstreams_that_fail(upstream: int, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with recording(unused.getsockname()[1], tmp_path / "down.jsonl") as (_, port):
            status, _, body = post(port, chat("a"))
            assert status == 502 and b"llmopt record" in body
    with recording(upstream, trace) as (_, port):
        with socket.create_connection(("127.0.0.1", port)) as half_open:
            half_open.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 500\r\n\r\n{")
            with pytest.raises((HTTPException, OSError)):
                post(port, chat("b", breaks=True))
            link = HTTPConnection("127.0.0.1", port)
            body = chat("c", pieces=99, pause=0.1, max_tokens=99)
            link.request("POST", "/x", json.dumps(body))
            answered = link.getresponse()
            answered.read(10)
            answered.close()
            link.close()
            assert post(port, chat("d"))[0] == 200
        broken, left, whole = sorted(rows_of(trace, 3), key=lambda row: row["arrival"])
    assert (broken["ended"], left["ended"], whole["ended"]) == ("upstream", "cancelled", "whole")
    assert 0 < left["ttft"] <= left["seconds"]
    found = read_trace("trace", trace)
    assert [row.cancel_seconds for row in found] == [None, left["seconds"], None]
    assert found[1].output_len == 99


def test_a_killed_recorder_leaves_every_request_that_had_ended(
    upstream: int, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    for start in (1, 2):
        with recording(upstream, trace, "--keep-text") as (process, port):
            post(port, chat("kept"))
            link = HTTPConnection("127.0.0.1", port)
            link.request("POST", "/v1/x", json.dumps(chat("lost", pieces=99, pause=0.1)))
            link.getresponse().read(10)
            assert len(rows_of(trace, start)) == start
            process.kill()
            process.wait()
        with trace.open("a") as torn:
            torn.write('{"id": "to')
    assert len(read_trace("trace", trace)) == 2
    os.truncate(trace, trace.stat().st_size - len('{"id": "to'))
    assert all("kept" in json.dumps(row["request"]) for row in rows_of(trace, 2))
    assert trace.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("data", "counts"),
    [
        (b'{"usage": {"input_tokens": 5, "output_tokens": 7}}', (5, 7, None)),
        (
            b'event: message_start\ndata: {"message": {"usage": {"input_tokens": 2, '
            b'"cache_read_input_tokens": 90, "cache_creation_input_tokens": 8, "output_tokens": 1}}}\n\n'
            b'event: message_delta\ndata: {"usage": {"output_tokens": 12}}\n\n',
            (100, 12, 90),
        ),
        (
            b'data: {"response": {"usage": {"input_tokens": 9, "input_tokens_details": '
            b'{"cached_tokens": 4}, "output_tokens": 3}}}\n\n',
            (9, 3, 4),
        ),
        (
            b'{"response": "x"}\n{"done": true, "prompt_eval_count": 4, "eval_count": 6}\n',
            (4, 6, None),
        ),
    ],
    ids=["openai", "anthropic", "responses", "ollama"],
)
def test_counts_of_every_api(data: bytes, counts: tuple[int, int, int | None]) -> None:
    found = usage_of(data)[0]
    assert (found["prompt"], found["output"], found.get("cached")) == counts


def test_a_prompt_is_the_same_text_in_either_form() -> None:
    marked = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    one = prompt_of({"messages": [{"role": "user", "content": [marked]}]})
    assert one == prompt_of({"messages": [{"role": "user", "content": "hi"}]}) != b""
    assert prompt_of({"prompt": [1, 2]}) == [1, 2] and prompt_of({"file": "x"}) is None


def test_a_parent_had_ended_and_is_the_longest_prefix() -> None:
    lineage, text = Lineage(), bytes(range(256)) * 2
    blocks = block_hashes(text)
    lineage.note("short", blocks[0], None, 1.0)
    lineage.note("long", blocks[2], None, 3.0)
    assert lineage.parent(blocks, None, 2.0) == ("short", 1.0, True)
    assert lineage.parent(blocks, None, 4.0) == ("long", 3.0, True)
    assert lineage.parent(block_hashes(b"x" * 300), None, 4.0) is None
    assert block_hashes(text, b"salt") != blocks
