"""Protocol of the loaders of other packages: a list of tasks in, a list of results out, as JSON.

    python load_PACKAGE.py TASKS.json ANSWERS.json

A task has `folder` (a checkpoint), `prompts` (token ids), `max_tokens` to generate greedily, `top` (how
many top tokens of each position are wanted), `dtype`, and options of single loaders. Its
answer has `loader` (what ran), `tokens` (generated, for each prompt) and `logprobs`: for each prompt and
each of its tokens but the first, the likeliest tokens and their log-probabilities. Where the package
refuses the checkpoint it has `error` instead.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Task = dict[str, Any]
Answer = dict[str, Any]


def serve(load_and_answer: Callable[[Task], Answer]) -> None:
    """Run every task of the command line; results before a crash are kept."""
    tasks = json.loads(Path(sys.argv[1]).read_text())
    answers: list[Answer] = []
    for task in tasks:
        try:
            answers.append(load_and_answer(task))
        except Exception as error:  # whatever another package raises is its refusal
            lines = [line for line in str(error).splitlines() if line.strip()]
            answers.append({"error": f"{type(error).__name__}: {' '.join(lines[:4])[:400]}"})
        Path(sys.argv[2]).write_text(json.dumps(answers))


def table(logprobs: torch.Tensor, top: int) -> list[dict[str, float]]:
    """The top tokens of each row of `[positions, vocabulary]`, by token id as text."""
    best = logprobs.topk(top)
    return [
        {str(token): value for token, value in zip(ids, values, strict=True)}
        for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


@torch.no_grad()
def answer_of(model: Any, task: Task) -> Answer:
    """The result of a transformers model, without a cache: only the model's own arithmetic."""
    tokens, logprobs = [], []
    for prompt in task["prompts"]:
        logits = model(torch.tensor([prompt])).logits[0].float()
        logprobs.append(table(logits.log_softmax(-1)[:-1], task["top"]))
        ids = list(prompt)
        for _ in range(task["max_tokens"]):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        tokens.append(ids[len(prompt) :])
    return {"tokens": tokens, "logprobs": logprobs}
