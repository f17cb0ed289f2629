"""Experts in block FP8 by DeepGEMM's grouped GEMM, in its contiguous layout, without host synchronisation.

The layout groups rows by expert in blocks of 128: our token permutation in tiles of 128 rows, each padded to
a block. Which expert a row is of lies on the device; the kernel skips blocks without rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....quant.kinds.fp8.kind import BLOCK
from ..activations.quantized_activations import QuantizedActivations, Rows
from ..activations.triton_per_token_quant import round_rows
from ..common.backends import package
from ..linear.deep_gemm import NAME, DeepGemmLinear
from ..linear.linear import LinearKernel
from ..linear.triton_gemm import TokenPermutation
from .experts import Expert, ExpertLinear

NO_EXPERT = -1
"""The expert of a row of padding."""


class DeepGemmGroupedLinear:
    """`m_grouped_fp8_gemm_nt_contiguous`: the same linear of every expert, [experts, out, in]."""

    rows_between = BLOCK, BLOCK
    bias = None

    def __init__(self, linears: Sequence[DeepGemmLinear]) -> None:
        self.activation_quant = linears[0].activation_quant
        parts = zip(*(linear.weight for linear in linears), strict=True)
        values, scales = (torch.stack(part) for part in parts)
        self._weight = values, scales
        self.weight_bytes = values.nbytes + scales.nbytes

    def __call__(self, x: Rows, dtype: torch.dtype, parts: TokenPermutation) -> torch.Tensor:
        """Rows [tokens * top_k, out], token by token."""
        given = x if isinstance(x, QuantizedActivations) else round_rows(x, self.activation_quant)
        values, total = self._weight[0], len(parts.order)
        rows, experts = padded_rows(parts)
        out = torch.empty(len(rows), values.shape[1], dtype=dtype, device=values.device)
        if not len(rows):
            return out
        source = rows.clamp_max(total - 1) // parts.top_k
        # Bytes, since not every device gathers floats of 8 bits.
        codes = given.codes.view(torch.uint8).index_select(0, source).view(given.codes.dtype)
        library = package(NAME).module
        scales = library.get_mn_major_tma_aligned_tensor(given.scales.index_select(0, source))
        library.m_grouped_fp8_gemm_nt_contiguous((codes, scales), self._weight, out, experts)
        # Where each row went; those of padding share a last place, which is not read.
        places = torch.empty(total + 1, dtype=torch.int64, device=rows.device)
        places[rows] = torch.arange(len(rows), device=rows.device)
        return out.index_select(0, places[:total])


def padded_rows(parts: TokenPermutation) -> tuple[torch.Tensor, torch.Tensor]:
    """Routed row, int64, and expert, int32, of each row of the contiguous layout [tiles * 128].

    The row of padding is the number of routed rows, its expert `NO_EXPERT`.
    """
    total = len(parts.order)
    expert, first, end = (column[:, None] for column in parts.tiles.unbind(1))
    rank = first + torch.arange(BLOCK, dtype=torch.int32, device=first.device)
    is_row = rank < end
    row = parts.order.index_select(0, rank.clamp_max(max(0, total - 1)).flatten())
    rows = torch.where(is_row.flatten(), row, total)
    return rows, torch.where(is_row, expert, NO_EXPERT).flatten()


def grouped_deep_gemm(linears: Sequence[ExpertLinear]) -> DeepGemmGroupedLinear | None:
    """A linear of all experts; None: some are not DeepGEMM's, differ in shape, or have a bias."""
    kernels: list[LinearKernel | None] = [linear.kernel for linear in linears]
    ours = [kernel for kernel in kernels if isinstance(kernel, DeepGemmLinear)]
    shapes = {kernel.weight[0].shape for kernel in ours}
    if (
        len(ours) < len(linears)
        or len(shapes) > 1
        or any(each.bias is not None for each in linears)
    ):
        return None
    return DeepGemmGroupedLinear(ours)


def gate_up_and_down(
    experts: Sequence[Expert],
) -> tuple[DeepGemmGroupedLinear, DeepGemmGroupedLinear] | None:
    """Both linears of all experts, or None."""
    gate_up = grouped_deep_gemm([expert.gate_up for expert in experts])
    down = grouped_deep_gemm([expert.down for expert in experts])
    return None if gate_up is None or down is None else (gate_up, down)
