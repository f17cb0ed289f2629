"""llama.cpp on a CPU, as xllamacpp's wheels have it built. See `protocol`; the folder holds a GGUF file.

The option `never` has tokens that are not sampled: after part of a character the server gives no table.
"""

# The package lives in an environment of its own.
# pyright: reportMissingImports=false
from __future__ import annotations

from pathlib import Path
from typing import Any

import xllamacpp
from protocol import Answer, Task, serve


def load_and_answer(task: Task) -> Answer:
    (path,) = Path(task["folder"]).glob("*.gguf")
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.warmup = 256, 1, False
    params.cpuparams.n_threads = 2
    # Repacked weights need AMX, which not every machine that names it allows.
    params.no_extra_bufts = True
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)

    def generated(ids: list[int], count: int) -> list[dict[str, Any]]:
        """Greedy tokens after a prompt, each with its likeliest ones."""
        request = {"prompt": ids, "max_tokens": count, "logprobs": task["top"], "temperature": 0}
        request["logit_bias"] = [[token, False] for token in task.get("never", ())]
        found = server.handle_completions({**request, "cache_prompt": False, "ignore_eos": True})
        if "choices" not in found:
            raise RuntimeError(str(found))
        return found["choices"][0]["logprobs"]["content"]

    def likeliest(ids: list[int]) -> dict[str, float]:
        (one,) = generated(ids, 1)
        return {str(each["id"]): each["logprob"] for each in one["top_logprobs"]}

    prompts = task["prompts"]
    return {
        "loader": f"llama.cpp of xllamacpp {xllamacpp.__version__}",
        "tokens": [[one["id"] for one in generated(ids, task["max_tokens"])] for ids in prompts],
        "logprobs": [[likeliest(ids[:end]) for end in range(1, len(ids))] for ids in prompts],
    }


if __name__ == "__main__":
    serve(load_and_answer)
