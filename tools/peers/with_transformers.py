"""transformers' `generate`, or with `continuous` its continuous batching, for tools/cpu_peers.py."""

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

    def continuous(prompts: list[list[int]], new: int) -> list[list[float]]:
        """It gives no times of tokens: a run of one token tells when the prompts are done."""
        spent = []
        for count in (1, new):
            settings = transformers.GenerationConfig(
                max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0
            )
            cache = transformers.ContinuousBatchingConfig(
                num_blocks=options["max_len"], max_batch_tokens=512
            )
            begin = time.perf_counter()
            model.generate_batch(
                prompts, settings, continuous_batching_config=cache, progress_bar=False
            )
            spent.append(time.perf_counter() - begin)
        first, last = begin + spent[0], begin + spent[1]
        steps = max(1, new - 1)
        return [[first + (last - first) * k / steps for k in range(new)] for _ in prompts]

    about = {"version": transformers.__version__}
    return continuous if options.get("continuous") else generate, about


if __name__ == "__main__":
    serve(opened)
