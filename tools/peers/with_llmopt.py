"""This package's engine, for tools/cpu_peers.py."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.engine import Engine
from worker import Run, serve


def opened(options: dict[str, Any]) -> tuple[Run, dict[str, Any]]:
    engine = Engine(
        EngineConfig(
            options["model"],
            device="cpu",
            dtype="bfloat16",
            num_threads=options["threads"],
            max_model_len=options["max_len"],
            max_num_seqs=options["max_seqs"],
            kv_cache_memory_bytes=options["cache_bytes"],
            cpu_activations=options.get("cpu_activations"),
            enable_prefix_caching=False,
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
    return run, {**about, "activation_bits": engine.activation_bits}


if __name__ == "__main__":
    serve(opened)
