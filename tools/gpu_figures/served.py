"""Servers on the same checkpoint and kind of requests, through `llmopt bench --serve`, where installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from .figure import OURS

SERVERS = {"vLLM": "vllm", "SGLang": "sglang"}
"""The peers, and what `--serve` and their programs are called."""
LLMOPT = (sys.executable, "-c", "from llmopt.cli.main import main; main()")


def installed() -> dict[str, str]:
    """Peers whose programs are here, and ours before them: a server's figures stand beside a server's."""
    there = {who: name for who, name in SERVERS.items() if _is_installed(name)}
    return {f"{OURS} server": "llmopt", **there} if there else {}


def missing() -> list[str]:
    """Peers whose programs are not here."""
    return [who for who, name in SERVERS.items() if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    beside = str(Path(sys.executable).parent)
    return (shutil.which(name, path=beside) or shutil.which(name)) is not None


def words(name: str, folder: Path, count: int, low: int, high: int) -> list[str]:
    """The command of a run: `count` requests at once, of `low` to `high` tokens in and out."""
    middle = (low + high) // 2
    given = {
        "serve": name,
        "dataset": "random",
        "num-prompts": count,
        "request-rate": "inf",
        "random-input-len": middle,
        "random-output-len": middle,
        "random-range-ratio": f"{(high - low) / (high + low):.3f}",
    }
    options = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    return [*LLMOPT, "bench", str(folder), *options, "--ignore-eos", "--json"]


def throughput(name: str, folder: Path, count: int, low: int, high: int) -> float:
    """Output tokens per second of a server that is started for the run and stopped after it.

    Raises:
        RuntimeError: the run failed; its message is the last line of the command's errors.
    """
    run = subprocess.run(words(name, folder, count, low, high), capture_output=True, text=True)
    if run.returncode:
        last = (run.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"llmopt bench --serve {name} ended with {run.returncode}: {last}")
    return float(json.loads(run.stdout)["output_throughput"])
