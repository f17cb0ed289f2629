"""Which kernel attends over a paged cache, and why the others do not."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..common.dispatch import Candidate, Operation
from ..common.runtime import refuses_rows
from .native_attention import HEAD_CHANNELS, attend_native, native_attention
from .paged_attention import AttentionBatch, AttentionKernel, AttentionRule, attend_sdpa
from .paged_tensor import PagedTensor


@dataclass(frozen=True, slots=True)
class AttentionSituation:
    """What a candidate may look at.

    Attributes:
        dtype: of the queries.
        key_dim, value_dim: elements of a head.
        has_trees: whether guesses of a step form trees.
    """

    device: str
    dtype: torch.dtype
    key_dim: int
    value_dim: int
    has_trees: bool = False

    def __str__(self) -> str:
        same = self.key_dim == self.value_dim
        heads = f"{self.key_dim}" if same else f"{self.key_dim} and {self.value_dim}"
        trees = ", trees of guesses" if self.has_trees else ""
        return f"heads of {heads} in {self.dtype} on {self.device}{trees}"


def _refuses_native(situation: AttentionSituation) -> str | None:
    if situation.device != "cpu":
        return "it is a CPU kernel"
    if (reason := native_attention().reason) is not None:
        return reason
    if situation.dtype not in (torch.bfloat16, torch.float32):
        return f"it takes bfloat16 and float32, not {situation.dtype}"
    if situation.key_dim % HEAD_CHANNELS or situation.value_dim % HEAD_CHANNELS:
        return f"it is for heads of multiples of {HEAD_CHANNELS}"
    if situation.has_trees:
        return "it knows no guesses that form trees"
    return None


def _refuses_triton(situation: AttentionSituation) -> str | None:
    if situation.has_trees:
        return "it knows no guesses that form trees"
    return refuses_rows(situation.device, situation.dtype)


def _attend_triton(
    queries: torch.Tensor,
    keys: PagedTensor,
    values: PagedTensor,
    batch: AttentionBatch,
    rule: AttentionRule,
    anchored: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attend_triton`; Triton is imported by the first call."""
    from .triton_attention import attend_triton

    return attend_triton(queries, keys, values, batch, rule, anchored)


PAGED_ATTENTION: Operation[AttentionSituation, AttentionKernel] = Operation(
    "paged attention",
    [
        Candidate("triton-paged", _refuses_triton, _attend_triton),
        Candidate("native-paged", _refuses_native, attend_native),
        Candidate("torch-sdpa", lambda situation: None, attend_sdpa),
    ],
)


def attention_kernels(
    device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int
) -> tuple[AttentionKernel, AttentionKernel]:
    """For a decoder's heads: the kernel of steps without trees of guesses, and that of steps with some."""

    def choose(has_trees: bool) -> AttentionKernel:
        situation = AttentionSituation(device.type, dtype, key_dim, value_dim, has_trees)
        return PAGED_ATTENTION.select(situation).run

    return choose(False), choose(True)


def reads_in_place(kernel: AttentionKernel) -> bool:
    """Whether a kernel reads the blocks of each sequence where they lie, however wide the table is."""
    return kernel in (attend_native, _attend_triton)
