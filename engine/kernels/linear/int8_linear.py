"""W8A8 linears on torch's int8 GEMM: exact int32 accumulation, then per-token and per-channel scales."""

from __future__ import annotations

import torch

from ....quant.base.scheme import Activations
from ....quant.kinds.base.tensor import QuantizedTensor
from ....quant.kinds.integer.kind import IntTensor
from ....quant.kinds.vectorwise.kind import VectorwiseTensor
from ..activations.fake_quantize import int8_inputs, split_outliers


class Int8MatmulLinear:
    """Symmetric int8 weights with a scale per output channel, and int8 inputs (W8A8)."""

    def __init__(self, weight: QuantizedTensor, dtype: torch.dtype) -> None:
        assert isinstance(weight, IntTensor) and weight.scheme.activations is not None
        self._activations: Activations = weight.scheme.activations
        self._input_scale = weight.input_scale
        # Codes are unsigned with zero point 128; the GEMM takes signed bytes.
        self._codes = (weight.codes ^ 128).view(torch.int8).contiguous()
        self._scales = weight.scales.flatten().to(torch.float32)
        self.weight_bytes = self._codes.nbytes + self._scales.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        codes, scale = int8_inputs(x, self._activations, self._input_scale)
        return (torch.ops.aten._int_mm(codes, self._codes.t()) * scale * self._scales).to(x.dtype)


class VectorwiseLinear:
    """LLM.int8(): int8 GEMM plus a float matmul of the outlier columns (mixed-precision decomposition)."""

    def __init__(self, weight: QuantizedTensor, dtype: torch.dtype) -> None:
        assert isinstance(weight, VectorwiseTensor)
        self._threshold = weight.scheme.threshold
        self._codes = weight.codes.contiguous()
        self._scales = weight.absmax.to(torch.float32) / 127
        self.weight_bytes = self._codes.nbytes + self._scales.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        codes, scale, outliers = split_outliers(x, self._threshold)
        sums = torch.ops.aten._int_mm(codes, self._codes.t()) * scale
        columns = outliers.any(dim=0).nonzero().flatten()
        if columns.numel():
            sums += outliers[:, columns] @ self._codes[:, columns].to(torch.float32).t()
        return (sums * self._scales).to(x.dtype)
