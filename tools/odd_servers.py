"""Compare load clients with the stamps of servers of unusual forms: thread pool, short backlog, HTTP/1.0.

    python -m tools.odd_servers -o odd-servers.json
    python -m tools.odd_servers --vllm-client vllm/benchmarks/lib/endpoint_request_func.py -o odd-servers.json

Each client sends the same open loop to a fresh server of each form. A row has the client's median TTFT and
TPOT over the server's own medians: 1 is a client that adds nothing. The peers are a plain aiohttp loop and
vLLM's request function, from a file of its source.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import urlopen

from llmopt.bench.load.exchange import EncodedRequest, Endpoint
from llmopt.bench.load.fleet import ITL_MS, TTFT_MS, Fleet
from llmopt.bench.load.stream import chunk_tokens
from llmopt.bench.machine.environment import describe

from tests.support.odd_known_server import VARIANTS, odd_server

COUNT, TOKENS = 60, 10
LIMIT = 0.05
Times = tuple[list[float], list[float]]
"""TTFT and TPOT of each request in milliseconds."""


def ours(port: int, rate: float) -> Times:
    """The load client of `llmopt bench`."""
    body = json.dumps({"prompt": "x", "max_tokens": TOKENS, "stream": True}).encode()
    requests = [EncodedRequest(f"odd-{n}", body, n / rate) for n in range(COUNT)]
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    with Fleet(1) as fleet:
        sent = fleet.run(Endpoint("127.0.0.1", port, head, timeout=30.0), requests, None)
    answers = [(exchange, exchange.answer) for exchange in sent.exchanges]
    if errors := [answer.error for _, answer in answers if answer.error]:
        raise SystemExit(f"{len(errors)} of {COUNT} requests failed: {errors[0]}")
    ttfts = [1000 * (answer.times[0] - exchange.sent) for exchange, answer in answers]
    spans = [
        1000 * (answer.times[-1] - answer.times[0]) / (sum(chunk_tokens(answer, None)[0]) - 1)
        for _, answer in answers
    ]
    return ttfts, spans


def aiohttp_loop(port: int, rate: float) -> Times:
    """A loop that posts with aiohttp and stamps each line."""

    async def request(session: Any) -> tuple[float, float]:
        sent, stamps = time.perf_counter(), []
        body = {"prompt": "x", "max_tokens": TOKENS, "stream": True}
        async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as answer:
            async for line in answer.content:
                if b'"text"' in line:
                    stamps.append(time.perf_counter())
        return 1000 * (stamps[0] - sent), 1000 * (stamps[-1] - stamps[0]) / (len(stamps) - 1)

    return _open_loop(request, rate)


def vllm_client(path: Path) -> Callable[[int, float], Times]:
    """vLLM's request function for completions."""
    spec = importlib.util.spec_from_file_location("vllm_client", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def client(port: int, rate: float) -> Times:
        url = f"http://127.0.0.1:{port}/v1/completions"
        asked = module.RequestFuncInput("x", url, 1, TOKENS, "m")

        async def request(session: Any) -> tuple[float, float]:
            got = await module.async_request_openai_completions(asked, session=session)
            if not got.success:
                raise SystemExit(f"vLLM's client failed: {got.error}")
            return 1000 * got.ttft, 1000 * (got.latency - got.ttft) / (TOKENS - 1)

        return _open_loop(request, rate)

    return client


def _open_loop(request: Callable[[Any], Awaitable[tuple[float, float]]], rate: float) -> Times:
    import aiohttp

    async def due(session: Any, seconds: float) -> tuple[float, float]:
        await asyncio.sleep(seconds)
        return await request(session)

    async def loop() -> list[tuple[float, float]]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            return await asyncio.gather(*(due(session, n / rate) for n in range(COUNT)))

    pairs = asyncio.run(loop())
    return [ttft for ttft, _ in pairs], [tpot for _, tpot in pairs]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--vllm-client", type=Path)
    parser.add_argument("--rate", type=float, default=20.0, help="Requests per second.")
    parser.add_argument("--rounds", type=int, default=3, help="Rounds of each client, in turns.")
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    clients = {"llmopt": ours, "aiohttp": aiohttp_loop}
    if given.vllm_client:
        clients["vllm"] = vllm_client(given.vllm_client)
    rows, within = [], True
    for variant in VARIANTS:
        ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in clients}
        for _ in range(given.rounds):
            for name, client in clients.items():
                with odd_server(TTFT_MS, ITL_MS, variant) as port:
                    ttfts, tpots = client(port, given.rate)
                    with urlopen(f"http://127.0.0.1:{port}/times") as answer:
                        own = json.load(answer)
                ratio = median(ttfts) / median(own["ttft"]), median(tpots) / median(own["tpot"])
                ratios[name].append(ratio)
        for name, pairs in ratios.items():
            ttft, tpot = median(pair[0] for pair in pairs), median(pair[1] for pair in pairs)
            rows.append(
                {"server": variant, "client": name, "ttft": ttft, "tpot": tpot, "rounds": pairs}
            )
            print(f"{variant:20} {name:8} TTFT {ttft:.3f}  TPOT {tpot:.3f}", flush=True)
            within &= name != "llmopt" or max(abs(ttft - 1), abs(tpot - 1)) <= LIMIT
    environment = describe("cpu")
    known = {key: environment[key] for key in ("machine", "load_average", "python", "commit")}
    given.output.write_text(json.dumps({"environment": known, "rows": rows}, indent=1) + "\n")
    print(
        f"llmopt's client is {'' if within else 'not '}within {LIMIT:.0%} of every server's own stamps"
    )
    return 0 if within else 1


if __name__ == "__main__":
    raise SystemExit(main())
