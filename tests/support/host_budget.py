"""Decode steps with the model stubbed, so that nothing but the host's work is left: scheduling, inputs, sampling of
greedy rows and outputs.

The forward pass gives constants, for the loops of a CPU (synchronous, LM head and argmax in the captured step) and of
a GPU (asynchronous, static inputs changed by operations on the device, which here are torch's on the CPU). Function
calls, Python's and C's, are counted: unlike microseconds they are the same on every machine.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from typing import Any

import torch
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.execution.decode_graphs import CPU_SIZES, CUDA_SIZES
from llmopt.engine.execution.decode_inputs import DecodeInputs
from llmopt.engine.execution.graph_setting import EagerGraph
from llmopt.engine.execution.step_loop import DeviceAsyncLoop
from llmopt.recipes import MODELS

BLOCK_SIZE = 16
TOKEN = 7
SKIPPED = 4
"""Decode steps that come first and do not count: captures, and caches of the batch."""


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

    gc.collect()
    gc.disable()  # what other tests left calls finalizers
    sys.setprofile(count)
    try:
        for _ in range(steps):
            engine.step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return counts["call"] / steps, counts["c_call"] / steps
