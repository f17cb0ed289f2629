"""Attacks one after the other, each on a server of its own: `python -m tools.soak --rows`.

Each row is what one client once sent to silence another. While it is sent, one process asks for `/health` and
another for a completion of four tokens with another key, every 200 ms, as a balancer and a user would. Then
the memory must come back, and SIGTERM under the same attack must end the server within its grace.

To add a row, write a coroutine that sends the attack once and put a `Row` into `ROWS`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np
from PIL import Image

from tests.support.image_models import IMAGE_FAMILIES, save_image_model

from . import computing
from .attacks import GOOD, HOSTILE, by_schema, headers

ATTACK_SECONDS = 8.0
MEMORY_SECONDS = 60.0
"""Time in which the memory must be back after an attack."""
DRAIN_SECONDS, GRACE_SECONDS = 2, 9.0
"""`--drain-seconds` of the server, and time in which it must end after SIGTERM."""
MAX_HEALTH_SECONDS, MAX_COMPLETION_SECONDS = 0.25, 0.5
LEEWAY_BYTES = 50 << 20

PROBE = """
import sys, time, urllib.request
url, body, key = sys.argv[1:]
headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
while True:
    began, status = time.monotonic(), "200"
    try:
        request = urllib.request.Request(url, body.encode() or None, headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            response.read()
    except OSError as error:
        status = str(getattr(error, "code", type(error).__name__))
    print(time.monotonic() - began, status, flush=True)
    time.sleep(0.2)
"""
COMPLETION = {"prompt": "Once", "max_tokens": 4, "temperature": 0}


@dataclass(slots=True)
class Target:
    """The server of a row, and the answers that the attack got, by status."""

    url: str
    session: aiohttp.ClientSession
    answers: Counter[str] = field(default_factory=Counter)

    async def post(self, path: str, body: Any = None, **sent: Any) -> None:
        """Send a request with the attacker's key, `body` as JSON, and read its response."""
        sent = sent if body is None else {"json": body, **sent}
        async with self.session.post(self.url + path, **sent) as response:
            await response.read()
            self.answers[str(response.status)] += 1

    async def send_raw(self, data: bytes, seconds: float = 10.0) -> None:
        """Send bytes on a connection of their own, and read what comes until the server closes it."""
        parts = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            async with asyncio.timeout(seconds):
                writer.write(data)
                answer = await reader.read(12)
                self.answers[answer[9:12].decode() or "closed"] += 1
                while await reader.read(1 << 16):
                    pass
        except TimeoutError:
            self.answers["open"] += 1
        finally:
            writer.transport.abort()


@dataclass(frozen=True, slots=True)
class Row:
    """One attack.

    Attributes:
        name: name to select the row by.
        send: sends the attack once; it is repeated until the end.
        copies: senders at a time.
        options: more options of the server.
        make: writes the model into a folder; None: stories3M.
        probe: path and body of what the other key asks for.
    """

    name: str
    send: Callable[[Target], Awaitable[None]]
    copies: int = 1
    options: tuple[str, ...] = ()
    make: Callable[[Path], Any] | None = None
    probe: tuple[str, Mapping[str, Any]] = ("/v1/completions", COMPLETION)


@dataclass(slots=True)
class Outcome:
    """What a row did to the server. Times are maxima in seconds, memory is in bytes."""

    name: str
    health_seconds: float
    completion_seconds: float
    refused_probes: dict[str, int]
    answers: dict[str, int]
    resident_before: int
    resident_most: int
    resident_after: int
    exit_seconds: float
    exit_code: int | None

    def failures(self) -> list[str]:
        """Names of the limits that were broken."""
        grown = self.resident_after - self.resident_before
        checks = {
            "health": self.health_seconds <= MAX_HEALTH_SECONDS,
            "completion": self.completion_seconds <= MAX_COMPLETION_SECONDS,
            "probes": not self.refused_probes,
            "memory": grown <= LEEWAY_BYTES,
            "SIGTERM": self.exit_seconds <= GRACE_SECONDS and self.exit_code == 0,
        }
        return [name for name, is_kept in checks.items() if not is_kept]


@dataclass(slots=True)
class Probe:
    """A process that asks one thing again and again, and its times."""

    seconds: list[float] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)

    async def run(self, url: str, body: str, key: str) -> None:
        """Ask until cancelled. A request that is open at the end counts with its age."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-c", PROBE, url, body, key), stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        last = time.monotonic()
        try:
            async for line in process.stdout:
                last = time.monotonic()
                taken, status = line.decode().split()
                self.seconds.append(float(taken))
                self.refused.update([] if status == "200" else [status])
        finally:
            self.seconds.append(max(0.0, time.monotonic() - last - 0.2))
            process.kill()
            await process.wait()


async def run_row(row: Row, seconds: float = ATTACK_SECONDS) -> Outcome:
    """Start a server, attack it, wait for its memory, and end it under attack."""
    with TemporaryDirectory() as folder:
        if row.make is not None:
            row.make(Path(folder))
        return await _run_on(folder if row.make else "stories3M", row, seconds)


async def _run_on(model: str, row: Row, seconds: float) -> Outcome:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "llmopt", "serve-local", model, "--json", "--port", "0"),
        *("--api-key", GOOD, "--api-key", HOSTILE, "--drain-seconds", str(DRAIN_SECONDS)),
        *row.options,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    try:
        assert process.stdout is not None
        url = json.loads(await process.stdout.readline())["url"]
        return await _attack_and_end(row, process, url, seconds)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _attack_and_end(
    row: Row, process: asyncio.subprocess.Process, url: str, seconds: float
) -> Outcome:
    health, completion, resident = Probe(), Probe(), [0]
    async with aiohttp.ClientSession(
        headers=headers(HOSTILE),
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(120),
    ) as session:
        target = Target(url, session)
        await _warm_up(target, row)
        before = resident_bytes(process.pid)
        probes = [
            asyncio.ensure_future(health.run(f"{url}/health", "", GOOD)),
            asyncio.ensure_future(
                completion.run(url + row.probe[0], json.dumps(row.probe[1]), GOOD)
            ),
        ]
        attack = _start(row, target)
        for _ in range(int(seconds / 0.1)):
            await asyncio.sleep(0.1)
            resident.append(resident_bytes(process.pid))
        await _cancel(probes)
        await _cancel(attack)
        after = await _memory_at_rest(process.pid, before)
        attack = _start(row, target)
        await asyncio.sleep(1.5)
        process.send_signal(signal.SIGTERM)
        ended = await asyncio.to_thread(_seconds_to_end, process.pid)
        await _cancel(attack)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 1.0)
    return Outcome(
        row.name,
        max(health.seconds),
        max(completion.seconds),
        dict(health.refused + completion.refused),
        dict(target.answers),
        before,
        max(resident),
        after,
        ended,
        process.returncode,
    )


async def _warm_up(target: Target, row: Row) -> None:
    """Load what a server loads for its first completion and its first schema, and touch the KV cache by an
    ordinary load: no attack is that."""
    load = {**COMPLETION, "temperature": 1.0, "max_tokens": 100}
    await asyncio.gather(*(target.post("/v1/completions", load) for _ in range(64)))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for path, body in (("/v1/completions", by_schema(schema)), row.probe):
        await target.post(path, body)
    target.answers.clear()
    await asyncio.sleep(1.0)


def _start(row: Row, target: Target) -> list[asyncio.Task[None]]:
    async def again() -> None:
        while True:
            try:
                await row.send(target)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                target.answers[type(error).__name__] += 1
                await asyncio.sleep(0.5)  # so that the probes have a processor
            await asyncio.sleep(0.01)

    return [asyncio.create_task(again()) for _ in range(row.copies)]


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _memory_at_rest(pid: int, before: int) -> int:
    """The resident memory once it is back, or after `MEMORY_SECONDS`."""
    deadline = time.monotonic() + MEMORY_SECONDS
    while (resident := resident_bytes(pid)) > before + LEEWAY_BYTES:
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(0.5)
    return resident


def _seconds_to_end(pid: int) -> float:
    """Seconds until a process has ended, at most twice the grace. It must run outside the event loop, which
    attacks occupy."""
    began = time.monotonic()
    while resident_bytes(pid) and time.monotonic() < began + 2 * GRACE_SECONDS:
        time.sleep(0.05)
    return time.monotonic() - began


def resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 once it has ended."""
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def head(*lines: str, request: str = "POST /v1/completions HTTP/1.1") -> bytes:
    return "\r\n".join([request, "Host: localhost", *lines, "", ""]).encode()


