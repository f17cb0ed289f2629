"""Soak test of a server under overload, attack and faults: `python -m tools.soak --seconds 1800`.

It starts `llmopt serve-local` (server.py) with two random adapters and a KV cache far too small
for its clients, so that sequences are preempted. Its clients ask for completions and chats, whole and
streamed, one and several, of the model and of its adapters; some hang up in the middle, some send malformed
requests, and separate processes are killed with SIGKILL while they read a stream. Every
`--fault-every` seconds a step of the engine fails. At the end SIGTERM is sent under full load.

What must hold: every request is served, cleanly refused, or told that its step failed; within 5 s of a fault
a probe is served; once the load is gone every block of the KV cache is free, and a greedy completion is what
it was before; the server has as many files open as at the beginning, and its memory does not grow; after
SIGTERM every stream ends or gets an error event, and the process exits with 0. The exit code is 1 where one
of them does not.

With `--attacks` attackers with a key of their own do all that once silenced a server (attacks.py). Then 99 of
100 probes of `/health` must be answered within 250 ms, the ordinary clients lose nothing, and when it is over
the memory is back within 50 MiB of what it was before.

With `--rows` each attack of rows.py is sent to a server of its own instead, and a line says what it did."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import torch
from llmopt.bench.machine.environment import machine_name
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.recipes import MODELS
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import save_file

from .attacks import GOOD, HOSTILE, MAX_PROBE_SECONDS, Attacks, Health, by_schema, headers
from .clients import ADAPTERS, MODEL, SHARED, Soak, judge_stream, judge_whole
from .faults import Recovery
from .rows import run_rows

GREEDY = {"prompt": SHARED, "max_tokens": 40, "temperature": 0}
VICTIM = """
import json, sys, urllib.request
body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + sys.argv[2]}
for line in urllib.request.urlopen(urllib.request.Request(sys.argv[1], json.dumps(body).encode(), headers)):
    print(line, flush=True)
