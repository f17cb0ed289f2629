"""The engine's phases of a decode step beside a profiler's: `python tools/step_profile.py [CHECKPOINT ...]`.

For each checkpoint, steps that are replayed from captured graphs, and eager ones. The phases are the
engine's own measurement; the profiler is independent of them: it samples the stack during the same
steps. Shares of a step; on a CPU, in a serial loop.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmopt.bench.load.step_split import PARTS, mean_split
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.cache.kv_cache import KvCache
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.engine import Engine
from llmopt.engine.execution.decode_graphs import StepGraphs
from llmopt.engine.execution.model_runner import ModelRunner
from llmopt.engine.execution.output_processor import OutputProcessor
from llmopt.engine.execution.step_loop import StepRecorder
from llmopt.engine.kernels.common.graphs import CpuGraph
from llmopt.engine.sampling.sampler import Draw, Sampler
from llmopt.engine.scheduling.scheduler import Scheduler
from stack_sampler import StackSampler


@dataclass(frozen=True, slots=True)
class Profile:
    """Decode steps, measured by the engine and by a sampling profiler.

    Attributes:
        split: the engine's own means, as `bench` records them.
        sampled: shares of a step by part, of the profiler.
        num_ticks: of the profiler's clock.
    """

    split: dict[str, Any]
    sampled: dict[str, float]
    num_ticks: int

    @property
    def timed(self) -> dict[str, float]:
        """Shares of a step by part, of the engine's phases."""
        return {part: ms / self.split["step_ms"] for part, ms in self.split["parts_ms"].items()}


def functions_of(engine: Engine) -> dict[Callable[..., Any], str]:
    """The functions whose stack frames identify the part of a step."""
    decoder: Any = type(engine.runner.decoder)
    return {
        Scheduler.schedule: "scheduling",
        Scheduler.update: "scheduling",
        OutputProcessor.keep: "scheduling",
        KvCache.copy: "preparing",
        ModelRunner._inputs: "preparing",
        ModelRunner._ends: "preparing",
        StepGraphs.prepare: "preparing",
        CpuGraph.replay: "kernels",
        decoder.forward: "kernels",
        decoder.logits: "kernels",
        ModelRunner._begin_draw: "sampling",
        Sampler.begin: "sampling",
        Draw.result: "sampling",
        OutputProcessor.outputs: "detokenizing",
        OutputProcessor.shown: "detokenizing",
    }


def profile(engine: Engine, batch: int, seconds: float) -> Profile:
    """Decode steps of `batch` greedy requests, for `seconds`."""
    sampler = StackSampler(functions_of(engine), within=Engine.step)
    recorder = StepRecorder(engine.scheduler, phases=True)
    length = min(engine.max_model_len, 512) - 1
    params = SamplingParams(temperature=0.0, max_tokens=length - 16, ignore_eos=True)
    left, number = seconds, 0
    while left > 0:
        for _ in range(batch):
            prompt = [
                3 + (13 * number + 7 * place) % (engine.vocab_size - 3) for place in range(16)
            ]
            engine.add_request(str(number), prompt, params)
            number += 1
        while any(r.num_output_tokens == 0 for r in engine.scheduler.requests()):
            engine.step()
        engine.recorder = recorder
        begun = time.perf_counter()
        with sampler:
            while engine.has_unfinished() and time.perf_counter() - begun < left:
                engine.step()
        left -= time.perf_counter() - begun
        engine.recorder = None
        for request in list(engine.scheduler.requests()):
            engine.abort(request.request_id)
    assert all(step.decode_only for step in recorder.steps)
    return Profile(mean_split(recorder.steps), sampler.shares(), sampler.ticks.total())


def open_engine(model: str, batch: int, *, enforce_eager: bool, num_threads: int = 1) -> Engine:
    """An engine with a serial loop on the CPU, warmed up."""
    engine = Engine(
        EngineConfig(
            model,
            device="cpu",
            num_threads=num_threads,
            max_num_seqs=batch,
            max_model_len=256,
            async_scheduling=False,
            enforce_eager=enforce_eager,
            enable_prefix_caching=False,
        )
    )
    profile(engine, batch, 0.2)
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("checkpoints", nargs="*", default=["stories3M"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for name in options.checkpoints:
        for enforce_eager in (False, True):
            engine = open_engine(
                name, options.batch, enforce_eager=enforce_eager, num_threads=options.threads
            )
            seen = profile(engine, options.batch, options.seconds)
            rows.append({"checkpoint": Path(name).name, **asdict(seen)})
            print_profile(Path(name).name, seen)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


def print_profile(name: str, seen: Profile) -> None:
    split = seen.split
    how = "replayed" if split["replayed_steps"] else "eager"
    print(
        f"{name}, {how}: {split['num_steps']} steps of {split['step_ms']:.3f} ms, {seen.num_ticks} ticks of "
        "the profiler"
    )
    print(f"{'':>14} {'phases':>8} {'profiler':>9} {'ratio':>6}")
    for part in PARTS:
        timed, sampled = seen.timed[part], seen.sampled.get(part, 0.0)
        ratio = f"{timed / sampled:6.2f}" if sampled else "     -"
        print(f"{part:>14} {timed:>8.1%} {sampled:>9.1%} {ratio}")


if __name__ == "__main__":
    main()