KEY_LINE = f"Authorization: Bearer {HOSTILE}"
JSON_LINE = "Content-Type: application/json"


async def chunks_without_key(target: Target) -> None:
    """A body in chunks of one byte, 2 MiB on the wire, without a key."""
    await target.send_raw(head("Transfer-Encoding: chunked") + b"1\r\nx\r\n" * 350_000)


async def chunks_with_key(target: Target) -> None:
    """The same with a key."""
    lines = (KEY_LINE, JSON_LINE, "Transfer-Encoding: chunked")
    await target.send_raw(head(*lines) + b"1\r\n \r\n" * 350_000)


async def many_header_lines(target: Target) -> None:
    """A head of 1 MB in 190,000 lines, without a key."""
    await target.send_raw(head()[:-2] + b"a:b\r\n" * 190_000 + b"\r\n")


async def waiting_requests(target: Target) -> None:
    """An ordinary request that waits among 1,024 of one key."""
    body = {"prompt": "Once", "max_tokens": 100, "ignore_eos": True}
    await target.post("/v1/completions", body)
    await asyncio.sleep(2.0)


async def viewers(target: Target) -> None:
    """A viewer of the live view."""
    async with target.session.get(f"{target.url}/engine/state") as response:
        target.answers[str(response.status)] += 1
        async for _ in response.content.iter_chunked(1 << 16):
            pass
    await asyncio.sleep(3.0)