"""
SECONDS_TO_FILL_UP = 300
"""Before that, arenas and caches of kernels are still growing to their bounds."""
LEEWAY_BYTES = 24 << 20
"""Growth of the resident memory that is no leak."""
ATTACKED_LEEWAY_BYTES = 50 << 20
"""The same after attacks, once they are over."""
FILES_LEEWAY = 2
"""Open files more than before: connections of the client that asks."""
SECONDS_BEFORE_ATTACKS = 60
"""In which only ordinary clients ask, before the memory is looked at for the first time."""
SERVER = Path(__file__).with_name("server.py")


async def victims(url: str, soak: Soak, interval: float) -> None:
    """Processes that are killed while they read a stream."""
    while not soak.ended.is_set():
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-c", VICTIM, f"{url}/v1/completions", GOOD),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        with suppress(TimeoutError):
            await asyncio.wait_for(process.stdout.readline(), 20)
        if process.returncode is None:
            process.kill()
            soak.outcomes["killed while reading"] += 1
        await process.wait()
        with suppress(TimeoutError):
            await asyncio.wait_for(soak.ended.wait(), interval)


async def scrape(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    async with session.get(f"{url}/metrics") as response:
        text = await response.text()
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def watch(session: aiohttp.ClientSession, soak: Soak) -> list[dict[str, float]]:
    samples = []
    while not soak.ended.is_set():
        found = await scrape(session, soak.url)
        samples.append(
            {
                "running": found["llmopt_num_requests_running"],
                "waiting": found["llmopt_num_requests_waiting"],
                "kv_usage": found["llmopt_kv_cache_usage_ratio"],
                "preemptions": found["llmopt_num_preemptions_total"],
                "tokens": found["llmopt_generation_tokens_total"],
                "resident_bytes": found["process_resident_memory_bytes"],
            }
        )
        with suppress(TimeoutError):
            await asyncio.wait_for(soak.ended.wait(), 1.0)
    return samples


@dataclass(frozen=True, slots=True)
class SoakOptions:
    """How long and how hard.

    Attributes:
        pause_seconds: mean pause of a client between two requests; 0: the server is always full.
        fault_seconds: between two faults; 0 for none.
        return_seconds: within this time the server must serve again after a fault.
        server_words: more options of the server.
        is_attacked: whether the attackers are there too, after `SECONDS_BEFORE_ATTACKS`.
    """

    seconds: float
    num_clients: int
    pause_seconds: float
    fault_seconds: float
    return_seconds: float
    seed: int
    server_words: list[str]
    is_attacked: bool = False

    @property
    def timeout_seconds(self) -> float:
        """Of the server, for heads, bodies and readers."""
        return max(1.0, min(10.0, self.seconds / 4))


async def run(options: SoakOptions) -> dict[str, Any]:
    """The whole soak; returns the record."""
    timeout = f"{options.timeout_seconds:g}"
    with tempfile.TemporaryDirectory() as folder:
        adapters = [write_adapter(Path(folder) / name, i) for i, name in enumerate(ADAPTERS)]
        log = Path(folder) / "server.log"
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, str(SERVER), "serve-local", MODEL, "--json"),
                *("--port", "0", "--max-num-seqs", "16", "--block-size", "16"),
                *("--kv-cache-memory-bytes", "2MiB", "--drain-seconds", "4"),
                *("--api-key", GOOD, "--api-key", HOSTILE),
                *(
                    "--header-timeout",
                    timeout,
                    "--body-timeout",
                    timeout,
                    "--send-timeout",
                    timeout,
                ),
                *(word for path in adapters for word in ("--lora", f"{path.name}={path}")),
                *options.server_words,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )
        try:
            assert process.stdout is not None
            url = json.loads(await process.stdout.readline())["url"]
            soak = Soak(url, options.seed, options.pause_seconds)
            found = await put_under_load(process, soak, options)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
        lines = log.read_text(errors="replace").splitlines()
        parts = Counter(line[7:] for line in lines if line.startswith("fault: "))
        found["faults"]["by_part"] = dict(parts)
        found["checks"]["every fault was injected"] = parts.total() == found["faults"]["faults"]
        counted = found["faults"]["failed_steps"] == parts.total()
        found["checks"]["every fault was counted as a failed step"] = counted
        unexpected = [
            line
            for line in lines
            if re.match(r"\w*(Error|Exception)\b", line) and "injected at" not in line
        ]
        found["checks"]["no error but the injected ones is in the log"] = not unexpected
        return {**asdict(options), **found, "unexpected_errors": unexpected[:20]}


async def put_under_load(
    process: asyncio.subprocess.Process, soak: Soak, options: SoakOptions
) -> dict[str, Any]:
    recovery = Recovery()
    async with open_session() as session:
        await in_a_form(session, soak.url)
        reference, files_before = await greedy(session, soak.url), num_open_files(process.pid)
        health, attacks = Health(), Attacks(soak.url, soak.ended, options.seed)
        attacked: list[float] = []
        gathered: list[Any] = await asyncio.gather(
            watch(session, soak),
            *([attack(attacks, health, soak, attacked)] if options.is_attacked else []),
            recovery.inject(
                process.pid, options.fault_seconds, options.seconds - min(5.0, options.seconds / 4)
            ),
            end_after(options.seconds, soak.ended),
            victims(soak.url, soak, min(5.0, options.seconds / 8)),
            recovery.probe(session, soak.url, soak.ended),
            *(soak.client(session) for _ in range(options.num_clients)),
        )
        samples: list[dict[str, float]] = gathered[0]
        at_rest = await wait_until_idle(session, soak.url)
        again = await greedy(session, soak.url)
        resident = at_rest["process_resident_memory_bytes"]
        if options.is_attacked:
            resident = await memory_at_rest(session, soak.url, attacked[0] + ATTACKED_LEEWAY_BYTES)
    async with open_session() as session:
        files_after = await files_at_rest(process.pid, files_before)
        outcomes, unclean = dict(soak.outcomes), list(soak.unclean)
        last = await end_under_load(process, session, soak.url, options.num_clients)
    grown = growth([one["resident_bytes"] for one in samples])
    checks = {
        "every request was answered or cleanly refused": not unclean,
        "sequences waited": any(sample["waiting"] for sample in samples),
        "sequences were preempted": at_rest["llmopt_num_preemptions_total"] > 0,
        "clients left, were killed, and aborted": all(
            outcomes.get(kind) for kind in ("left in the stream", "killed while reading", "aborted")
        ),
        "every block is free at the end": at_rest["llmopt_kv_cache_usage_ratio"] == 0,
        "a greedy answer is what it was before": again == reference,
        "as many files are open as before": files_after <= files_before + FILES_LEEWAY,
        "after SIGTERM every stream ended or was told": not last["unclean"] and last["streams"] > 0,
        "the server ended with 0": process.returncode == 0,
        **recovery.checks(options.return_seconds),
    }
    if options.is_attacked:
        p99 = health.record()["seconds"]["p99"]
        checks[f"99 of 100 probes took {MAX_PROBE_SECONDS:g} s at most"] = p99 <= MAX_PROBE_SECONDS
        checks["every probe was answered"] = not health.failed
        back = resident <= attacked[0] + ATTACKED_LEEWAY_BYTES
        checks["the memory is back within 50 MiB"] = back
    elif options.seconds >= SECONDS_TO_FILL_UP:
        checks["the memory is flat"] = grown < LEEWAY_BYTES
    return {
        "checks": checks,
        "outcomes": outcomes,
        "unclean": unclean[:20],
        "faults": {
            **recovery.record(),
            "failed_steps": at_rest["llmopt_failed_steps_total"],
        },
        "open_files": {"before": files_before, "after": files_after},
        "after_sigterm": last,
        "tokens": at_rest["llmopt_generation_tokens_total"],
        "preemptions": at_rest["llmopt_num_preemptions_total"],
        "resident_bytes_growth": grown,
        **(
            {
                "attacks": dict(attacks.answers),
                "health": health.record(),
                "resident_bytes": {
                    "before": attacked[0],
                    "most": max(one["resident_bytes"] for one in samples),
                    "after": resident,
                },
            }
            if options.is_attacked
            else {}
        ),
        "samples": samples[:: max(1, len(samples) // 60)],
    }


async def attack(
    attacks: Attacks, health: Health, soak: Soak, resident_before: list[float]
) -> None:
    """Attack once the ordinary clients have had their time, and probe the server all along."""
    with suppress(TimeoutError):
        await asyncio.wait_for(soak.ended.wait(), SECONDS_BEFORE_ATTACKS)
    async with open_session() as session:
        found = await scrape(session, soak.url)
    resident_before.append(found["process_resident_memory_bytes"])
    await asyncio.gather(attacks.run(), health.probe(soak.url, soak.ended))


async def memory_at_rest(session: aiohttp.ClientSession, url: str, limit: float) -> float:
    """The resident memory once it is below the limit; after 60 s that of then."""
    deadline = time.monotonic() + 60
    while True:
        resident = (await scrape(session, url))["process_resident_memory_bytes"]
        if resident <= limit or time.monotonic() > deadline:
            return resident
        await asyncio.sleep(1)


def open_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        headers=headers(GOOD),
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(300),
    )


async def end_after(seconds: float, ended: asyncio.Event) -> None:
    await asyncio.sleep(seconds)
    ended.set()


def num_open_files(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


async def files_at_rest(pid: int, before: int) -> int:
    """Open files once the server has seen that its clients are gone; after 20 s those of that moment."""
    deadline = time.monotonic() + 20
    while (count := num_open_files(pid)) > before + FILES_LEEWAY and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    return count


async def greedy(session: aiohttp.ClientSession, url: str) -> str:
    async with session.post(f"{url}/v1/completions", json=GREEDY) as response:
        return (await response.json())["choices"][0]["text"]


async def in_a_form(session: aiohttp.ClientSession, url: str) -> None:
    """Ask by a small schema: the library that compiles it is loaded for a first one, and no attack is
    that."""
    body = by_schema({"type": "object", "properties": {"a": {"type": "integer"}}})
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()


async def wait_until_idle(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """The metrics once no request runs or waits; after 30 s those of that moment."""
    deadline = time.monotonic() + 30
    while True:
        found = await scrape(session, url)
        left = found["llmopt_num_requests_running"] + found["llmopt_num_requests_waiting"]
        if not left or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.05)


async def end_under_load(
    process: asyncio.subprocess.Process, session: aiohttp.ClientSession, url: str, num_clients: int
) -> dict[str, Any]:
    """SIGTERM while every client waits for a response."""

    async def ask(is_stream: bool) -> str:
        body = {"prompt": "Once", "max_tokens": 300, "n": 4, "stream": is_stream}
        body |= {"ignore_eos": True}
        try:
            async with session.post(f"{url}/v1/completions", json=body) as response:
                if is_stream and response.status == 200:
                    return judge_stream([line async for line in response.content], body)
                return judge_whole(response.status, await response.json(), body)
        except (aiohttp.ClientError, ConnectionError) as error:
            return f"unclean: {type(error).__name__}"

    asking = [asyncio.ensure_future(ask(index % 2 == 0)) for index in range(num_clients)]
    await asyncio.sleep(1.0)
    num_open = sum(not one.done() for one in asking)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    outcomes = await asyncio.gather(*asking)
    await asyncio.wait_for(process.wait(), 60)
    return {
        "streams": num_open,
        "outcomes": dict(Counter(outcome.split(":")[0] for outcome in outcomes)),
        "unclean": [one for one in outcomes if one.startswith("unclean")],
        "seconds_to_end": time.monotonic() - began,
    }


def growth(resident: list[float]) -> float:
    """How much larger the memory is in the last fifth than in the second, in the median."""
    fifth = max(1, len(resident) // 5)
    return statistics.median(resident[-fifth:]) - statistics.median(resident[fifth : 2 * fifth])


def write_adapter(folder: Path, seed: int) -> Path:
    """Random matrices for every attention projection of the model, in PEFT's form."""
    generator = torch.Generator().manual_seed(seed)
    checkpoint = Checkpoint(MODELS / MODEL)
    tensors = {}
    for name in checkpoint.names:
        if not name.endswith(("q_proj.weight", "v_proj.weight")):
            continue
        rows, columns = checkpoint.shape(name)
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{stem}.lora_A.weight"] = torch.randn(4, columns, generator=generator) * 0.05
        tensors[f"{stem}.lora_B.weight"] = torch.randn(rows, 4, generator=generator) * 0.05
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def write(path: Path | None, record: dict[str, Any]) -> None:
    if path is not None:
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--minutes", type=float, help="In place of --seconds.")
    parser.add_argument("--attacks", action="store_true", help="Attack the server, all at once.")
    parser.add_argument(
        "--rows",
        nargs="*",
        metavar="NAME",
        help="Attack one server for each row instead; all rows.",
    )
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--server-options", default="", help="More words for serve-local.")
    parser.add_argument("--output", type=Path, help="Write the result here, as JSON.")
    parser.add_argument(
        "--pause", type=float, default=0.0, help="Mean pause of a client, in seconds."
    )
    parser.add_argument("--fault-every", type=float, default=20.0, help="Seconds; 0 for no faults.")
    parser.add_argument("--return-within", type=float, default=5.0, help="Seconds after a fault.")
    chosen = parser.parse_args()
    if chosen.rows is not None:
        rows = asyncio.run(run_rows(chosen.rows))
        write(
            chosen.output, {"machine": machine_name("cpu"), "rows": [asdict(row) for row in rows]}
        )
        return int(any(row.failures() for row in rows))
    options = SoakOptions(
        chosen.seconds if chosen.minutes is None else 60 * chosen.minutes,
        chosen.clients, chosen.pause, chosen.fault_every,
        chosen.return_within, chosen.seed, shlex.split(chosen.server_options), chosen.attacks,
    )  # fmt: skip
    found = asyncio.run(run(options))
    found = {"machine": machine_name("cpu"), **found}
    write(chosen.output, found)
    print(json.dumps({key: value for key, value in found.items() if key != "samples"}, indent=1))
    return 0 if all(found["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
