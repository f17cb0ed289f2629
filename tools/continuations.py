"""Greedy continuations of a real model against transformers' `generate`, in float32.

    python tools/continuations.py MODEL [--count 100] [--new-tokens 24]

The engine generates all prompts together; transformers one after the other. Half of the prompts are the
openings of the bundled conversations, half are questions in the model's chat template. Exit code 1 where
a continuation differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.llm import LLM
from llmopt.recipes import DATA
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> int:
    """Print how many continuations are equal; 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="folder of a plain checkpoint")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--new-tokens", type=int, default=24)
    options = parser.parse_args()
    equal = 0
    for index, (ours, theirs) in enumerate(
        continuations(options.model, options.count, options.new_tokens)
    ):
        equal += ours == theirs
        if ours != theirs:
            at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
            print(f"prompt {index}: token {at} is {ours[at]}, transformers has {theirs[at]}")
    print(
        f"{equal} of {options.count} greedy continuations of {options.new_tokens} tokens equal "
        "transformers' generate in float32"
    )
    return 0 if equal == options.count else 1


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


if __name__ == "__main__":
    sys.exit(main())
