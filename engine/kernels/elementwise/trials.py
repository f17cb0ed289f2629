"""Trials of the elementwise kernels: norm, gated activations, RoPE + KV-cache write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..attention.paged_tensor import PagedTensor
from ..common.verdicts import Trial, tolerance
from .head_norms import HeadNorms

COMPARED_ROWS = 33
TIMED_ROWS = (1, 32, 2048)
HEADS, KV_HEADS, BLOCK_SIZE = 8, 2, 16

Timed = Sequence[Callable[[], object]]


class _Rows:
    """Random rows on a device."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self.device, self.dtype)


def norm_trial(device: torch.device, dtype: torch.dtype, size: int) -> Trial[Any]:
    """RMSNorm, fused with an addition."""
    random = _Rows(device, dtype)
    weight, x, added = random(size), random(COMPARED_ROWS, size), random(COMPARED_ROWS, size)
    rows = [(random(count, size), random(count, size)) for count in TIMED_ROWS]

    def calls(make: Any) -> Timed:
        norm = make(weight, 1e-5)
        return [lambda pair=pair: norm(*pair) for pair in rows]

    return Trial(lambda make: make(weight, 1e-5)(x, added), tolerance(dtype), calls)


def gate_trial(
    device: torch.device, dtype: torch.dtype, size: int, *arguments: Sequence[bool]
) -> Trial[Any]:
    """A gated activation, made with each of the `arguments`."""
    random = _Rows(device, dtype)
    x, up = random(COMPARED_ROWS, size), random(COMPARED_ROWS, size)
    rows = [(random(count, size), random(count, size)) for count in TIMED_ROWS]

    def calls(make: Any) -> Timed:
        gate = make(*arguments[0])
        return [lambda pair=pair: gate(*pair) for pair in rows]

    return Trial(lambda make: [make(*each)(x, up) for each in arguments], tolerance(dtype), calls)


def rope_trial(device: torch.device, dtype: torch.dtype, size: int) -> Trial[Any]:
    """RoPE and KV-cache write of heads of `size` elements, with and without norms."""
    random = _Rows(device, dtype)
    norms = HeadNorms(random(size), random(size), 1e-6)

    def run(make: Any, tokens: int, heads: HeadNorms | None) -> Callable[[], list[torch.Tensor]]:
        stacked = random(tokens, HEADS + 2 * KV_HEADS, size)
        angle = 3 * random(tokens, 1, size // 2)
        cos = torch.cat([angle.cos()] * 2, -1)
        sin = torch.cat([-angle.sin(), angle.sin()], -1)
        num_blocks = 1 + -(-tokens // BLOCK_SIZE)
        keys, values = (
            PagedTensor.zeros(num_blocks, BLOCK_SIZE, KV_HEADS, size, device, dtype) for _ in "kv"
        )
        slots = torch.arange(BLOCK_SIZE, BLOCK_SIZE + tokens, device=device)
        kernel = make()

        def call() -> list[torch.Tensor]:
            queries = kernel(stacked, HEADS, cos, sin, keys, values, slots, heads)
            return [queries, keys.codes, values.codes]

        return call

    def compute(make: Any) -> list[torch.Tensor]:
        nonlocal random
        random = _Rows(device, dtype)  # the same inputs for each
        return [each for heads in (None, norms) for each in run(make, COMPARED_ROWS, heads)()]

    return Trial(
        compute, tolerance(dtype), lambda make: [run(make, count, None) for count in TIMED_ROWS]
    )
