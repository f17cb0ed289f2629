"""Autotuned crossover between the fused mixed-input GEMM and dequantize + cuBLAS, in tokens per call.

Measured once per device and shape, and kept in the device's verdict table (`common/verdicts.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .device_verdicts import current_verdicts, seconds_of

TOKENS = (16, 32, 64, 128, 256)
"""Batch sizes that are measured, in order, until cuBLAS is faster."""
DEFAULT_CROSSOVER = 64
"""The crossover where nothing is measured: in the interpreter, and where memory does not suffice."""

Gemm = Callable[[torch.Tensor], torch.Tensor]


def crossover_tokens(name: str, inputs: torch.Tensor, fused: Gemm, dequantized: Gemm) -> int:
    """The largest of `TOKENS` up to which `fused` is no slower than `dequantized`; 1 if it never is.

    Args:
        name: cache key: the weight's shape and kind.
        inputs: activations of at least `max(TOKENS)` tokens.
    """
    verdicts = current_verdicts() if inputs.device.type == "cuda" else None
    if verdicts is None:
        return DEFAULT_CROSSOVER

    def is_faster(tokens: int) -> bool:
        from triton.runtime.errors import OutOfResources

        try:
            few = inputs[:tokens]
            return seconds_of(lambda: fused(few)) <= seconds_of(lambda: dequantized(few))
        except OutOfResources:
            return False  # a small GPU lacks the shared memory for this batch size

    try:
        return verdicts.crossover(name, lambda: last_faster_size(is_faster))
    except torch.OutOfMemoryError:
        return DEFAULT_CROSSOVER


def last_faster_size(is_faster: Callable[[int], bool]) -> int:
    """The last of `TOKENS` before the first that is not faster; 1 if the first is not."""
    last = 1
    for tokens in TOKENS:
        if not is_faster(tokens):
            break
        last = tokens
    return last
