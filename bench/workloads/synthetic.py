"""Synthetic prompts: random tokens as in vLLM, shared prefixes, lines of verse, random images."""

from __future__ import annotations

import ast
import base64
import json
import math
import random
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import cycle
from typing import Any

import numpy as np

from ...base.errors import BadInput
from ...base.extras import import_extra
from ...recipes import DATA
from .workload import Tokenizer, Workload, fit_lengths, numbered

DEFAULT_INPUT_LEN = 1024
DEFAULT_OUTPUT_LEN = 128
PREFIX_DEFAULTS = {"prefix": 256, "suffix": 256, "output": 128}
NUM_PREFIXES = 10
VERSE = DATA / "sonnets.txt"
# The prefix is part of the input of 550 tokens: `input` is what follows it.
SONNET_DEFAULTS = {"prefix": 200, "input": 350, "output": 150}
DEFAULT_BUCKETS = "{(256, 256, 1): 0.5, (720, 1280, 1): 0.5}"
"""vLLM's, without its videos of probability 0."""
DEFAULT_LIMIT = 255
MAX_SIDE = 16_384
IMAGE_NOTE = "prompt tokens are those of the text: the tokens of images come on top"


def allowed_tokens(tokenizer: Tokenizer) -> np.ndarray:
    special = set(tokenizer.all_special_ids)
    return np.array([token for token in range(len(tokenizer)) if token not in special])


