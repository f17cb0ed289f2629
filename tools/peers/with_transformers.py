"""transformers' `generate`, for tools/cpu_peers.py."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from worker import Run, serve


class _Stamp(transformers.StoppingCriteria):
    """Stopping criterion that records the time of every token and never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def opened(options: dict[str, Any]) -> tuple[Run, dict[str, Any]]:
    torch.set_num_threads(options["threads"])
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        options["model"],
        dtype=torch.bfloat16,
        attn_implementation="sdpa",
        trust_remote_code=False,
    )
    model.eval()

    def generate(prompts: list[list[int]], new: int) -> list[list[float]]:
        stamp = _Stamp()
        model.generate(
            torch.tensor(prompts),
            attention_mask=torch.ones(len(prompts), len(prompts[0]), dtype=torch.int64),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=transformers.StoppingCriteriaList([stamp]),
        )
        return [stamp.times for _ in prompts]

    return generate, {"version": transformers.__version__}


if __name__ == "__main__":
    serve(opened)
