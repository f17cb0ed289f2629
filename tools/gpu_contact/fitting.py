"""The model of a first contact: the largest that the card has room for, and how many sequences of it."""

from __future__ import annotations

from collections.abc import Sequence

from llmopt.quant.families.config import model_shape
from llmopt.quant.families.shapes import ModelShape

from ..gpu_figures.sections import KV_BYTES
from ..gpu_figures.shapes import Scale, config_of

MODELS = ("llama-3.1-8b", "llama-3.2-3b", "llama-3.2-1b")
"""From the largest."""
WEIGHT_BYTES = 2
USED = 0.9
"""Of the free memory, as the engine takes it (`--gpu-memory-utilization`)."""
BESIDE = 0.04
"""Of the free memory: activations, logits and graphs."""

Case = tuple[int, int, int]
"""Batch, context and steps of decode."""


def largest(scale: Scale, cases: Sequence[Case], free_bytes: int) -> tuple[str, list[Case]] | None:
    """The largest model of which one sequence of each case fits, and the cases with batches that do.

    None: not even the smallest does.
    """
    for name in MODELS:
        shape = model_shape(config_of(name, scale))
        fitted = [_fitted(shape, case, free_bytes) for case in cases]
        if all(batch for batch, _, _ in fitted):
            return name, fitted
    return None


def _fitted(shape: ModelShape, case: Case, free_bytes: int) -> Case:
    """The case with its batch halved until it fits; a batch of 0: none does."""
    batch, context, steps = case
    room = (USED - BESIDE) * free_bytes - shape.num_parameters * WEIGHT_BYTES
    each = shape.kv_bytes(context + steps, KV_BYTES)
    while batch and batch * each > room:
        batch //= 2
    return batch, context, steps
