"""Fused mixture-of-experts: two grouped GEMMs over permuted tokens, without host synchronisation.

With expert parallelism the rows of other ranks' experts go to a last expert without a weight, which no tile
computes. Block FP8 uses DeepGEMM's grouped GEMM, whose contiguous layout is our token permutation in tiles of
128 rows; the kernel skips blocks without rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch.nn import functional

from ....quant.kinds.fp8.kind import BLOCK
from ..common.devices import package
from ..elementwise.reference import ActivationQuant, FusesGateQuant, QuantizedActivations, Rows
from ..elementwise.triton_rows import TritonGate, round_rows
from ..linear.library_linear import NAME, DeepGemmLinear
from ..linear.linear import LinearKernel, TorchLinear
from ..linear.triton_gemm import TokenPermutation, gemm, most_rows
from ..linear.triton_linear import FloatInputLinear, QuantizedInputLinear
from ..linear.triton_packed_weight import (
    TritonPackedWeight,
    pack_float_weight,
    stack_packed_weights,
)
from .dispatch import Expert, ExpertLinear, PlainExpert
from .triton_token_permutation import MIN_ROWS, biased_gate, permute_tokens, weighted_sum

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
        self.weight_bytes, self.device = values.nbytes + scales.nbytes, values.device

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
        # Where each row went; those of padding share a last place, and what no expert here computes has the
        # first, which are not read.
        places = torch.zeros(total + 1, dtype=torch.int64, device=rows.device)
        places[rows] = torch.arange(len(rows), device=rows.device)
        return out.index_select(0, places[:total])


def padded_rows(parts: TokenPermutation) -> tuple[torch.Tensor, torch.Tensor]:
    """Routed row, int64, and expert of each row [tiles * 128]; padding: number of rows, `NO_EXPERT`."""
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
    has_bias = any(linear.bias is not None for linear in linears)
    if has_bias or len(ours) < len(linears) or len({k.weight[0].shape for k in ours}) > 1:
        return None
    return DeepGemmGroupedLinear(ours)


class GroupedLinear:
    """Grouped GEMM: the same linear of every expert, `[out, in]` each, stacked into one packed weight."""

    def __init__(
        self,
        tiles: TritonPackedWeight,
        bias: torch.Tensor | None,
        activation_quant: ActivationQuant | None,
    ) -> None:
        self._packed_weight, self.bias, self.activation_quant = tiles, bias, activation_quant
        self.weight_bytes = tiles.weight_bytes + (0 if bias is None else bias.nbytes)
        self.device = tiles.codes.device
        self.rows_between = MIN_ROWS, most_rows(tiles)

    def __call__(self, x: Rows, dtype: torch.dtype, parts: TokenPermutation) -> torch.Tensor:
        """Rows `[tokens * top_k, out]`, token by token, without the `bias [experts + 1, out]`."""
        if self.activation_quant is not None and isinstance(x, torch.Tensor):
            x = round_rows(x, self.activation_quant)
        if isinstance(x, QuantizedActivations):
            return gemm(x.codes, self._packed_weight, dtype, x.scales, parts)
        return gemm(x, self._packed_weight, dtype, None, parts)


class GroupedExperts:
    """Experts as grouped GEMMs of sorted rows; `between` maps [gate, up] to the inputs of `down`."""

    is_capturable = True

    def __init__(
        self,
        gate_up: GroupedLinear | DeepGemmGroupedLinear,
        down: GroupedLinear | DeepGemmGroupedLinear,
        between: Callable[..., torch.Tensor],
        ids: range,
        count: int,
        on_inputs: bool,
        *,
        is_gated: bool,
    ) -> None:
        self._gate_up, self._down, self._between = gate_up, down, between
        self._count, self._on_inputs, self._is_gated = len(ids), on_inputs, is_gated
        self._local: torch.Tensor | None = None
        """Place of each of the model's experts among these; others follow the last. None: these are all."""
        if len(ids) < count:
            index = torch.arange(count, device=gate_up.device) - ids.start
            is_here = (index >= 0) & (index < len(ids))
            self._local = torch.where(is_here, index, len(ids))
        both = gate_up.rows_between, down.rows_between
        self._rows_between = max(least for least, _ in both), min(most for _, most in both)
        self.weight_bytes = gate_up.weight_bytes + down.weight_bytes

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        added: torch.Tensor | None = None,
    ) -> torch.Tensor:
        top_k, expert_ids = experts.shape[1], experts.flatten()
        if self._local is not None:
            expert_ids = self._local.index_select(0, expert_ids)
        if self._on_inputs:
            x = (x[:, None, :] * weights.to(x.dtype)[:, :, None]).flatten(0, 1)
        permutation = permute_tokens(
            expert_ids, self._count, top_k, self._rows_between, has_others=self._local is not None
        )
        by_row = replace(permutation, top_k=1)
        rows = self._gate_up(x, x.dtype, by_row if self._on_inputs else permutation)
        out = self._down(self._inner(rows, expert_ids), x.dtype, by_row)
        factors = None if self._on_inputs else weights
        num_here = None if self._local is None else self._count
        return weighted_sum(out, factors, self._down.bias, expert_ids, top_k, added, num_here)

    def _inner(self, rows: torch.Tensor, experts: torch.Tensor) -> Rows:
        """The activation of rows, with their bias; of gated experts they are [rows, 2 * inner]."""
        activation_quant, bias = self._down.activation_quant, self._gate_up.bias
        if bias is not None:
            if activation_quant is None and isinstance(self._between, TritonGate):
                return biased_gate(rows, bias, experts, self._between.activation)
            rows = rows + bias.index_select(0, experts)
        if not self._is_gated:
            return self._between(rows)
        gate, up = rows.chunk(2, dim=-1)
        if activation_quant is not None and isinstance(self._between, FusesGateQuant):
            return self._between.quantized(gate, up, activation_quant)
        return self._between(gate, up)


