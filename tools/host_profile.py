"""Where the host time of decode steps goes behind a real model: `python tools/host_profile.py CHECKPOINT`.

What a step costs beside its captured forward pass, in thread time, where that pass is left out, runs a part
of its kernels, or is replaced by reading so many MiB, which computes nothing. If host time grew with kernels
alone it would be spent between them; where it grows with the bytes that are read, code and data of the host
are displaced from the caches. Kinds of steps take turns, some steps of each, of which the first does not
count. The phases are of steps of their own, because their clock takes time too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from llmopt.engine.base.host import cpu_model
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.engine import Engine
from llmopt.engine.execution.decode_graphs import DecodeStep
from llmopt.engine.execution.graph_setting import Forward
from llmopt.engine.execution.step import PhaseTimer
from llmopt.engine.kernels.common.graphs import replay_launches

GOALS = {1: 0.15, 16: 0.3}
"""Milliseconds a step, by batch."""
IN_A_ROW = 4
CONTEXT = 32
MEBIBYTE = 1 << 20
READS = (1, 4, 16, 64)


@dataclass(slots=True)
class Stand:
    """What runs in place of a captured decode step, and how long it takes.

    Attributes:
        kind: of `kinds`, of the steps to come.
        kinds: by name what runs, of a step and its forward pass.
    """

    kinds: dict[str, Callable[[DecodeStep, Forward], object]]
    kind: str = "whole"
    seconds: float = 0.0
    _forwards: dict[DecodeStep, Forward] = field(default_factory=dict)

    def prepare(self, prepare: Callable[..., Forward]) -> Callable[..., Forward]:
        """`DecodeStep.prepare` with `kind` in place of the forward pass."""

        def prepared(step: DecodeStep, *given: Any) -> Forward:
            forward = prepare(step, *given)
            if step not in self._forwards:
                self._forwards[step] = forward._replace(run=lambda: self._run(step, forward))
            return self._forwards[step]

        return prepared

    def _run(self, step: DecodeStep, forward: Forward) -> Any:
        begun = time.thread_time()
        self.kinds[self.kind](step, forward)
        self.seconds += time.thread_time() - begun


def part_of(share: float) -> Callable[[DecodeStep, Forward], object]:
    """Runs the first `share` of a graph's kernels."""
    parts: dict[DecodeStep, Callable[[], None]] = {}

    def run(step: DecodeStep, _: Forward) -> None:
        if step not in parts:
            launches = step.launches
            parts[step] = replay_launches(launches[: round(share * len(launches))])
        parts[step]()

    return run


def reading(count: int) -> Callable[[DecodeStep, Forward], object]:
    """Reads so many MiB."""
    memory = torch.ones(count * MEBIBYTE // 8, dtype=torch.int64)
    return lambda step, forward: memory.sum()


def begin(checkpoint: str, batch: int, steps: int) -> Engine:
    """An engine in the decode steps of `batch` greedy sequences."""
    engine = Engine(
        EngineConfig(
            checkpoint,
            device="cpu",
            num_threads=1,
            enable_prefix_caching=False,
            max_model_len=CONTEXT + steps + 2,
        )
    )
    params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
    for index in range(batch):
        prompt = torch.randint(3, engine.vocab_size, (CONTEXT,)).tolist()
        engine.add_request(str(index), prompt, params)
    while engine.stats.num_generated_tokens < 3 * batch:
        engine.step()
    return engine


def measure(checkpoint: str, batch: int, rounds: int) -> dict[str, Any]:
    """Median microseconds of each kind's steps, and of the phases of whole ones."""
    kinds: dict[str, Callable[[DecodeStep, Forward], object]] = {
        "stubbed": lambda step, forward: None,
        **{f"{share:.0%} of kernels": part_of(share) for share in (0.25, 0.5, 0.75)},
        "whole": lambda step, forward: forward.run(),
        **{f"read {count} MiB": reading(count) for count in READS},
    }
    stand = Stand(kinds)
    phases: dict[str, list[float]] = {}
    host: dict[str, list[float]] = {name: [] for name in kinds}
    model: dict[str, list[float]] = {name: [] for name in kinds}
    engine: Any = begin(checkpoint, batch, 4 + rounds * (len(kinds) + 1) * IN_A_ROW)
    timer_of, prepare = engine._step_timer, DecodeStep.prepare
    setattr(DecodeStep, "prepare", stand.prepare(prepare))  # noqa: B010
    try:
        for _ in range(rounds):
            for name in kinds:
                stand.kind = name
                for place in range(IN_A_ROW):
                    stand.seconds, begun = 0.0, time.thread_time()
                    engine.step()
                    spent = time.thread_time() - begun
                    if place:
                        host[name].append(1e6 * (spent - stand.seconds))
                        model[name].append(1e6 * stand.seconds)
            stand.kind = "whole"
            for _ in range(IN_A_ROW):
                timer = PhaseTimer(None, None)
                engine._step_timer = lambda timer=timer: timer
                engine.step()
                for phase, seconds in timer.seconds.items():
                    phases.setdefault(phase, []).append(1e6 * seconds)
            engine._step_timer = timer_of
    finally:
        setattr(DecodeStep, "prepare", prepare)  # noqa: B010
    phases.pop("forward")
    middle = {name: statistics.median(taken) for name, taken in host.items()}
    return {
        "batch": batch,
        "host_us": middle,
        "model_us": {name: statistics.median(taken) for name, taken in model.items()},
        "phases_us": {name: statistics.median(taken) for name, taken in phases.items()},
        "goal_us": 1e3 * GOALS[batch],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("checkpoint")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = [measure(options.checkpoint, batch, options.rounds) for batch in GOALS]
    print(f"{cpu_model()}; thread time, medians in microseconds")
    for one in found:
        print(f"batch {one['batch']}:")
        for name, host in one["host_us"].items():
            print(
                f"  {name:14} host {host:6.0f}   in place of the model {one['model_us'][name]:8.0f}"
            )
        print("  phases: " + ", ".join(f"{k} {v:.0f}" for k, v in one["phases_us"].items()))
        host, goal = one["host_us"]["whole"], one["goal_us"]
        print(f"  host time {host:.0f}, goal {goal:.0f}: {'met' if host <= goal else 'missed'}")
    if options.json:
        record = {"processor": cpu_model(), "cases": found}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
