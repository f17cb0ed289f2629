"""Calibration statistics of a linear's input (Gram matrix, magnitudes), and output errors from them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_GRAM_ROWS = 512  # rows of the symmetric matrix per GEMM, without the mirrored half
_ERROR_COLUMNS, _ERROR_ROWS = 256, 1024  # keeps a GEMM's operands in the cache
_REPORTED_ROWS = 512


class InputStatistics:
    """Calibration statistics of a linear's input, accumulated over tokens.

    The Gram matrix `XᵀX` (the Hessian of GPTQ, up to a factor) gives the output error of any weight change
    over all calibration tokens, so activations need not be kept.

    Attributes:
        gram: float32 `[in, in]`, the sum of `x xᵀ` over tokens.
        abs_sum: float32 `[in]`, the sum of `|x|`.
        abs_max: float32 `[in]`, the largest `|x|`.
        num_tokens: number of tokens accumulated.
        cross: float32 `[in, in]`, the sum of `(y - x) xᵀ` for the input `y` that the float model has in place
            of `x`; None where that is not known.
    """

    cross: torch.Tensor | None = None

    def __init__(self, in_features: int, device: torch.device | None = None):
        self.gram = torch.zeros(in_features, in_features, device=device)
        self.abs_sum = torch.zeros(in_features, device=device)
        self.abs_max = torch.zeros(in_features, device=device)
        self.num_tokens = 0

    def add(self, inputs: torch.Tensor) -> None:
        """Accumulate `[..., in]` inputs of any float dtype."""
        tokens = inputs.reshape(-1, inputs.shape[-1]).to(self.gram.device, torch.float32)
        with _products_of(inputs.dtype):
            for start in range(0, tokens.shape[1], _GRAM_ROWS):
                rows = slice(start, start + _GRAM_ROWS)
                stop = min(start + _GRAM_ROWS, tokens.shape[1])
                self.gram[rows, :stop].addmm_(tokens[:, rows].T, tokens[:, :stop])
                self.gram[:start, rows] = self.gram[rows, :start].T
        if not tokens.shape[0]:
            return
        magnitudes = tokens.abs()
        self.abs_sum += magnitudes.sum(dim=0)
        self.abs_max = torch.maximum(self.abs_max, magnitudes.amax(dim=0))
        self.num_tokens += tokens.shape[0]

    def add_cross(self, inputs: torch.Tensor, wanted: torch.Tensor) -> None:
        """Accumulate the differences of the float model's inputs `[..., in]`, of the same tokens."""
        width = inputs.shape[-1]
        tokens, others = (part.reshape(-1, width).to(torch.float32) for part in (inputs, wanted))
        if self.cross is None:
            self.cross = torch.zeros(width, width, device=tokens.device)
        self.cross.addmm_((others - tokens).T, tokens)

    @property
    def mean_abs(self) -> torch.Tensor:
        """Mean magnitude of each input channel `[in]`."""
        return self.abs_sum / max(self.num_tokens, 1)

    def to(self, device: torch.device) -> InputStatistics:
        """The statistics on a device; themselves where they are there."""
        if self.gram.device == device:
            return self
        record = InputStatistics(0)
        for name in ("gram", "abs_sum", "abs_max"):
            setattr(record, name, getattr(self, name).to(device))
        record.num_tokens = self.num_tokens
        record.cross = None if self.cross is None else self.cross.to(device)
        return record

    def divided(self, columns: torch.Tensor) -> InputStatistics:
        """The statistics of inputs whose channels are divided by `columns` `[in]`."""
        record = InputStatistics(0)
        record.gram = self.gram / columns / columns[:, None]
        record.abs_sum, record.abs_max = self.abs_sum / columns, self.abs_max / columns
        record.num_tokens = self.num_tokens
        if self.cross is not None:
            record.cross = self.cross / columns / columns[:, None]
        return record

    def row_errors(self, delta: torch.Tensor) -> torch.Tensor:
        """Squared output error of each output channel, float64 `[out]`, for a weight change `[out, in]`."""
        return quadratic_form(delta, self.gram)

    def relative_error(self, weight: torch.Tensor, effective: torch.Tensor) -> float:
        """`|X(W - W')ᵀ|² / |XWᵀ|²` of the weight `effective` used in place of `weight`, both `[out, in]`."""
        energy = float(self.row_errors(weight).sum())
        return relative(float(self.row_errors(weight - effective).sum()), energy)

    def sampled_errors(self, weight: torch.Tensor, *effective: torch.Tensor) -> list[float]:
        """`relative_error` of each `effective` on up to 512 output channels, evenly spaced.

        On wide layers the exact errors would cost more than the quantization itself.
        """
        rows = slice(None, None, -(-weight.shape[0] // _REPORTED_ROWS))
        energy = float(self.row_errors(weight[rows]).sum())
        deltas = (weight[rows] - other[rows] for other in effective)
        return [relative(float(self.row_errors(delta).sum()), energy) for delta in deltas]


@contextmanager
def _products_of(dtype: torch.dtype) -> Iterator[None]:
    """bfloat16 GEMMs with float32 accumulation for float32 matrices that hold bfloat16 values."""
    backend: Any = torch.backends.mkldnn
    matmul = backend.matmul
    before = matmul.fp32_precision
    if dtype == torch.bfloat16:
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def quadratic_form(delta: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """`d M dᵀ` of each row `d` of `delta` `[rows, n]`, for a symmetric `matrix` `[n, n]`; float64 `[rows]`.

    Clamped at 0, since a Gram matrix is positive semidefinite.
    """
    errors = torch.zeros(delta.shape[0], dtype=torch.float64, device=delta.device)
    for first in range(0, delta.shape[0], _ERROR_ROWS):
        part, total = (one[first : first + _ERROR_ROWS] for one in (delta, errors))
        for start in range(0, delta.shape[1], _ERROR_COLUMNS):
            columns = slice(start, start + _ERROR_COLUMNS)
            stop = start + _ERROR_COLUMNS
            products = part[:, columns] @ matrix[columns, columns]
            # Off-diagonal blocks count twice.
            products.addmm_(part[:, stop:], matrix[stop:, columns], alpha=2)
            total += products.mul_(part[:, columns]).sum(dim=1, dtype=torch.float64)
    return errors.clamp_(min=0)


def relative(error: float, energy: float) -> float:
    """An output error over the energy of the output; 0 where there is no output at all."""
    return error / energy if energy else 0.0
