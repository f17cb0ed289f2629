"""Random images of `random-mm`: sizes drawn from buckets, how many in a request, and their data URLs."""

from __future__ import annotations

import ast
import base64
import json
from dataclasses import dataclass
from io import BytesIO
from math import ceil, floor
from typing import Any

import numpy as np

from ...quant.base.errors import BadInput

DEFAULT_BUCKETS = "{(256, 256, 1): 0.5, (720, 1280, 1): 0.5}"
"""vLLM's, without its videos of probability 0."""
DEFAULT_LIMIT = 255
MAX_SIDE = 16_384


@dataclass(frozen=True, slots=True)
class ImageBuckets:
    """Sizes (height, width) with their probabilities, which sum to 1."""

    sizes: tuple[tuple[int, int], ...]
    probabilities: tuple[float, ...]

    @classmethod
    def parse(cls, text: str | None) -> ImageBuckets:
        """Buckets of `{(height, width, num_frames): probability}`, a Python literal as vLLM takes it.

        Raises:
            BadInput: another form, videos, or no probability above 0.
        """
        given = DEFAULT_BUCKETS if text is None else text
        where = f"--random-mm-bucket-config {given}"
        usage = f"{where}: give {{(height, width, 1): probability, ...}}"
        try:
            buckets: dict[Any, Any] = dict(ast.literal_eval(given))
            weights = {_size(key): float(weight) for key, weight in buckets.items()}
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
        from PIL import Image

        height, width = self.sizes[rng.choice(len(self.sizes), p=self.probabilities)]
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        file = BytesIO()
        Image.fromarray(pixels).save(file, "JPEG")
        return data_url(file.getvalue(), "image/jpeg")


def items_per_request(base: int, range_ratio: float, limit: str | None) -> tuple[int, int]:
    """Fewest and most images of a request: `base` ± `range_ratio`, at most the limit.

    Raises:
        BadInput: numbers out of range, or a limit that is no `{"image": N}`.
    """
    if base < 0 or not 0 <= range_ratio <= 1:
        raise BadInput(
            f"--random-mm-base-items-per-request {base} with --random-mm-num-mm-items-range-ratio "
            f"{range_ratio}: at least 0, and 0 to 1"
        )
    most = min(ceil(base * (1 + range_ratio)), _image_limit(limit))
    return min(floor(base * (1 - range_ratio)), most), most


def data_url(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _size(key: Any) -> tuple[int, int, int]:
    height, width, frames = key
    if not all(type(number) is int for number in key):
        raise TypeError
    return height, width, frames


def _image_limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_LIMIT
    try:
        limits = json.loads(text)
        count = limits.get("image", DEFAULT_LIMIT)
    except (ValueError, AttributeError) as error:
        raise _limit_usage(text) from error
    if type(count) is not int or count < 0:
        raise _limit_usage(text)
    return count


def _limit_usage(text: str) -> BadInput:
    return BadInput(f"--random-mm-limit-mm-per-prompt {text}: give JSON such as '{{\"image\": 3}}'")
