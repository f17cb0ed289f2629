"""Quantized linears in torch: the reference, which dequantizes, and torch's own integer GEMMs on CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from ....quant.base.scheme import PER_CHANNEL, Activations, Scheme
from ....quant.kinds.base.format import pack_words, unpack_words
from ....quant.kinds.base.tensor import QuantizedTensor
from ....quant.kinds.codebook.kind import CodebookTensor
from ....quant.kinds.fp4.kind import Fp4Tensor
from ....quant.kinds.integer.kind import IntTensor
from ....quant.kinds.lookup.kind import LookupTensor
from ....quant.kinds.vectorwise.kind import VectorwiseTensor
from ..elementwise.activations import fake_quantize_inputs, int8_inputs, split_outliers


class TiledDequantLinear:
    """The reference: dequantize `TILE_ROWS` output channels at a time, then `functional.linear`.

    It supports every scheme on every device, in the activations' dtype; its codes are held without gaps.
    """

    TILE_ROWS = 1024

    def __init__(self, weight: QuantizedTensor, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._rows = weight.out_features
        self._held = _DenseCodes(weight) if _DenseCodes.fits(weight) else _in_memory(weight)
        self._scheme: Scheme = weight.scheme
        self._input_scale = weight.parts().get("input_scale")
        self.weight_bytes = self._held.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = fake_quantize_inputs(x, self._scheme, self._input_scale)
        tiles = [
            functional.linear(x, self._tile(slice(begin, begin + self.TILE_ROWS)))
            for begin in range(0, self._rows, self.TILE_ROWS)
        ]
        return tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=-1)

    def _tile(self, rows: slice) -> torch.Tensor:
        """Dequantized weights of some output channels, [rows, in]."""
        return self._held.rows(rows).dequantize(self._dtype)


def _in_memory(weight: QuantizedTensor) -> QuantizedTensor:
    """The weight without views of a mapped file, which may be written while the model serves."""
    anything: Any = weight
    mapped = {n: p for n, p in weight.parts().items() if not p.untyped_storage().resizable()}
    return replace(anything, **{name: part.clone() for name, part in mapped.items()})


class _DenseCodes:
    """A weight with codes of fewer than 8 bits as bit streams, a row of words for each output channel."""

    def __init__(self, weight: QuantizedTensor) -> None:
        codes = weight.parts()["codes"]
        self._bits, self._in_features = weight.scheme.bits, weight.in_features
        self._words = pack_words(codes, self._bits)
        # The weight without its codes: a single expanded byte is their placeholder.
        self._rest = _with_codes(weight, codes.new_zeros(1, 1).expand(codes.shape))
        self.nbytes = self._words.nbytes + weight.nbytes - codes.nbytes

    @staticmethod
    def fits(weight: QuantizedTensor) -> bool:
        kinds = IntTensor | CodebookTensor | Fp4Tensor | LookupTensor
        return isinstance(weight, kinds) and weight.scheme.bits < 8

    def rows(self, rows: slice) -> QuantizedTensor:
        codes = unpack_words(self._words[rows], self._bits)[:, : self._in_features].contiguous()
        return _with_codes(self._rest.rows(rows), codes)


def _with_codes(weight: QuantizedTensor, codes: torch.Tensor) -> QuantizedTensor:
    anything: Any = weight
    return replace(anything, codes=codes)


class Int4PackLinear:
    """W4A16 GEMM of torch on CPU, for bf16 activations.

    It computes `(code - 8) * scale + offset`, so a zero point z becomes the offset (8 - z) * scale.
    """

    def __init__(self, weight: QuantizedTensor, dtype: torch.dtype) -> None:
        assert isinstance(weight, IntTensor)
        group = weight.scheme.group_size
        self._group = weight.in_features if group == PER_CHANNEL else group
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
            weight.codes.to(torch.int32), 1
        )
        scales = weight.scales.float()
        offsets = (8.0 - weight.zeros.float()) * scales
        self._scales_and_offsets = (
            torch.stack([scales, offsets], dim=-1).transpose(0, 1).contiguous().to(dtype)
        )
        self.weight_bytes = self._packed.nbytes + self._scales_and_offsets.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, self._packed, self._group, self._scales_and_offsets
        )


class Int8PackLinear:
    """W8A16 GEMM of torch on CPU, for signed 8-bit weights with one scale per output channel."""

    def __init__(self, weight: QuantizedTensor, dtype: torch.dtype) -> None:
        assert isinstance(weight, IntTensor)
        self._codes = (weight.codes.to(torch.int16) - 128).to(torch.int8)
        self._scales = weight.scales.flatten().to(dtype)
        self.weight_bytes = self._codes.nbytes + self._scales.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int8pack_mm(x, self._codes, self._scales)


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
