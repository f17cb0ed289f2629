"""Record scripted agents through `llmopt record`, replay their trace by `llmopt bench`, and compare the runs.

    python -m tests.support.agent_replay --minutes 10 -o agent-replay.json

Agents call tools (a gap and a result), start sub-agents that they wait for, compact their context, and leave
answers; all share a system prompt. Each run has a fresh `serve-local` of the bundled model (its context set to
8,192, as agents have no use for 512) behind a recorder of its own, so that one instrument measures both. Exit code 1 where the prefix hit rates differ by more than 2
points, a quantile of TTFT or TPOT by more than 10 %, or a word of a prompt is in the trace.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import aiohttp
import numpy as np
from llmopt.bench.load.trace_writer import prompt_of
from llmopt.bench.machine.environment import describe
from llmopt.quant.base.atomic_io import write_atomically
from llmopt.recipes import MODELS

MODEL = "stories3M"
LLMOPT = (sys.executable, "-m", "llmopt")
CONTEXT, COMPACT_AT = 8192, 5500
"""Tokens of the model's context, and of an agent's from which it compacts it."""
QUANTILES = (50, 90, 99)
MOST_POINTS, MOST_SHARE = 2.0, 0.10
OPEN_FIELDS = ("path", "model", "ended", "tokens_by", "status")
"""Fields of a request that a trace holds openly."""
LETTERS = "bdfgklmnprstvz", "aeiou"


@contextmanager
def running(*words: str) -> Iterator[str]:
    """A server of this package; yields its first line. Interrupted at the end, and waited for.

    Its log is read to the end: it would wait for a full pipe after some 500 requests.
    """
    process = subprocess.Popen(
        [*LLMOPT, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    try:
        ready = next(line for line in process.stdout if "http://" in line)
        Thread(target=deque, args=(process.stdout, 0), daemon=True).start()
        yield ready
    finally:
        process.send_signal(2)
        process.wait(timeout=60)


@contextmanager
def recorded_server(model: Path, trace: Path) -> Iterator[str]:
    """The URL of a recorder before a fresh server."""
    with running("serve-local", str(model), "--port", "0", "--json") as ready:
        words = ("--upstream", json.loads(ready)["url"], "-o", str(trace), "--port", "0")
        with running("record", *words) as said:
            yield re.findall(r"http://[\d.:]+", said)[0]


@dataclass
class Agents:
    """Scripted agents over one connection pool, until a moment.

    Attributes:
        prompts: of every request, as the recorder reads them.
        counts: tool results, sub-agents, compactions and answers that were left.
    """

    url: str
    session: aiohttp.ClientSession
    drawn: random.Random
    until: float
    prompts: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.system = {"role": "system", "content": self.text(400)}

    def text(self, count: int) -> str:
        """Made-up words, which are in no trace by accident."""
        pairs = ("".join(map(self.drawn.choice, LETTERS)) for _ in iter(int, 1))
        return " ".join("".join(next(pairs) for _ in range(3)) for _ in range(count))

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    async def live(self, number: int) -> None:
        """Tasks one after the other, in one session: a replay on a slower machine has no more agents."""
        await asyncio.sleep(self.drawn.uniform(0, 3))
        while time.monotonic() < self.until:
            await self.work(f"agent-{number}", self.drawn.randint(4, 14))

    async def work(self, name: str, turns: int, *, is_sub: bool = False) -> None:
        """One task: answers and tool results in turns."""
        said = [self.system, {"role": "user", "content": self.text(self.drawn.randint(15, 60))}]
        tokens = 0
        for _ in range(turns):
            if time.monotonic() > self.until:
                return
            answer, total = await self.ask(name, said)
            tokens = total or tokens + 200
            said.append({"role": "assistant", "content": answer})
            if not is_sub and self.drawn.random() < 0.15:
                self.count("sub-agents")
                await self.work(f"{name}-sub-{time.monotonic_ns()}", 2, is_sub=True)
            await asyncio.sleep(min(8.0, self.drawn.lognormvariate(0.2, 0.7)))
            self.count("tool results")
            if tokens > COMPACT_AT:
                self.count("compactions")
                said.append({"role": "user", "content": self.text(12)})
                summary, tokens = await self.ask(name, said, may_leave=False)
                said = [self.system, {"role": "user", "content": summary}]
            result = self.text(round(min(250, self.drawn.lognormvariate(3.7, 0.8))))
            said.append({"role": "user", "content": result})

    async def ask(
        self, name: str, said: Sequence[dict[str, str]], *, may_leave: bool = True
    ) -> tuple[str, int]:
        """(the answer, tokens of prompt and answer); of an answer that was left what had come."""
        leaves = (
            self.drawn.uniform(0.01, 0.08) if may_leave and self.drawn.random() < 0.06 else None
        )
        body: dict[str, Any] = {
            "model": MODEL,
            "messages": said,
            "max_tokens": 80 if leaves else self.drawn.randint(15, 60),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self.prompts.append((prompt_of(body) or b"").decode())  # pyright: ignore[reportAttributeAccessIssue]
        pieces: list[str] = []
        tokens = 0

        async def read() -> int:
            found = 0
            address, headers = f"{self.url}/v1/chat/completions", {"session-id": name}
            async with self.session.post(address, json=body, headers=headers) as answer:
                answer.raise_for_status()
                async for line in answer.content:
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line[6:])
                    found = (event.get("usage") or {}).get("total_tokens", found)
                    pieces.extend(c["delta"].get("content") or "" for c in event["choices"])
            return found

        try:
            tokens = await asyncio.wait_for(read(), leaves)
        except TimeoutError:
            self.count("answers left")
        return "".join(pieces), tokens


async def drive(url: str, minutes: float, agents: int, seed: int) -> Agents:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        found = Agents(url, session, random.Random(seed), time.monotonic() + 60 * minutes)
        await asyncio.gather(*map(found.live, range(agents)))
    return found


def rows_of(trace: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, trace.read_text().splitlines())
    return [row for row in rows if row.get("status") == 200 or row.get("ended") == "cancelled"]


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Prefix hit rate in percent, and quantiles of TTFT and TPOT in ms, of the whole answers."""
    done = [row for row in rows if row["ended"] == "whole" and row["output_tokens"] > 1]
    hits = sum(row["cached_tokens"] or 0 for row in done) / sum(r["prompt_tokens"] for r in done)
    found = {"prefix hit rate %": 100 * hits}
    times = {
        "TTFT": [1000 * row["ttft"] for row in done],
        "TPOT": [1000 * (r["seconds"] - r["ttft"]) / (r["output_tokens"] - 1) for r in done],
    }
    for name, values in times.items():
        found |= {f"{name} p{q} ms": float(np.percentile(values, q)) for q in QUANTILES}
    return found


