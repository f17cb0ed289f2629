"""What Triton's kernels take, for the tables of candidates; none of them is imported before it is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ....quant.tensors.base import QuantizedTensor
from ..paged_attention import AttentionBatch, AttentionRule
from ..paged_tensor import PagedTensor
from .runtime import refuses_triton
from .tile_weight import TileWeight

if TYPE_CHECKING:
    from ..expert_kernels import Expert
    from .experts import GroupedExperts
    from .gate import TritonGate
    from .linear import FloatInputLinear, RoundedInputLinear
    from .norm import TritonNorm
    from .turn import TritonTurn

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def refuses(device: str, dtype: torch.dtype) -> str | None:
    """Why no kernel takes these rows, or None."""
    if (reason := refuses_triton(device)) is not None:
        return reason
    if dtype not in DTYPES:
        return f"it takes bfloat16, float16 and float32, not {dtype}"
    return None


def attend(
    queries: torch.Tensor,
    keys: PagedTensor,
    values: PagedTensor,
    batch: AttentionBatch,
    rule: AttentionRule,
    anchored: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attend_triton`."""
    from .attention import attend_triton

    return attend_triton(queries, keys, values, batch, rule, anchored)


def norm(weight: torch.Tensor, eps: float) -> TritonNorm:
    """A `NormKernel`."""
    from .norm import TritonNorm

    return TritonNorm(weight, eps)


def silu_gate() -> TritonGate:
    """A `GateKernel`."""
    from .gate import TritonGate

    return TritonGate("silu")


def gelu_gate(is_tanh: bool) -> TritonGate:
    """A `GateKernel`."""
    from .gate import TritonGate

    return TritonGate("gelu_tanh" if is_tanh else "gelu")


def turn() -> TritonTurn:
    """A `TurnKernel`."""
    from .turn import TritonTurn

    return TritonTurn()


def linear(weight: QuantizedTensor, tiles: TileWeight, dtype: torch.dtype) -> FloatInputLinear:
    """A `LinearKernel`."""
    from .linear import FloatInputLinear

    return FloatInputLinear(weight, tiles, dtype)


def rounded_input_linear(
    weight: QuantizedTensor, tiles: TileWeight, dtype: torch.dtype
) -> RoundedInputLinear:
    """A `LinearKernel`."""
    from .linear import RoundedInputLinear

    return RoundedInputLinear(weight, tiles, dtype)


def grouped_experts(experts: Sequence[Expert], on_inputs: bool) -> GroupedExperts | None:
    """An `ExpertsKernel`, if the experts are alike."""
    from .experts import group

    return group(experts, on_inputs)
