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
    params.kv_unified = True
    params.n_threads = params.n_threads_batch = options["threads"]
    params.no_perf = True
    context = llama_cpp.llama_init_from_model(model, params)
    memory = llama_cpp.llama_get_memory(context)
    batch = llama_cpp.llama_batch_init(PROMPT_TOKENS, 0, 1)
    source = random.Random(1)

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
        llama_cpp.llama_memory_clear(memory, False)
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
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
