"""llama.cpp through its own decode call, for tools/cpu_peers.py: random tokens, no sampling."""

from __future__ import annotations

import random
import time
from typing import Any

import llama_cpp
from worker import Run, serve

PROMPT_TOKENS = 512
"""Tokens of a decode call at most."""


def opened(options: dict[str, Any]) -> tuple[Run, dict[str, Any]]:
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        options["model"].encode(), llama_cpp.llama_model_default_params()
    )
    if not model:
        raise RuntimeError("it does not load the file")
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = options["max_len"] * options["max_seqs"]
    params.n_batch = params.n_ubatch = PROMPT_TOKENS
    params.n_seq_max = options["max_seqs"]
    params.kv_unified = not options["keeps_contexts"]
    if options.get("kv_cache_dtype") == "int8":
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_Q8_0
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.n_threads = params.n_threads_batch = options["threads"]
    params.no_perf = True
    context = llama_cpp.llama_init_from_model(model, params)
    memory = llama_cpp.llama_get_memory(context)
    batch = llama_cpp.llama_batch_init(PROMPT_TOKENS, 0, 1)
    source = random.Random(1)
    kept: dict[int, list[int]] = {}

    def decode(rows: list[tuple[int, int, int, bool]]) -> None:
        """Rows of token, position, sequence, and whether its logits are wanted."""
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if llama_cpp.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        llama_cpp.llama_get_logits(context)[0]  # waits until it has computed

    def run(prompts: list[list[int]], new: int) -> list[list[float]]:
        rows: list[tuple[int, int, int, bool]] = []
        if not options["keeps_contexts"]:
            llama_cpp.llama_memory_clear(memory, False)
        for sequence, prompt in enumerate(prompts):
            last = len(prompt) - 1
            begin = last if kept.get(sequence) == prompt else 0
            if options["keeps_contexts"]:
                llama_cpp.llama_memory_seq_rm(memory, sequence, begin, -1)
                kept[sequence] = prompt
            for position in range(begin, len(prompt)):
                rows.append((prompt[position], position, sequence, position == last))
        for begin in range(0, len(rows), PROMPT_TOKENS):
            decode(rows[begin : begin + PROMPT_TOKENS])
        times = [[time.perf_counter()] for _ in prompts]
        for step in range(new - 1):
            decode(
                [
                    (source.randrange(3, 32000), len(prompt) + step, sequence, True)
                    for sequence, prompt in enumerate(prompts)
                ]
            )
            now = time.perf_counter()
            for own in times:
                own.append(now)
        return times

    return run, {"version": llama_cpp.__version__}


if __name__ == "__main__":
    serve(opened)
