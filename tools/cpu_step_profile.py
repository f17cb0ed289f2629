"""Profile of an engine step on a CPU: `python tools/cpu_step_profile.py CHECKPOINT ... [--json FILE]`.

The engine's own steps, with a clock that gives every moment to the innermost part that is running, so that
the parts of a step sum to it. Greedy requests of random tokens: decode steps of 1, 8 and 16 sequences, and
prefills of 512 tokens; checkpoints are interleaved. "python" is what is neither the model nor sampling:
scheduling, the tensors of a step, outputs; "replayed" is the model where a step is replayed from a CPU graph.
The host time of a decode step is "python" and "sampler"; `tools/host_profile.py` says where it goes.
With `--enforce-eager` its operations have columns of their own; "between" is what it takes outside of them.
The roof is the time that the bytes of a step, or its multiply-adds, would take at the ceilings measured here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from llmopt.engine.base.host import cpu_model, usable_cores
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.engine import Engine
from llmopt.engine.execution.decode_graphs import DecodeStep
from llmopt.engine.execution.graph_setting import Forward
from llmopt.engine.kernels.common.cpu_measurements import Roofs
from llmopt.engine.kernels.common.graphs import CpuGraph
from llmopt.engine.kernels.linear.native_linear import native_linear
from llmopt.engine.model.decoder.decoder import LayerKernels
from llmopt.engine.model.layers.mlp import GatedMlp
from llmopt.engine.model.layers.norm import Norm
from llmopt.engine.model.layers.projection import Projection

BATCHES = {"alone": 1, "batch 8": 8, "batch 16": 16}
PREFILL, PREFILL_TOKENS = "prefill 512", 512
PARTS = (
    *("replayed", "linears", "head", "attention", "norms", "gate", "rope", "between"),
    *("sampler", "python"),
)
HOST_GOALS = {"alone": 0.15, "batch 16": 0.3}
"""Milliseconds of host time a step."""
SKIPPED = 3
"""Steps of a case that come first and do not count."""


@dataclass(slots=True)
class Clock:
    """Attributes every moment to the innermost part that runs. While it runs it only notes the times."""

    now: Callable[[], float]
    _marks: list[tuple[str | None, float]] = field(default_factory=list)

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        marks, now = self._marks, self.now

        def run(*args: Any, **kwargs: Any) -> Any:
            marks.append((part, now()))
            try:
                return call(*args, **kwargs)
            finally:
                marks.append((None, now()))

        return run

    def take(self) -> dict[str, float]:
        """Seconds of each part since it was last asked."""
        spent: dict[str, float] = {}
        parts: list[str] = []
        last = 0.0
        for part, now in self._marks:
            if parts:
                spent[parts[-1]] = spent.get(parts[-1], 0.0) + now - last
            last = now
            if part is None:
                parts.pop()
            else:
                # The LM head is a projection like others, told apart by its caller.
                parts.append("head" if parts[-1:] == ["head"] else part)
        self._marks.clear()
        return spent


def timed_steps(clock: Clock) -> Callable[..., Forward]:
    """`DecodeStep.prepare`, with the captured step itself on the clock."""
    prepare = DecodeStep.prepare
    forwards: dict[DecodeStep, Forward] = {}

    def prepared(step: DecodeStep, *given: Any) -> Forward:
        forward = prepare(step, *given)
        if step not in forwards:
            forwards[step] = forward._replace(run=clock.timed("replayed", forward.run))
        return forwards[step]

    return prepared


@contextmanager
def watched(engine: Engine, clock: Clock) -> Iterator[None]:
    """Every part of the engine's steps on the clock, while the block lasts."""
    runner: Any = engine.runner
    decoder: Any = runner.decoder
    watched_calls: list[tuple[Any, str, str]] = [
        (engine, "step", "python"),
        (runner._sampler, "begin", "sampler"),
        (runner._sampler, "largest", "sampler"),
        (CpuGraph, "replay", "replayed"),
        (decoder, "forward", "between"),
        (decoder, "logits", "head"),
        (Norm, "__call__", "norms"),
        (Norm, "of_sum", "norms"),
        (GatedMlp, "__call__", "gate"),
        (Projection, "__call__", "linears"),
    ]
    before = [vars(owner).get(name) for owner, name, _ in watched_calls]
    prepare = DecodeStep.prepare
    setattr(DecodeStep, "prepare", timed_steps(clock))  # noqa: B010
    for owner, name, part in watched_calls:
        setattr(owner, name, clock.timed(part, getattr(owner, name)))
    kernels = decoder._kernels
    decoder._kernels = {
        layout: LayerKernels(
            type(chosen.attend)(*(clock.timed("attention", kernel) for kernel in chosen.attend)),
            clock.timed("rope", chosen.rope_and_cache),
        )
        for layout, chosen in kernels.items()
    }
    try:
        yield
    finally:
        decoder._kernels = kernels
        setattr(DecodeStep, "prepare", prepare)  # noqa: B010
        for (owner, name, _), own in zip(watched_calls, before, strict=True):
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


def random_tokens(engine: Engine, count: int) -> list[int]:
    return torch.randint(3, engine.vocab_size, (count,)).tolist()


