"""The experts of a mixture in two products, whatever token visits whichever: no count leaves the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..activations.rounded_rows import RoundedRows, Rounding, RoundsGate, Rows
from ..activations.triton_round_rows import round_rows
from ..linear.linear import LinearKernel, TorchLinear
from ..linear.triton_linear import FloatInputLinear, RoundedInputLinear
from ..linear.triton_product import Parts, multiply
from ..linear.triton_tile_weight import TileWeight, stack_tiles, tiles_of_floats
from .experts import Expert, ExpertLinear
from .triton_deal import deal


class GroupedLinear:
    """A linear of every expert, `[out, in]` each, as one weight of so many parts."""

    def __init__(
        self, tiles: TileWeight, bias: torch.Tensor | None, rounding: Rounding | None
    ) -> None:
        self._tiles, self._bias, self.rounding = tiles, bias, rounding
        self.weight_bytes = tiles.weight_bytes + (0 if bias is None else bias.nbytes)

    def __call__(
        self, x: Rows, dtype: torch.dtype, parts: Parts, experts: torch.Tensor
    ) -> torch.Tensor:
        """Rows `[visits, out]`, in the order of `experts [visits]`."""
        if self.rounding is not None and isinstance(x, torch.Tensor):
            x = round_rows(x, self.rounding)
        if isinstance(x, RoundedRows):
            y = multiply(x.codes, self._tiles, dtype, x.scales, parts)
        else:
            y = multiply(x, self._tiles, dtype, None, parts)
        return y if self._bias is None else y + self._bias.index_select(0, experts)


class GroupedExperts:
    """Visits in the order of the experts; each tile of rows meets the weight of its own."""

    is_repeatable = True

    def __init__(
        self,
        gate_up: GroupedLinear,
        down: GroupedLinear,
        combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        count: int,
        on_inputs: bool,
    ) -> None:
        self._gate_up, self._down, self._combine = gate_up, down, combine
        self._count, self._on_inputs = count, on_inputs
        self.weight_bytes = gate_up.weight_bytes + down.weight_bytes

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        tokens, visits = experts.shape
        numbers, weights = experts.flatten(), weights.to(x.dtype)
        if self._on_inputs:
            x = (x[:, None, :] * weights[:, :, None]).flatten(0, 1)
        into = deal(numbers, self._count, 1 if self._on_inputs else visits)
        gate, up = self._gate_up(x, x.dtype, into, numbers).chunk(2, dim=-1)
        rounding = self._down.rounding
        if rounding is not None and isinstance(self._combine, RoundsGate):
            inner: Rows = self._combine.rounded(gate, up, rounding)
        else:
            inner = self._combine(gate, up)
        out = self._down(inner, x.dtype, Parts(into.tiles, into.order, into.rows, 1), numbers)
        out = out.view(tokens, visits, -1)
        if self._on_inputs:
            return out.sum(dim=1)
        return torch.bmm(weights[:, None, :], out).squeeze(1)


def group(experts: Sequence[Expert], on_inputs: bool) -> GroupedExperts | None:
    """The experts as one; None: they are too different, or their weights fit no tiles."""
    gate_up = _joined([expert.gate_up for expert in experts])
    down = _joined([expert.down for expert in experts])
    if gate_up is None or down is None:
        return None
    return GroupedExperts(gate_up, down, experts[0].combine, len(experts), on_inputs)


def _joined(linears: Sequence[ExpertLinear]) -> GroupedLinear | None:
    kernels = [linear.kernel for linear in linears]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    tiles = [found for kernel in kernels if (found := _tiles(kernel)) is not None]
    roundings = [kernel.rounding for kernel in kernels if isinstance(kernel, RoundedInputLinear)]
    # Scales that calibration fixed are an expert's own.
    is_fixed = any(rounding.input_scale is not None for rounding in roundings)
    if len(tiles) < len(linears) or is_fixed or len(biases) not in (0, len(linears)):
        return None
    if (stacked := stack_tiles(tiles)) is None or len(roundings) not in (0, len(linears)):
        return None
    bias = torch.stack(biases) if biases else None
    return GroupedLinear(stacked, bias, roundings[0] if roundings else None)


def _tiles(kernel: LinearKernel | None) -> TileWeight | None:
    if isinstance(kernel, RoundedInputLinear):
        return kernel.tiles
    if isinstance(kernel, FloatInputLinear) and not kernel.rounds:
        return kernel.tiles
    return tiles_of_floats(kernel.weight) if isinstance(kernel, TorchLinear) else None
