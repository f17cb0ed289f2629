"""HQQ: data-free fit of each group's scale and zero point by half-quadratic splitting.

Badri and Shaji, 2023 (https://mobiusml.github.io/hqq_blog/): the lp norm, p < 1, of a group's error. Two
closed-form steps alternate: shrink the error, and fit the grid to the rest. `docs/quantization.md` has the
three differences from the authors' code.
"""

from __future__ import annotations

import torch

from ..kinds.base.grid import where
from ..kinds.base.tensor import QuantizedTensor, require_finite
from ..kinds.integer.kind import IntTensor, round_to_nearest
from ..kinds.integer.scheme import IntScheme
from .base import LayerProblem, LayerResult, ModuleReport, each_linear, full_name
from .rounding import round_plain

ITERATIONS = 20  # this and the next three: defaults of HQQ's solver
_NORM = 0.7
_BETA = 10.0
_BETA_GROWTH = 1.01
_ROWS = 256  # rows per chunk: the steps below hold about ten copies of them


def quantize_layer(problem: LayerProblem) -> LayerResult:
    def fitted(linear: str) -> tuple[QuantizedTensor, ModuleReport]:
        weight, scheme = problem.weights[linear], problem.schemes[linear]
        assert isinstance(scheme, IntScheme)
        module = full_name(problem.prefix, linear)
        require_finite(weight, module)
        codes = fit_grid(weight, scheme, problem.scale_dtypes[linear], name=module)
        rounded = round_plain(problem, linear, weight).dequantize()
        return codes, problem.report(linear, codes.dequantize(), rounded)

    return LayerResult.of(each_linear(problem, fitted))


def fit_grid(
    weight: torch.Tensor, scheme: IntScheme, scale_dtype: torch.dtype, *, name: str = "weight"
) -> IntTensor:
    """Codes, scales and integer zeros of `[out, in]`. BadInput: not finite, overflow, or group size."""
    plain = round_to_nearest(weight, scheme, scale_dtype, name=name)
    scales, zeros, codes = plain.scales.clone(), plain.zeros.clone(), plain.codes.clone()
    grouped = weight.view(*scales.shape, -1)
    for begin in range(0, weight.shape[0], _ROWS):
        rows = slice(begin, begin + _ROWS)
        scales[rows], zeros[rows] = _fit(grouped[rows], scales[rows], zeros[rows], scheme)
        chosen = _codes(grouped[rows], scales[rows].float(), zeros[rows].float(), scheme)
        codes[rows] = chosen.flatten(1).to(torch.uint8)
    return IntTensor(codes, scales, zeros, scheme)


def _codes(
    grouped: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, scheme: IntScheme
) -> torch.Tensor:
    steps = torch.round(grouped / scales.unsqueeze(-1))
    return (steps + zeros.unsqueeze(-1)).clamp_(0, scheme.max_code)


def _squared_error(
    grouped: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, scheme: IntScheme
) -> torch.Tensor:
    codes = _codes(grouped, scales, zeros, scheme)
    return ((codes - zeros.unsqueeze(-1)) * scales.unsqueeze(-1) - grouped).square().sum(dim=-1)


def _fit(
    grouped: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, scheme: IntScheme
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best scales and zero points `[out, groups]` of all iterates, in their input dtypes."""
    scale, zero, beta = scales.to(torch.float32), zeros.to(torch.float32), _BETA
    best = _squared_error(grouped, scale, zero, scheme), scale, zero
    for _ in range(ITERATIONS):
        step = scale.unsqueeze(-1)
        codes = torch.round(grouped / step + zero.unsqueeze(-1)).clamp_(0, scheme.max_code)
        error = grouped / step - (codes - zero.unsqueeze(-1))
        sparse = error.sign() * torch.relu(error.abs() - error.abs().pow(_NORM - 1) / beta)
        target = grouped - sparse * step
        if not scheme.symmetric:
            zero = (codes - target / step).mean(dim=-1)
        offsets = codes - zero.unsqueeze(-1)
        fitted = (offsets * target).sum(dim=-1) / offsets.square().sum(dim=-1)
        # A constant group has no slope to fit.
        scale = torch.where(torch.isfinite(fitted) & (fitted > 0), fitted, scale)
        beta *= _BETA_GROWTH

        stored = scale.to(scales.dtype).to(torch.float32)
        integer = torch.round(zero).clamp(0, scheme.max_code)
        usable = torch.isfinite(stored) & (stored > 0)
        squared = _squared_error(grouped, stored, integer, scheme)
        best = where(usable & (squared < best[0]), (squared, stored, integer), best)
    return best[1].to(scales.dtype), best[2].to(torch.uint8)