def length_range(length: int, range_ratio: float) -> tuple[int, int]:
    return math.floor(length * (1 - range_ratio)), math.ceil(length * (1 + range_ratio))


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

    Prompt i is `(offset_i + i + 0, 1, 2 …)` modulo the vocabulary without its special tokens, as in vLLM; the
    ids go to the engine as they are, so that the length is exact. Raises BadInput: an invalid length, or one
    that exceeds the model's context.
    """
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


def warmup_workload(
    workload: Workload, count: int, tokenizer: Tokenizer, *, seed: int
) -> Workload | None:
    """`count` requests of the same lengths and other tokens, as warm-up without cache hits; 0: None."""
    if count == 0:
        return None
    pairs = []
    for number in range(count):
        like = workload.items[number % len(workload.items)]
        length = len(like.prompt_token_ids)
        twin = random_workload(
            tokenizer,
            num_prompts=1,
            max_model_len=length + like.output_len,
            input_len=length,
            output_len=like.output_len,
            seed=seed + 1 + number,
        )
        pairs.append((twin.items[0].prompt_token_ids, like.output_len))
    return Workload("random", "warm-up prompts", numbered(pairs))


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
    """`num_prompts` prompts that each begin with one of `num_prefixes` random prefixes, shuffled.

    vLLM generates `num_prompts // num_prefixes` prompts per prefix and drops the rest; here exactly
    `num_prompts` are generated, so the counts of two prefixes may differ by one. Raises BadInput: fewer
    prompts than prefixes, or explicit lengths that do not fit.
    """
    if num_prompts < num_prefixes:
        raise BadInput(
            f"--num-prompts is {num_prompts}, fewer than --prefix-repetition-num-prefixes "
            f"{num_prefixes}: no prefix would repeat"
        )
    wanted = {"prefix": prefix_len, "suffix": suffix_len, "output": output_len}
    lengths, notes = fit_lengths(wanted, PREFIX_DEFAULTS, max_model_len, "--prefix-repetition-")
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
    """`num_prompts` prompts of exactly `input_len` tokens of Shakespeare's sonnets: the first `prefix_len`
    are the same in every prompt, lines drawn with replacement follow. vLLM's data set of this name has more
    text and approximate lengths. Raises BadInput: explicit lengths that exceed the model's context."""
    lines_len = None
    if input_len is not None:
        if prefix_len is None:
            prefix_len = min(SONNET_DEFAULTS["prefix"], input_len // 2)
        lines_len = input_len - prefix_len
    wanted = {"prefix": prefix_len, "input": lines_len, "output": output_len}
    lengths, notes = fit_lengths(wanted, SONNET_DEFAULTS, max_model_len, "--sonnet-")
    total = lengths["prefix"] + lengths["input"]
    lines = [line + "\n" for line in VERSE.read_text(encoding="utf-8").splitlines() if line]
    pieces = [list(tokenizer.encode(line, add_special_tokens=False)) for line in lines]
    prefix = list(tokenizer.encode("", add_special_tokens=True))
    for piece in cycle(pieces):
        if len(prefix) >= lengths["prefix"]:
            break
        prefix += piece
    rng = random.Random(seed)
    pairs = []
    for _ in range(num_prompts):
        prompt = prefix[: lengths["prefix"]]
        while len(prompt) < total:
            prompt += rng.choice(pieces)
        pairs.append((prompt[:total], lengths["output"]))
    return Workload("sonnet", "lines of Shakespeare's sonnets", numbered(pairs), tuple(notes))


def with_random_images(
    texts: Workload,
    *,
    base_items_per_request: int = 1,
    num_mm_items_range_ratio: float = 0.0,
    limit_mm_per_prompt: str | None = None,
    bucket_config: str | None = None,
    seed: int = 0,
) -> Workload:
    """Prompts of `random`, each followed by random pixels. BadInput: image options out of range."""
    buckets = ImageBuckets.parse(bucket_config)
    fewest, most = items_per_request(
        base_items_per_request, num_mm_items_range_ratio, limit_mm_per_prompt
    )
    rng = np.random.default_rng([seed, 1])  # the texts are those of `random` with the same seed

    def drawn() -> tuple[str, ...]:
        return tuple(buckets.draw(rng) for _ in range(rng.integers(fewest, most + 1)))

    items = tuple(replace(item, images=drawn()) for item in texts.items)
    return Workload("random-mm", "random token ids and images", items, (*texts.notes, IMAGE_NOTE))


@dataclass(frozen=True, slots=True)
class ImageBuckets:
    """Sizes (height, width) with their probabilities, which sum to 1."""

    sizes: tuple[tuple[int, int], ...]
    probabilities: tuple[float, ...]

    @classmethod
    def parse(cls, text: str | None) -> ImageBuckets:
        """Buckets `{(height, width, num_frames): probability}` (vLLM). BadInput: another form, or videos."""
        given = DEFAULT_BUCKETS if text is None else text
        where = f"--random-mm-bucket-config {given}"
        usage = f"{where}: give {{(height, width, 1): probability, ...}}"
        try:
            buckets: dict[Any, Any] = dict(ast.literal_eval(given))
            weights = {(*key,): float(weight) for key, weight in buckets.items()}
            if any([*map(type, size)] != [int] * 3 for size in weights):
                raise TypeError
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise BadInput(usage) from error
        drawn = {size: weight for size, weight in weights.items() if weight}
        total = sum(drawn.values())
        if any(not weight > 0 for weight in drawn.values()) or not 0 < total < float("inf"):
            raise BadInput(f"{where}: probabilities are positive numbers")
        if any(frames != 1 for _, _, frames in drawn):
            raise BadInput(f"{where}: a bucket of several frames is a video; images have 1")
        if any(not 1 <= side <= MAX_SIDE for size in drawn for side in size[:2]):
            raise BadInput(f"{where}: sides are 1 to {MAX_SIDE} pixels")
        return cls(
            tuple((height, width) for height, width, _ in drawn),
            tuple(weight / total for weight in drawn.values()),
        )

    def draw(self, rng: np.random.Generator) -> str:
        """A random image as the data URL of a JPEG."""
        Image = import_extra("a random image", "images", "PIL.Image")
        height, width = self.sizes[rng.choice(len(self.sizes), p=self.probabilities)]
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        file = BytesIO()
        Image.fromarray(pixels).save(file, "JPEG")
        return data_url(file.getvalue(), "image/jpeg")


def items_per_request(base: int, range_ratio: float, limit: str | None) -> tuple[int, int]:
    """Fewest and most images: `base` ± `range_ratio`, to the limit. BadInput: no limit."""
    fewest, most = length_range(base, range_ratio)
    try:
        count = json.loads("{}" if limit is None else limit).get("image", DEFAULT_LIMIT)
        if type(count) is not int or count < 0:
            raise ValueError
    except (ValueError, AttributeError) as error:
        usage = "give JSON such as '{\"image\": 3}'"
        raise BadInput(f"--random-mm-limit-mm-per-prompt {limit}: {usage}") from error
    return min(fewest, most, count), min(most, count)


def data_url(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
