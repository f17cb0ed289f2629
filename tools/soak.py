"""Soak test of a server under overload: `python tools/soak.py --seconds 1800`.

It starts `llmopt serve-local` with two random adapters and a KV cache far too small for its clients, so
that sequences are preempted all the time. Its clients ask for completions and chats, whole and streamed,
one and several, of the model and of its adapters; some hang up in the middle, some send malformed requests,
and separate processes are killed with SIGKILL while they read a stream. At the end SIGTERM is sent under
full load.

What must hold: every request is served or cleanly refused; once the load is gone every block of the KV
cache is free, and a greedy completion is what it was before; the server's memory does not grow; after
SIGTERM every stream ends or gets an error event, and the process exits with 0. The exit code is 1 where one
of them does not."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import torch
from llmopt.bench.machine.environment import machine_name
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.recipes import MODELS
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import save_file
from soak_clients import ADAPTERS, MODEL, SHARED, Soak, judge_stream, judge_whole

GREEDY = {"prompt": SHARED, "max_tokens": 40, "temperature": 0}
VICTIM = """
import json, sys, urllib.request
body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
headers = {"Content-Type": "application/json"}
for line in urllib.request.urlopen(urllib.request.Request(sys.argv[1], json.dumps(body).encode(), headers)):
    print(line, flush=True)
"""
SECONDS_TO_FILL_UP = 300
"""Before that, arenas and caches of kernels are still growing to their bounds."""
LEEWAY_BYTES = 24 << 20
"""Growth of the resident memory that is no leak."""


async def victims(url: str, soak: Soak, interval: float) -> None:
    """Processes that are killed while they read a stream."""
    while not soak.ended.is_set():
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-c", VICTIM, f"{url}/v1/completions"),
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


async def run(
    seconds: float, num_clients: int, seed: int, server_words: list[str]
) -> dict[str, Any]:
    """The whole soak; returns the record."""
    with tempfile.TemporaryDirectory() as folder:
        adapters = [write_adapter(Path(folder) / name, i) for i, name in enumerate(ADAPTERS)]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "llmopt.cli.main", "serve-local", MODEL, "--json"),
            *("--port", "0", "--max-num-seqs", "16", "--block-size", "16"),
            *("--kv-cache-memory-bytes", "2MiB", "--drain-seconds", "4"),
            *(word for path in adapters for word in ("--lora", f"{path.name}={path}")),
            *server_words,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        try:
            assert process.stdout is not None
            url = json.loads(await process.stdout.readline())["url"]
            found = await put_under_load(process, Soak(url, seed), seconds, num_clients)
            return {"seed": seed, "server_options": server_words, **found}
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def put_under_load(
    process: asyncio.subprocess.Process, soak: Soak, seconds: float, num_clients: int
) -> dict[str, Any]:
    limits = {"connector": aiohttp.TCPConnector(limit=0), "timeout": aiohttp.ClientTimeout(300)}
    async with aiohttp.ClientSession(**limits) as session:
        reference = await greedy(session, soak.url)
        load = [asyncio.ensure_future(soak.client(session)) for _ in range(num_clients)]
        others = asyncio.ensure_future(victims(soak.url, soak, min(5.0, seconds / 8)))
        watching = asyncio.ensure_future(watch(session, soak))
        await asyncio.sleep(seconds)
        soak.ended.set()
        samples = await watching
        await asyncio.gather(*load, others)
        at_rest = await wait_until_idle(session, soak.url)
        again = await greedy(session, soak.url)
        outcomes, unclean = dict(soak.outcomes), list(soak.unclean)
        last = await end_under_load(process, session, soak.url, num_clients)
    grown = growth([one["resident_bytes"] for one in samples])
    checks = {
        "every request was answered or cleanly refused": not unclean,
        "the queue was never empty for long": statistics.median(s["waiting"] for s in samples) > 0,
        "sequences were preempted": at_rest["llmopt_num_preemptions_total"] > 0,
        "clients left, were killed, and aborted": all(
            outcomes.get(kind) for kind in ("left in the stream", "killed while reading", "aborted")
        ),
        "every block is free at the end": at_rest["llmopt_kv_cache_usage_ratio"] == 0,
        "a greedy answer is what it was before": again == reference,
        "after SIGTERM every stream ended or was told": not last["unclean"] and last["streams"] > 0,
        "the server ended with 0": process.returncode == 0,
    }
    if seconds >= SECONDS_TO_FILL_UP:
        checks["the memory is flat"] = grown < LEEWAY_BYTES
    return {
        "seconds": seconds,
        "clients": num_clients,
        "checks": checks,
        "outcomes": outcomes,
        "unclean": unclean[:20],
        "after_sigterm": last,
        "tokens": at_rest["llmopt_generation_tokens_total"],
        "preemptions": at_rest["llmopt_num_preemptions_total"],
        "resident_bytes_growth": grown,
        "samples": samples[:: max(1, len(samples) // 60)],
    }


async def greedy(session: aiohttp.ClientSession, url: str) -> str:
    async with session.post(f"{url}/v1/completions", json=GREEDY) as response:
        return (await response.json())["choices"][0]["text"]


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
        body = {"prompt": "Once", "max_tokens": 300, "n": 1, "stream": is_stream}
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--server-options", default="", help="More words for serve-local.")
    parser.add_argument("--output", type=Path, help="Write the result here, as JSON.")
    chosen = parser.parse_args()
    found = asyncio.run(
        run(chosen.seconds, chosen.clients, chosen.seed, shlex.split(chosen.server_options))
    )
    found = {"machine": machine_name("cpu"), **found}
    text = json.dumps(found, indent=1) + "\n"
    if chosen.output is not None:
        partial = chosen.output.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(chosen.output)
    print(json.dumps({key: value for key, value in found.items() if key != "samples"}, indent=1))
    return 0 if all(found["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
