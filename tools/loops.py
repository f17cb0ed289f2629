"""Async scheduling against the serial loop: `python tools/loops.py MODEL ... [--json FILE]`.

The same greedy requests through two engines of each model, in interleaved rounds. What async
scheduling can hide is the serial loop's host time beside the model: scheduling, bookkeeping, text.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from llmopt.bench.machine.environment import machine_name
from llmopt.bench.workloads.workload import WorkloadItem
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.engine import Engine
from static_batching import continuous, one_pass


def compare(model: str, batch_size: int, output_len: int, rounds: int) -> dict[str, Any]:
    """Tokens per second of both loops in every round, and the host's share of a serial step."""
    engines = {
        name: Engine(EngineConfig(model, max_num_seqs=batch_size, async_scheduling=overlapped))
        for name, overlapped in (("serial", False), ("overlapped", True))
    }
    items = [
        WorkloadItem(
            request_id=str(index),
            prompt_token_ids=tuple((13 * index + 7 * i) % 400 + 3 for i in range(32)),
            output_len=output_len,
        )
        for index in range(batch_size)
    ]
    rates: dict[str, list[float]] = {name: [] for name in engines}
    shares: list[float] = []
    for number in range(rounds + 1):
        names = list(engines)
        for name in names if number % 2 else names[::-1]:
            seconds, steps = one_pass(engines[name], items, continuous)
            if not number:  # a warm-up
                continue
            rates[name].append(batch_size * output_len / seconds)
            if name == "serial":
                host = sum(step.schedule_seconds + step.update_seconds for step in steps)
                shares.append(host / seconds)
    for engine in engines.values():
        engine.close()
    pairs = zip(rates["overlapped"], rates["serial"], strict=True)
    return {
        "model": Path(model).name,
        "batch_size": batch_size,
        "output_len": output_len,
        "tokens_per_second": rates,
        "ratios": [ours / theirs for ours, theirs in pairs],
        "host_share_of_a_serial_step": median(shares),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", help="folders, or names of bundled models")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    found = []
    for model in options.models:
        one = compare(model, options.batch_size, options.output_len, options.rounds)
        found.append(one)
        low, *_, high = sorted(one["ratios"])
        print(
            f"{one['model']}: overlapped / serial {median(one['ratios']):.3f} ({low:.3f} to {high:.3f}), "
            f"host {100 * one['host_share_of_a_serial_step']:.1f} % of a serial step"
        )
    if options.json is not None:
        result = {"machine": machine_name("cpu"), "models": found}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
