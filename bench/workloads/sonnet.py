"""Sonnet workload: prompts of a fixed length from lines of verse, with a common prefix."""

from __future__ import annotations

import random

from ...recipes import DATA
from .workload import Tokenizer, Workload, fit_lengths, numbered

VERSE = DATA / "sonnets.txt"
# The prefix is part of the input of 550 tokens: `input` is what follows it.
SONNET_DEFAULTS = {"prefix": 200, "input": 350, "output": 150}


def sonnet_workload(
    tokenizer: Tokenizer,
    *,
    num_prompts: int,
    max_model_len: int,
    input_len: int | None = None,
    output_len: int | None = None,
    prefix_len: int | None = None,
    seed: int = 0,
) -> Workload:
    """`num_prompts` prompts of exactly `input_len` tokens of Shakespeare's sonnets.

    The first `prefix_len` tokens are the collection's first lines, the same in every prompt; lines
    drawn at random with replacement follow. vLLM's data set of this name works alike, with more
    text and with only approximate lengths.

    Raises:
        BadInput: explicit lengths that exceed the model's context.
    """
    behind = None
    if input_len is not None:
        prefix_len = min(SONNET_DEFAULTS["prefix"], input_len // 2) if prefix_len is None else prefix_len
        behind = input_len - prefix_len
    lengths, notes = fit_lengths(
        {"prefix": prefix_len, "input": behind, "output": output_len},
        SONNET_DEFAULTS,
        max_model_len,
        "--sonnet-",
    )
    total = lengths["prefix"] + lengths["input"]
    lines = [line + "\n" for line in VERSE.read_text(encoding="utf-8").splitlines() if line]
    pieces = [list(tokenizer.encode(line, add_special_tokens=False)) for line in lines]
    prefix = list(tokenizer.encode("", add_special_tokens=True))
    place = 0
    while len(prefix) < lengths["prefix"]:
        prefix += pieces[place % len(pieces)]
        place += 1
    rng = random.Random(seed)
    pairs = []
    for _ in range(num_prompts):
        prompt = prefix[: lengths["prefix"]]
        while len(prompt) < total:
            prompt += rng.choice(pieces)
        pairs.append((prompt[:total], lengths["output"]))
    return Workload("sonnet", "lines of Shakespeare's sonnets", numbered(pairs), tuple(notes))