Experts = Sequence[Expert] | Sequence[PlainExpert]


def _grouped(
    experts: Experts,
    ids: range,
    count: int,
    on_inputs: bool,
    *,
    stack: Callable[[Sequence[ExpertLinear]], GroupedLinear | DeepGemmGroupedLinear | None],
) -> GroupedExperts | None:
    """Experts with their linears stacked; None: they differ too much, or cannot be stacked."""
    gated = [expert for expert in experts if isinstance(expert, Expert)]
    plain = [expert for expert in experts if not isinstance(expert, Expert)]
    if gated and plain:
        return None
    into = stack([expert.gate_up for expert in gated] or [expert.up for expert in plain])
    down = stack([expert.down for expert in experts])
    if into is None or down is None:
        return None
    between = gated[0].combine if gated else plain[0].activation
    return GroupedExperts(into, down, between, ids, count, on_inputs, is_gated=bool(gated))


def _stacked(linears: Sequence[ExpertLinear]) -> GroupedLinear | None:
    kernels = [linear.kernel for linear in linears]
    # The kernel of a linear in torch adds the bias too.
    biases = [
        linear.kernel.bias if isinstance(linear.kernel, TorchLinear) else linear.bias
        for linear in linears
    ]
    biases = [bias for bias in biases if bias is not None]
    tiles = [packed for kernel in kernels if (packed := _packed_weight(kernel)) is not None]
    quants = [
        kernel.activation_quant for kernel in kernels if isinstance(kernel, QuantizedInputLinear)
    ]
    # Static activation scales differ per expert.
    is_fixed = any(quant.input_scale is not None for quant in quants)
    all_or_none = (0, len(linears))
    if len(tiles) < len(linears) or is_fixed or len(biases) not in all_or_none:
        return None
    if (stacked := stack_packed_weights(tiles)) is None or len(quants) not in all_or_none:
        return None
    # A last one of zeros, for rows that other ranks compute.
    bias = functional.pad(torch.stack(biases), (0, 0, 0, 1)) if biases else None
    return GroupedLinear(stacked, bias, quants[0] if quants else None)


def _packed_weight(kernel: LinearKernel | None) -> TritonPackedWeight | None:
    if isinstance(kernel, QuantizedInputLinear):
        return kernel.tiles
    if isinstance(kernel, FloatInputLinear) and not kernel.quantizes_inputs:
        return kernel.decoded
    return pack_float_weight(kernel.weight) if isinstance(kernel, TorchLinear) else None


group, group_deep_gemm = (partial(_grouped, stack=s) for s in (_stacked, grouped_deep_gemm))