async def hosted_tools(target: Target) -> None:
    """12,000 types of hosted tools."""
    tools = [{"type": f"hosted_{random.randrange(1 << 40)}"} for _ in range(12_000)]
    body = {"model": "stories3M", "input": "a", "tools": tools, "max_output_tokens": 4}
    await target.post("/v1/responses", body)


async def logged_letters(target: Target) -> None:
    """Runs of 1,023 letters, 8 MB, for the log."""
    text = ("a" * 1023 + " ") * 8000
    await target.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "user": text})


async def unknown_fields(target: Target) -> None:
    """A million fields that no endpoint knows."""
    body = '{"prompt": "a", ' + ",".join(f'"f{n}":1' for n in range(1_000_000)) + "}"
    await target.post("/v1/completions", data=body, headers={"Content-Type": "application/json"})


async def half_a_get(target: Target) -> None:
    """A GET whose body does not come."""
    await target.send_raw(head("Content-Length: 100", request="GET /health HTTP/1.1") + b"x" * 50)


TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endfor %}"
)


def image_model(folder: Path) -> None:
    save_image_model(folder, IMAGE_FAMILIES["llava-1.5"])
    (folder / "chat_template.jinja").write_text(TEMPLATE)


@cache
def chat_of_pictures(side: int, count: int) -> dict[str, Any]:
    """A chat about pictures of `side` x `side` pixels, each a PNG much smaller than its pixels."""
    rows = np.random.default_rng(0).integers(0, 256, (side // 64 + 1, side // 64 + 1), np.uint8)
    pixels = rows.repeat(64, 0).repeat(64, 1)[:side, :side]
    file = BytesIO()
    Image.fromarray(pixels).convert("RGB").save(file, "png")
    url = f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}] * count
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 4, "temperature": 0}


async def pictures(target: Target) -> None:
    """A prompt of four pictures of 33 megapixels."""
    await target.post("/v1/chat/completions", chat_of_pictures(5792, 4))


ROWS: tuple[Row, ...] = (
    Row("chunks-no-key", chunks_without_key, copies=4),
    Row("chunks", chunks_with_key, copies=4),
    Row("header-lines", many_header_lines, copies=4),
    Row("waiting-requests", waiting_requests, copies=1100),
    Row("viewers", viewers, copies=500),
    Row("hosted-tools", hosted_tools, copies=2),
    Row("logged-letters", logged_letters, copies=2, options=("--log-prompts",)),
    Row("unknown-fields", unknown_fields, copies=2),
    Row("half-a-get", half_a_get, copies=20),
    Row("blank-template", computing.blank_template, copies=2),
    Row("multiples", computing.multiples, copies=2),
    Row("many-multiples", computing.many_multiples, copies=4),
    Row("ambiguous-grammar", computing.ambiguous_grammar),
    Row("blank-lines", computing.blank_lines, copies=2),
    Row("backtracking", computing.backtracking_pattern, copies=2),
    Row("special-texts", computing.special_texts, copies=2),
    Row("wrong-values", computing.wrong_values, copies=4),
    Row("long-texts", computing.long_texts, copies=6),
    Row("echoes", computing.echoes, copies=2),
    Row("large-tools", computing.large_tools, copies=4),
    Row("empty-parts", computing.empty_parts, copies=2),
    Row(
        "pictures",
        pictures,
        copies=2,
        make=image_model,
        probe=("/v1/chat/completions", chat_of_pictures(64, 1)),
    ),
)


async def run_rows(names: Sequence[str]) -> list[Outcome]:
    """Run the rows of these names, or all, and print a line for each."""
    known = {row.name: row for row in ROWS}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"--rows {' '.join(unknown)}: choose of {', '.join(known)}")
    outcomes = []
    title = ("row", "health", "completion", "MiB before", "most", "after", "SIGTERM", "broken")
    print("{:<18}{:>8}{:>12}{:>12}{:>8}{:>8}{:>9}  {}".format(*title), flush=True)
    for name in names or known:
        outcome = await run_row(known[name])
        outcomes.append(outcome)
        memory = (outcome.resident_before, outcome.resident_most, outcome.resident_after)
        before, most, after = (number >> 20 for number in memory)
        print(
            f"{name:<18}{outcome.health_seconds:>6.2f} s{outcome.completion_seconds:>10.2f} s"
            f"{before:>12}{most:>8}{after:>8}{outcome.exit_seconds:>7.1f} s"
            f"  {', '.join(outcome.failures()) or '-'}  {outcome.answers} {outcome.refused_probes}",
            flush=True,
        )
    return outcomes