def decode(engine: Engine, clock: Clock, batch: int, context: int, steps: int) -> list[Any]:
    """The parts of each decode step of `batch` sequences that begin with `context` tokens."""
    total = SKIPPED + steps
    params = SamplingParams(temperature=0.0, max_tokens=total + 1, ignore_eos=True)
    for index in range(batch):
        engine.add_request(f"decode-{index}", random_tokens(engine, context), params)
    found = []
    while engine.has_unfinished():
        generated = engine.stats.num_generated_tokens
        computed = engine.stats.num_computed_tokens
        engine.step()
        spent, stats = clock.take(), engine.stats
        whole = stats.num_generated_tokens - generated == batch
        if whole and stats.num_computed_tokens - computed == batch:
            found.append(spent)
    return found[SKIPPED:]


def prefill(engine: Engine, clock: Clock, repeats: int) -> list[Any]:
    """The parts of each prefill of a prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    found = []
    for index in range(repeats + 1):
        engine.add_request(f"prefill-{index}", random_tokens(engine, PREFILL_TOKENS), params)
        while engine.has_unfinished():
            engine.step()
        found.append(clock.take())
    return found[1:]


def least_seconds(engine: Engine, roofs: Roofs, rows: int, context: int) -> float:
    """Lower bound of a step's time: bytes of weights and cache, or 8-bit multiply-adds, at the ceilings."""
    memory = engine.memory
    moved = memory.weight_bytes_per_step + rows * context * memory.kv_bytes_per_token
    decoder: Any = engine.runner.decoder
    sites = decoder.weights.linears.values()
    products = sum(site.out_features * site.in_features for site in sites)
    return max(moved / max(roofs.bytes), 2 * rows * products / max(roofs.operations))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("checkpoints", nargs="+")
    parser.add_argument(
        "--context", type=int, default=32, help="tokens before the first that counts"
    )
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cases", default=",".join([*BATCHES, PREFILL]))
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--cpu-activations", type=int, default=16)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument(
        "--busy",
        action="store_true",
        help="for a busy machine: one thread, timed by its own processor time",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cases = options.cases.split(",")
    if options.busy:
        options.threads = 1
    engines = {
        Path(name).name: Engine(
            EngineConfig(
                name,
                device="cpu",
                num_threads=options.threads,
                cpu_activations=options.cpu_activations,
                enforce_eager=options.enforce_eager,
                kv_cache_dtype=options.kv_cache_dtype,
                enable_prefix_caching=False,
                max_model_len=max(
                    options.context + SKIPPED + options.steps + 2, PREFILL_TOKENS + 1
                ),
            )
        )
        for name in options.checkpoints
    }
    roofs = Roofs(options.threads)
    clock = Clock(time.thread_time if options.busy else time.perf_counter)
    found: dict[tuple[str, str], list[Any]] = {}
    for _ in range(options.rounds):
        for case in cases:
            for name, engine in engines.items():
                roofs.measure()
                with watched(engine, clock):
                    if case == PREFILL:
                        steps = prefill(engine, clock, max(1, options.steps // 12))
                    else:
                        steps = decode(engine, clock, BATCHES[case], options.context, options.steps)
                found.setdefault((name, case), []).extend(steps)
    print(
        f"{cpu_model()}, {options.threads} threads, {native_linear().path}, context {options.context}; "
        f"roofs: read {max(roofs.bytes) / 1e9:.1f} GB/s, 8-bit {max(roofs.operations) / 1e9:.0f} GOP/s; "
        "milliseconds, medians"
    )
    rows = [
        row(engines[name], case, name, steps, roofs, options.context)
        for (name, case), steps in found.items()
    ]
    heads = ("checkpoint", "case", "step", *PARTS, "tokens/s", "of roof")
    print(" ".join(f"{head:>9}" for head in heads))
    for one in rows:
        numbers = [one["step_ms"], *(one["parts_ms"][part] for part in PARTS)]
        print(
            f"{one['checkpoint']:>9} {one['case']:>9} "
            + " ".join(f"{value:>9.2f}" for value in numbers)
            + f" {one['tokens_per_second']:>9.1f} "
            # On a busy machine the available bandwidth is not known.
            + ("        -" if options.busy else f"{one['of_roof']:>9.0%}")
        )
    for one in rows:
        if (goal := HOST_GOALS.get(one["case"])) is not None:
            verdict = "met" if one["host_ms"] <= goal else "missed"
            host = f"host time {one['host_ms']:.2f} ms a step, goal {goal:.2f}: {verdict}"
            print(f"{one['checkpoint']} {one['case']}: {host}")
    if options.json:
        record = {
            "processor": cpu_model(),
            "threads": options.threads,
            "path": native_linear().path,
            "context": options.context,
            "read_bytes_per_second": roofs.bytes,
            "int8_operations_per_second": roofs.operations,
            "rows": rows,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def row(
    engine: Engine, case: str, name: str, steps: list[Any], roofs: Roofs, context: int
) -> dict[str, Any]:
    """Medians of a case."""
    batch = BATCHES.get(case, PREFILL_TOKENS)
    whole = statistics.median(sum(step.values()) for step in steps)
    seen = context if case in BATCHES else 1
    host = statistics.median(step.get("python", 0.0) + step.get("sampler", 0.0) for step in steps)
    return {
        "checkpoint": name,
        "case": case,
        "steps": len(steps),
        "step_ms": 1e3 * whole,
        "host_ms": 1e3 * host,
        "parts_ms": {
            part: 1e3 * statistics.median(step.get(part, 0.0) for step in steps) for part in PARTS
        },
        "tokens_per_second": batch / whole,
        "of_roof": least_seconds(engine, roofs, batch, seen) / whole,
    }


if __name__ == "__main__":
    main()