def words_found(prompts: Sequence[str], trace: Path) -> tuple[int, list[str]]:
    """(distinct words of four letters or more in the prompts, those of them in the trace beside its own)."""
    words = {word for prompt in prompts for word in re.findall(r"[A-Za-z]{4,}", prompt)}
    text = trace.read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    keys = {key for row in rows for key in (*row, *(row.get("block") or ()))}
    own = " ".join(keys | {str(row.get(key)) for row in rows for key in OPEN_FIELDS})
    return len(words), sorted(word for word in words if word in text and word not in own)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", default="by-dependency")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        traces = [Path(folder) / "original.jsonl", Path(folder) / "replayed.jsonl"]
        model = shutil.copytree(MODELS / MODEL, Path(folder) / MODEL)
        config = json.loads((model / "config.json").read_text())
        config["max_position_embeddings"] = CONTEXT
        (model / "config.json").write_text(json.dumps(config))
        with recorded_server(model, traces[0]) as url:
            agents = asyncio.run(drive(url, given.minutes, given.agents, given.seed))
        with recorded_server(model, traces[1]) as url:
            words = ["bench", "--base-url", url, "--backend", "openai-chat", "--no-quality"]
            words += ["--trace", str(traces[0]), "--replay", given.replay, "--num-runs", "1"]
            words += ["--num-warmups", "0", "--max-redone-passes", "0", "--tokenizer", str(model)]
            subprocess.run([*LLMOPT, *words, "-o", f"{folder}/run"], check=True)
        runs = [rows_of(trace) for trace in traces]
        count, found = words_found(agents.prompts, traces[0])
    before, after = map(figures, runs)
    rows, missed = [], len(found) > 0
    for name in before:
        change = after[name] - before[name] if "%" in name else after[name] / before[name] - 1
        is_kept = abs(change) <= (MOST_POINTS if "%" in name else MOST_SHARE)
        missed |= not is_kept
        said = f"{change:+.1f} points" if "%" in name else f"{change:+.1%}"
        rows.append({"figure": name, "original": before[name], "replay": after[name]})
        print(
            f"{name:18} {before[name]:9.2f} {after[name]:9.2f} {said:>12}"
            + " missed" * (not is_kept)
        )
    requests = [
        {key: sum(r["ended"] == key for r in run) for key in ("whole", "cancelled")} for run in runs
    ]
    print(f"requests: {requests[0]}, replayed {requests[1]}; agents: {agents.counts}")
    print(f"{count} words of the prompts searched in the trace, {len(found)} found {found[:9]}")
    if given.output:
        environment = describe("cpu")
        known = {key: environment[key] for key in ("machine", "load_average", "python", "commit")}
        record = {"environment": known, "minutes": given.minutes, "requests": requests}
        record |= {"agents": agents.counts, "figures": rows, "words": count, "found": found}
        write_atomically(given.output, json.dumps(record, indent=1) + "\n")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
