"""Random prompts as in vLLM: lengths from a range, tokens as consecutive vocabulary ids."""

from __future__ import annotations

import math

import numpy as np

from ...quant.base.errors import BadInput
from .workload import Tokenizer, Workload, numbered

DEFAULT_INPUT_LEN = 1024
DEFAULT_OUTPUT_LEN = 128


def length_range(length: int, range_ratio: float) -> tuple[int, int]:
    """Smallest and largest length, both included: `length` ± `range_ratio`, rounded outwards."""
    return math.floor(length * (1 - range_ratio)), math.ceil(length * (1 + range_ratio))


def allowed_tokens(tokenizer: Tokenizer) -> np.ndarray:
    """The vocabulary without its special tokens, ascending."""
    special = set(tokenizer.all_special_ids)
    return np.array([token for token in range(len(tokenizer)) if token not in special])


def random_workload(
    tokenizer: Tokenizer,
    *,
    num_prompts: int,
    max_model_len: int,
    input_len: int | None = None,
    output_len: int | None = None,
    prefix_len: int = 0,
    range_ratio: float = 0.0,
    seed: int = 0,
) -> Workload:
    """`num_prompts` prompts of random length around `input_len`, after a common random prefix.

    Prompt i is `(offset_i + i + 0, 1, 2 …)` modulo the vocabulary without its special tokens, as in
    vLLM; the ids go to the engine as they are, so that the length is exact.

    Raises:
        BadInput: an invalid length or ratio, or one that exceeds the model's context.
    """
    if not 0 <= range_ratio < 1:
        raise BadInput(f"--random-range-ratio is {range_ratio}: it must be at least 0 and below 1")
    notes = ["random tokens: good for speed, meaningless as text"]
    if input_len is None:
        max_input_len = int((max_model_len - prefix_len) / (1 + range_ratio)) - 1
        output_len = min(output_len or DEFAULT_OUTPUT_LEN, max(max_input_len // 2, 1))
        input_len = min(DEFAULT_INPUT_LEN, max_input_len - output_len)
        if input_len < DEFAULT_INPUT_LEN:
            notes.append(f"default lengths cut to {input_len} + {output_len} to fit the context")
    output_len = output_len if output_len is not None else DEFAULT_OUTPUT_LEN
    input_low, input_high = length_range(input_len, range_ratio)
    output_low, output_high = length_range(output_len, range_ratio)
    input_low, output_low = max(input_low, 1), max(output_low, 1)
    if input_len < 1 or output_len < 1 or prefix_len < 0:
        raise BadInput(
            f"random lengths must be positive: input {input_len}, output {output_len}, "
            f"prefix {prefix_len}"
        )
    longest = prefix_len + input_high + output_high
    if longest > max_model_len:
        raise BadInput(
            f"random prompts reach {longest} tokens (prefix {prefix_len} + input {input_high} + "
            f"output {output_high}) but the model's context is {max_model_len}: lower "
            "--random-input-len or --random-output-len"
        )
    allowed = allowed_tokens(tokenizer)
    rng = np.random.default_rng(seed)
    prefix = allowed[rng.integers(0, len(allowed), size=prefix_len)].tolist()
    input_lens = rng.integers(input_low, input_high + 1, size=num_prompts)
    output_lens = rng.integers(output_low, output_high + 1, size=num_prompts)
    offsets = rng.integers(0, len(tokenizer), size=num_prompts)
    pairs = [
        (
            prefix + allowed[(offsets[i] + i + np.arange(input_lens[i])) % len(allowed)].tolist(),
            int(output_lens[i]),
        )
        for i in range(num_prompts)
    ]
    return Workload("random", "random token ids", numbered(pairs), tuple(notes))
