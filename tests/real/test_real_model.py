"""SmolLM2-135M-Instruct in the engine: greedy continuations as transformers makes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.core.llm import LLM
from llmopt.recipes import DATA
from transformers import AutoModelForCausalLM, AutoTokenizer

COUNT = 100
NEW_TOKENS = 24


def continuations(
    folder: Path, count: int, new_tokens: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Token ids of the engine and of transformers, for each prompt."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    prompts = _prompts(tokenizer, count)
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    llm = LLM(folder, dtype="float32", prefill_chunk_size=32)
    answers = llm.generate(prompts, params)
    load: Any = AutoModelForCausalLM.from_pretrained
    oracle = load(folder, dtype=torch.float32, trust_remote_code=False).eval()
    oracle.generation_config.eos_token_id = None
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = oracle.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new_tokens,
                pad_token_id=0,
            )
        yield answer.token_ids, output[0, len(prompt) :].tolist()


def _prompts(tokenizer: Any, count: int) -> list[list[int]]:
    records = json.loads((DATA / "sharegpt_stand_in.json").read_text(encoding="utf-8"))
    openings = [record["conversations"][0]["value"] for record in records]
    lines = (DATA / "sonnets.txt").read_text(encoding="utf-8").splitlines()
    questions = [f"What does this line of a sonnet mean? {line}" for line in lines if line]
    prompts = []
    for index in range(count):
        if index % 2:
            message = [{"role": "user", "content": questions[index // 2 % len(questions)]}]
            text = tokenizer.apply_chat_template(
                message, tokenize=False, add_generation_prompt=True
            )
        else:
            text = openings[index // 2 % len(openings)]
        prompts.append(tokenizer.encode(text))
    return prompts


@pytest.mark.timeout(900)
def test_greedy_continuations_equal_transformers(real_model: Path) -> None:
    pairs = list(continuations(real_model, COUNT, NEW_TOKENS))
    assert len(pairs) == COUNT
    assert all(len(ours) == NEW_TOKENS for ours, _ in pairs)
    assert [ours for ours, _ in pairs] == [theirs for _, theirs in pairs]
