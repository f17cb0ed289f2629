"""Continuous against static batching on the same engine: `python tools/static_batching.py`.

Requests have ShareGPT's lengths: the bundled stand-in's, or a real file's with `--dataset-path`. Three
modes, interleaved over some rounds:

* continuous: all requests are queued at once, and a finished one frees its slot for the next.
* static: batches of as many requests as the engine runs at once; the next batch waits for the longest of the
  one before, and until then the rows of those that have ended are computed on, as in a batch of tensors.
* static, idle rows: the same, but a row that has ended costs nothing. No batch of tensors does that; it
  separates what is won by filling slots from what is won by not computing padding rows.

Only the tokens that were asked for count. Then continuous batching once with each block size: how much of the
KV blocks in use held no token. A sequence leaves half a block empty in the mean, so the share is about
(block - 1) / 2 over the tokens of a running sequence: short conversations want small blocks.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from llmopt.bench.machine.environment import machine_name
from llmopt.bench.metrics.trace import unfilled_share
from llmopt.bench.workloads.sharegpt import sharegpt_workload
from llmopt.bench.workloads.workload import Workload, WorkloadItem
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.engine import Engine
from llmopt.engine.execution.step_loop import StepRecorder, StepTrace

Pass = Callable[[Engine, Sequence[WorkloadItem]], None]


def continuous(engine: Engine, items: Sequence[WorkloadItem]) -> None:
    """Queue everything, and step until it is done."""
    for item in items:
        params = SamplingParams(
            temperature=0, max_tokens=item.output_len, min_tokens=item.output_len, ignore_eos=True
        )
        engine.add_request(item.request_id, item.prompt_token_ids, params)
    while engine.has_unfinished():
        engine.step()


def idle_rows(engine: Engine, items: Sequence[WorkloadItem]) -> None:
    """Batch after batch; rows that have ended leave the batch smaller."""
    size = engine.scheduler.config.max_num_seqs
    for begin in range(0, len(items), size):
        continuous(engine, items[begin : begin + size])


def static(engine: Engine, items: Sequence[WorkloadItem]) -> None:
    """Batch after batch; every row goes on to the end of the longest, as far as the context reaches."""
    size = engine.scheduler.config.max_num_seqs
    for begin in range(0, len(items), size):
        batch = items[begin : begin + size]
        longest = max(item.output_len for item in batch)
        max_len = engine.scheduler.longest_sequence
        continuous(
            engine,
            [
                replace(item, output_len=min(longest, max_len - len(item.prompt_token_ids)))
                for item in batch
            ],
        )


WAYS: dict[str, Pass] = {
    "continuous": continuous,
    "static": static,
    "static, idle rows": idle_rows,
}


def one_pass(
    engine: Engine, items: Sequence[WorkloadItem], way: Pass
) -> tuple[float, list[StepTrace]]:
    """Seconds of a pass, and its steps."""
    engine.reset_prefix_cache()
    recorder = engine.recorder = StepRecorder(engine.scheduler)
    start = time.perf_counter()
    way(engine, items)
    seconds = time.perf_counter() - start
    engine.recorder = None
    return seconds, recorder.steps


def compare(engine: Engine, workload: Workload, rounds: int) -> dict[str, Any]:
    """Output tokens per second of every mode in every round; each round begins with another mode."""
    names = list(WAYS)
    rates: dict[str, list[float]] = {name: [] for name in names}
    steps: dict[str, int] = {}
    rows: dict[str, float] = {}
    one_pass(engine, workload.items[: engine.scheduler.config.max_num_seqs], continuous)  # warm-up
    for number in range(rounds):
        rotation = number % len(names)
        for name in names[rotation:] + names[:rotation]:
            seconds, trace = one_pass(engine, workload.items, WAYS[name])
            rates[name].append(workload.output_tokens / seconds)
            steps[name] = len(trace)
            rows[name] = mean(step.num_rows for step in trace)
    return {
        name: {
            "tokens_per_second": rates[name],
            "mean": mean(rates[name]),
            "cv": stdev(rates[name]) / mean(rates[name]) if rounds > 1 else None,
            "steps": steps[name],
            "mean_rows": rows[name],
        }
        for name in names
    }


def ratios(found: dict[str, Any], base: str) -> list[float]:
    """Continuous over `base`, round by round."""
    pairs = zip(
        found["continuous"]["tokens_per_second"], found[base]["tokens_per_second"], strict=True
    )
    return [ours / theirs for ours, theirs in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="stories3M")
    parser.add_argument("--dataset-path", type=Path, help="a ShareGPT file")
    parser.add_argument("--num-prompts", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--block-sizes", type=int, nargs="*", default=[4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()

    def engine(block_size: int) -> Engine:
        return Engine(
            EngineConfig(
                options.model, max_num_seqs=options.batch_size, block_size=block_size, num_threads=1
            )
        )

    own = engine(options.block_size)
    workload = sharegpt_workload(
        own.tokenizer,
        num_prompts=options.num_prompts,
        max_model_len=own.max_model_len,
        path=options.dataset_path,
        oversample=False,
    )
    lengths = sorted(item.output_len for item in workload.items)
    print(f"{options.model} in {own.dtype} on {machine_name(str(own.device))}, one thread")
    print(
        f"{len(lengths)} requests of the {workload.source}: {workload.prompt_tokens} prompt tokens, "
        f"{workload.output_tokens} to generate, {lengths[0]} to {lengths[-1]} of a request, "
        f"{mean(lengths):.0f} in the mean; {options.batch_size} at once"
    )
    found = compare(own, workload, options.rounds)
    for name, one in found.items():
        spread = "" if one["cv"] is None else f" (CV {one['cv']:.1%})"
        print(
            f"  {name:<18} {one['mean']:7.0f} output tokens/s{spread}, {one['steps']} steps with "
            f"{one['mean_rows']:.1f} rows in the mean"
        )
    for base in ("static", "static, idle rows"):
        each = ratios(found, base)
        print(
            f"  continuous is {mean(each):.2f} times {base} ({min(each):.2f} to {max(each):.2f} over "
            f"{len(each)} rounds)"
        )
    waste = {}
    for size in options.block_sizes:
        _, steps = one_pass(engine(size), workload.items, continuous)
        waste[size] = unfilled_share(steps, size)
        print(f"  blocks of {size:>3} tokens: {waste[size]:.2%} of the slots in use hold no token")
    if options.json:
        record = {
            "model": options.model,
            "machine": machine_name(str(own.device)),
            "workload": workload.source,
            "workload_sha256": workload.sha256,
            "num_requests": len(lengths),
            "prompt_tokens": workload.prompt_tokens,
            "output_tokens": workload.output_tokens,
            "output_lengths": {"least": lengths[0], "mean": mean(lengths), "most": lengths[-1]},
            "batch_size": options.batch_size,
            "block_size": options.block_size,
            "ways": found,
            "continuous_over_static": ratios(found, "static"),
            "continuous_over_idle_rows": ratios(found, "static, idle rows"),
            "kv_unfilled_share": waste,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
