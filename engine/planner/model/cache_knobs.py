"""Parameters of the engines' cache rules, and rounding to blocks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheKnobs:
    """Parameters of the cache rules besides the model: tokens of a block and of a step (vLLM's
    max_num_batched_tokens), llama.cpp's n_ubatch, and whether vLLM frees blocks out of the window."""

    block_size: int = 16
    step_tokens: int = 8192
    ubatch_tokens: int = 512
    frees_windows: bool = True


def round_up(value: int, step: int) -> int:
    """Round up to a multiple of `step`."""
    return -(-value // step) * step
