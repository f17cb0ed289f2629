"""SmolLM2-135M-Instruct in the engine: greedy continuations as transformers makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.llm import LLM
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Water boils at a temperature of",
    "Once upon a time, in a village by the sea,",
)
NEW_TOKENS = 24


def test_greedy_continuations_equal_transformers(real_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    oracle: Any = AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.float32).eval()
    engine = LLM(str(real_model), dtype="float32")
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    answers = engine.generate(list(PROMPTS), params)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([tokenizer.encode(prompt)])
        theirs = oracle.generate(
            ids, do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS
        )
        assert answer.token_ids == theirs[0, ids.shape[1] :].tolist()
