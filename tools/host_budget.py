"""Host time of decode steps with the model stubbed: `python tools/host_budget.py [--json FILE]`.

What a step costs beside the model: scheduling, inputs, sampling of greedy rows and outputs. The model's
forward pass gives constants, so that nothing else is measured, for the loops of a CPU (synchronous, LM head
and argmax in the captured step) and of a GPU (asynchronous, static inputs changed by operations on the
device, which here are torch's on the CPU and take about as long as a launch).

Microseconds mean little on a busy machine. So each step is also given as a ratio to a fixed Python loop,
which is timed in turns with it, and as the number of function calls, Python's and C's, which are the same on
every machine. `tests/engine/execution/test_host_budget.py` asserts those.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.engine import Engine
from llmopt.engine.execution.decode_graphs import CPU_SIZES, CUDA_SIZES
from llmopt.engine.execution.decode_inputs import DecodeInputs
from llmopt.engine.execution.graph_setting import EagerGraph
from llmopt.engine.execution.step_loop import DeviceAsyncLoop
from llmopt.recipes import MODELS

BLOCK_SIZE = 16
TOKEN = 7
SKIPPED = 4
"""Decode steps that come first and do not count: captures, and caches of the batch."""
LOOPS = ("cpu", "gpu")
CASES = (("cpu", 1, 128), ("cpu", 16, 128), ("gpu", 32, 4096), ("gpu", 256, 1024))


@dataclass(frozen=True, slots=True)
class HostCost:
    """Of a decode step: medians of thread time, the ratio to the fixed loop, and calls of functions.

    Attributes:
        loop_iterations: iterations of the fixed Python loop that take as long.
        python_calls, c_calls: of functions, in a mean step.
    """

    loop: str
    batch: int
    context: int
    microseconds: float
    loop_iterations: float
    python_calls: float
    c_calls: float

    @property
    def microseconds_per_row(self) -> float:
        return self.microseconds / self.batch


def stubbed_engine(loop: str, batch: int, context: int, steps: int) -> Engine:
    """An engine whose model computes nothing, for `batch` sequences of `context` tokens and some steps."""
    length = context + SKIPPED + steps + 4
    engine = Engine(
        EngineConfig(
            MODELS / "stories260K",
            device="cpu",
            dtype="float32",
            num_threads=1,
            block_size=BLOCK_SIZE,
            num_blocks=batch * (length // BLOCK_SIZE + 2) + 1,
            max_num_seqs=batch,
            max_num_batched_tokens=batch * context,  # all prompts in a step
            enable_prefix_caching=False,
            async_scheduling=False,
        )
    )
    runner: Any = engine.runner
    scheduler: Any = engine.scheduler
    # A stubbed model has any context.
    scheduler.config = replace(scheduler.config, max_model_len=length)
    hidden = torch.zeros(batch * context, runner.decoder.hidden_size)
    logits = torch.zeros(max(512, batch), engine.vocab_size)
    logits[:, TOKEN] = 1
    runner.decoder.forward = lambda inputs, caches: hidden[: len(inputs.token_ids)]
    runner.decoder.logits = lambda states: logits[: len(states)]
    graphs = runner._graphs
    graphs._graphs.clear()
    device = torch.device("cpu")
    places = length // BLOCK_SIZE + 2
    graphs._static = DecodeInputs(max(32, batch), places, BLOCK_SIZE, device, torch.float32)
    graphs._sizes = CPU_SIZES
    if loop == "gpu":
        graphs._sizes = tuple(size for size in CUDA_SIZES if size <= max(32, batch))
        graphs._setting = replace(graphs._setting, capture=EagerGraph)
        graphs._static._arrays = None
        graphs._static._mirror.tables = graphs._static._mirror.tables.copy()
        engine._loop = DeviceAsyncLoop(runner)
    return engine


def begin(engine: Engine, batch: int, context: int, steps: int) -> None:
    """Start greedy requests in all phases of a block, and take them to their decode steps."""
    params = SamplingParams(temperature=0.0, max_tokens=steps + SKIPPED + 3, ignore_eos=True)
    for index in range(batch):
        prompt = [3 + (index + place) % 200 for place in range(context - index % BLOCK_SIZE)]
        engine.add_request(f"request-{index}", prompt, params)
    begun: set[str] = set()
    while len(begun) < batch:
        begun |= {output.request_id for output in engine.step()}
    for _ in range(SKIPPED - 1):
        engine.step()


def calls_of_steps(engine: Engine, steps: int) -> tuple[float, float]:
    """Python's and C's functions called in a mean step."""
    counts = {"call": 0, "c_call": 0}

    def count(frame: Any, event: str, argument: Any) -> None:
        if event in counts:
            counts[event] += 1

    sys.setprofile(count)
    try:
        for _ in range(steps):
            engine.step()
    finally:
        sys.setprofile(None)
    return counts["call"] / steps, counts["c_call"] / steps


class _Counter:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def add(self, value: int) -> int:
        self.count += value
        return self.count


def python_loop(iterations: int) -> list[int]:
    """The fixed loop: each iteration calls a method, changes an attribute and appends to a list."""
    counter, results = _Counter(), []
    for value in range(iterations):
        results.append(counter.add(value))
    return results


def measure(loop: str, batch: int, context: int, steps: int = 64) -> HostCost:
    """The cost of a step. A number of steps is counted, as many more are timed."""
    engine = stubbed_engine(loop, batch, context, 2 * steps)
    begin(engine, batch, context, 2 * steps)
    iterations = 200
    taken: list[float] = []
    fixed: list[float] = []
    for _ in range(steps):
        start = time.thread_time()
        engine.step()
        between = time.thread_time()
        python_loop(iterations)
        taken.append(between - start)
        fixed.append((time.thread_time() - between) / iterations)
    python_calls, c_calls = calls_of_steps(engine, steps)
    engine.close()
    seconds = statistics.median(taken)
    ratio = statistics.median(a / b for a, b in zip(taken, fixed, strict=True))
    return HostCost(loop, batch, context, 1e6 * seconds, ratio, python_calls, c_calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "loop  batch  context   us/step  us/row  loop iterations  /row  Python calls  /row  C calls"
    )
    costs = [measure(*case, steps=options.steps) for case in CASES]
    for cost in costs:
        print(
            f"{cost.loop:4} {cost.batch:6} {cost.context:8} {cost.microseconds:9.1f} "
            f"{cost.microseconds_per_row:7.2f} {cost.loop_iterations:16.0f} "
            f"{cost.loop_iterations / cost.batch:5.0f} {cost.python_calls:13.1f} "
            f"{cost.python_calls / cost.batch:5.1f} {cost.c_calls:8.1f}"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(cost) for cost in costs], indent=1) + "\n")


if __name__ == "__main__":
    main()
