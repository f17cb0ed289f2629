"""vLLM for CPU, for tools/cpu_peers.py."""

from __future__ import annotations

import time
from typing import Any

import vllm
from worker import Run, serve


def opened(options: dict[str, Any]) -> tuple[Run, dict[str, Any]]:
    engine = vllm.LLM(
        options["model"],
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=options["max_len"],
        max_num_seqs=options["max_seqs"],
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    ).llm_engine
    names = iter(range(10**9))

    def run(prompts: list[list[int]], new: int) -> list[list[float]]:
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False
        )
        times: dict[str, list[float]] = {}
        for prompt in prompts:
            name = str(next(names))
            times[name] = []
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                own = next(times[name] for name in times if output.request_id.startswith(name))
                own.extend([now] * (len(output.outputs[0].token_ids) - len(own)))
        return list(times.values())

    return run, {"version": vllm.__version__}


if __name__ == "__main__":
    serve(opened)
