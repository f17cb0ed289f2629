"""The problem that a method solves: one decoder layer, with what its linears see on calibration data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ..families import Family
from ..scheme import QuantScheme
from ..tensor import QuantizedTensor


class InputStatistics:
    """What calibration tells about the input of a linear, gathered token by token.

    The Gram matrix `XᵀX` is enough to know the output error of any change of the weight on all the
    calibration tokens, so no activations need to be kept.

    Attributes:
        gram: float32 `[in, in]`, the sum of `x xᵀ` over tokens.
        abs_sum: float32 `[in]`, the sum of `|x|`.
        num_tokens: how many tokens were seen.
    """

    def __init__(self, in_features: int):
        self.gram = torch.zeros(in_features, in_features)
        self.abs_sum = torch.zeros(in_features)
        self.num_tokens = 0

    def add(self, inputs: torch.Tensor) -> None:
        """Take in `[..., in]` float32 inputs."""
        tokens = inputs.reshape(-1, inputs.shape[-1])
        self.gram += tokens.T @ tokens
        self.abs_sum += tokens.abs().sum(dim=0)
        self.num_tokens += tokens.shape[0]

    @property
    def mean_abs(self) -> torch.Tensor:
        """Mean magnitude of each input channel `[in]`."""
        return self.abs_sum / max(self.num_tokens, 1)

    def row_errors(self, delta: torch.Tensor) -> torch.Tensor:
        """Squared output error of each output channel, float64 `[out]`, for a weight change `[out, in]`."""
        products = (delta @ self.gram).to(torch.float64) * delta.to(torch.float64)
        return products.sum(dim=1).clamp_(min=0)


@dataclass(frozen=True, slots=True)
class LayerProblem:
    """One decoder layer to quantize; names are relative to `prefix`.

    Attributes:
        prefix: such as `model.layers.3`.
        weights: float32 `[out, in]` of each linear that shall be quantized.
        statistics: of the input of each of these linears.
        norms: norm weights in the dtype of the checkpoint.
        with_bias: the linears that have a bias.
    """

    prefix: str
    family: Family
    scheme: QuantScheme
    scale_dtype: torch.dtype
    weights: dict[str, torch.Tensor]
    statistics: dict[str, InputStatistics]
    norms: dict[str, torch.Tensor]
    with_bias: frozenset[str]

    def error(self, linear: str, effective: torch.Tensor) -> float:
        """Relative output error `|X(W - W')ᵀ|² / |XWᵀ|²` of the weight `effective` used in place of `W`."""
        statistics, weight = self.statistics[linear], self.weights[linear]
        energy = float(statistics.row_errors(weight).sum())
        return float(statistics.row_errors(weight - effective).sum()) / energy if energy else 0.0


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """What was done to one linear, and what it cost on the calibration data.

    Attributes:
        error: relative output error, squared norm over squared norm.
        rtn_error: the same for plain rounding of the same weight on the same inputs.
        ratio: exponent of the activation magnitude in the chosen input scales; None: inputs unscaled.
        clipped: share of groups whose range was shrunk before rounding.
    """

    module: str
    error: float
    rtn_error: float
    ratio: float | None = None
    clipped: float = 0.0


@dataclass(frozen=True, slots=True)
class LayerResult:
    """The quantized linears, the norms that changed (in the checkpoint's dtype), and the reports."""

    weights: dict[str, QuantizedTensor]
    norms: dict[str, torch.Tensor]
    reports: list[ModuleReport]


class Method(Protocol):
    """A way to choose codes."""

    name: str

    def quantize_layer(self, problem: LayerProblem) -> LayerResult:
        """Choose the codes of every linear of a layer.

        Raises:
            BadInput: a weight that cannot be quantized, such as one that holds NaN.
        """
        ...
