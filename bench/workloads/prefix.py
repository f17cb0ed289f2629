"""Prefix-repetition workload: prompts with shared prefixes, for measuring prefix caching."""

from __future__ import annotations

import random

import numpy as np

from ...quant.base.errors import BadInput
from .random_workload import allowed_tokens
from .workload import Tokenizer, Workload, fit_lengths, numbered

PREFIX_DEFAULTS = {"prefix": 256, "suffix": 256, "output": 128}
NUM_PREFIXES = 10


def prefix_repetition_workload(
    tokenizer: Tokenizer,
    *,
    num_prompts: int,
    max_model_len: int,
    prefix_len: int | None = None,
    suffix_len: int | None = None,
    output_len: int | None = None,
    num_prefixes: int = NUM_PREFIXES,
    seed: int = 0,
    shuffle: bool = True,
) -> Workload:
    """`num_prompts` prompts that each begin with one of `num_prefixes` random prefixes.

    Prefixes are assigned round-robin and the order is then shuffled with the seed. vLLM generates
    `num_prompts // num_prefixes` prompts per prefix and drops the rest; here exactly `num_prompts` are
    generated, so the counts of two prefixes may differ by one.

    Raises:
        BadInput: fewer prompts than prefixes, or explicit lengths that do not fit.
    """
    if num_prompts < num_prefixes:
        raise BadInput(
            f"--num-prompts is {num_prompts}, fewer than --prefix-repetition-num-prefixes "
            f"{num_prefixes}: no prefix would repeat"
        )
    lengths, notes = fit_lengths(
        {"prefix": prefix_len, "suffix": suffix_len, "output": output_len},
        PREFIX_DEFAULTS,
        max_model_len,
        "--prefix-repetition-",
    )
    allowed = allowed_tokens(tokenizer)
    rng = np.random.default_rng(seed)

    def tokens(length: int) -> list[int]:
        return allowed[rng.integers(0, len(allowed), size=length)].tolist()

    prefixes = [tokens(lengths["prefix"]) for _ in range(num_prefixes)]
    pairs = [
        (prefixes[number % num_prefixes] + tokens(lengths["suffix"]), lengths["output"])
        for number in range(num_prompts)
    ]
    if shuffle:
        random.Random(seed).shuffle(pairs)
    source = f"{num_prefixes} random prefixes of {lengths['prefix']} tokens"
    notes.insert(0, "random tokens: good for speed, meaningless as text")
    return Workload("prefix_repetition", source, numbered(pairs), tuple(notes))
