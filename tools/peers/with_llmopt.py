"""This package's engine, for tools/cpu_peers.py."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.planner.speed import (
    decode_step_bytes,
    decode_step_flops,
    prefill_flops,
    streamed_weight_bytes,
)
from llmopt.engine.planner.weights import UNQUANTIZED_BYTES
from llmopt.quant.families.config import model_shape
from llmopt.quant.families.shapes import ModelShape
from worker import Run, serve

BLOCK, SPARE_BLOCKS = 32, 8


def opened(options: dict[str, Any]) -> tuple[Run, dict[str, Any]]:
    engine = Engine(
        EngineConfig(
            options["model"],
            device="cpu",
            dtype="auto",
            num_threads=options["threads"],
            max_model_len=options["max_len"],
            max_num_seqs=options["max_seqs"],
            # As many tokens as llama.cpp's, which is filled with zeros at the start too.
            num_blocks=options["max_seqs"] * -(-options["max_len"] // BLOCK) + SPARE_BLOCKS,
            block_size=BLOCK,
            cpu_activations=options.get("cpu_activations"),
            kv_cache_dtype=options.get("kv_cache_dtype", "auto"),
            enable_prefix_caching=options["keeps_contexts"],
        )
    )

    def run(prompts: list[list[int]], new: int) -> list[list[float]]:
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), prompt, params)
        times: list[list[float]] = [[] for _ in prompts]
        while engine.has_unfinished():
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                times[int(output.request_id)].extend([now] * len(output.new_token_ids))
        return times

    about = {"version": "this one", "memory": asdict(engine.memory)}
    shape = model_shape(engine.model_config)
    work = {name: work_of(engine, shape, case) for name, case in options["cases"].items()}
    return run, {**about, "activation_bits": engine.activation_bits, "work": work}


def work_of(engine: Engine, shape: ModelShape, case: dict[str, Any]) -> dict[str, float]:
    """Bytes, operations and tokens of a decode step, or of a prefill, as the planner counts them."""
    memory = engine.memory
    # The planner subtracts what of the weights is looked up, which is not in the bytes of a step.
    weights = memory.weight_bytes_per_step + shape.looked_up_elements * UNQUANTIZED_BYTES
    batch, context = case["batch"], case["context"]
    if case["new"] == 1:
        moved = streamed_weight_bytes(shape, weights, context)
        operations = prefill_flops(shape, context)
        return {"bytes": moved, "operations": operations, "tokens": context}
    context += case["new"] / 2
    per_element = memory.kv_bytes_per_token / shape.kv_bytes_per_token(1)
    moved = decode_step_bytes(shape, batch, context, weights, per_element)
    operations = decode_step_flops(shape, batch, context)
    return {"bytes": moved, "operations": operations, "tokens": batch}


if __name__ == "__main__":
    serve(opened)
