"""Quantized linears by torch and by libraries.

torch has the reference, which dequantizes, and integer GEMMs on CPU. Marlin (Frantar et al., 2024) for 4-bit
integers is from `kernels-community/quantization` of the hub; DeepGEMM is for block FP8, e4m3 × e4m3 with a
scale for each 128 inputs and each 128 × 128 weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch.nn import functional

from ....quant.base.scheme import PER_CHANNEL, Activations, Scheme
from ....quant.kinds.base.format import pack_words, unpack_words
from ....quant.kinds.base.tensor import QuantizedTensor
from ....quant.kinds.codebook.kind import CodebookTensor
from ....quant.kinds.fp4.kind import Fp4Tensor
from ....quant.kinds.fp8.kind import BLOCK, Fp8Tensor
from ....quant.kinds.fp8.scheme import FloatScheme
from ....quant.kinds.integer.kind import IntTensor
from ....quant.kinds.integer.scheme import IntScheme
from ....quant.kinds.lookup.kind import LookupTensor
from ....quant.kinds.vectorwise.kind import VectorwiseTensor
from ..common.devices import hub_kernel, package, refuses_device
from ..elementwise.reference import (
    ActivationQuant,
    QuantizedActivations,
    Rows,
    fake_quantize_inputs,
    int8_inputs,
    split_outliers,
)


class TiledDequantLinear:
    """The reference of all schemes: dequantize `TILE_ROWS` output channels, then `functional.linear`."""

    TILE_ROWS = 1024

    def __init__(self, weight: QuantizedTensor, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._rows = weight.out_features
        kinds = IntTensor | CodebookTensor | Fp4Tensor | LookupTensor
        if isinstance(weight, kinds) and weight.scheme.bits < 8:
            self._held = _DenseCodes(weight)
        else:  # without views of a mapped file, which may be written while the model serves
            parts = weight.parts().items()
            mapped = {n: p.clone() for n, p in parts if not p.untyped_storage().resizable()}
            self._held = replace(cast(Any, weight), **mapped)
        self._scheme: Scheme = weight.scheme
        self._input_scale = weight.parts().get("input_scale")
        self.weight_bytes = self._held.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = fake_quantize_inputs(x, self._scheme, self._input_scale)
        tiles = [
            functional.linear(
                x, self._held.rows(slice(begin, begin + self.TILE_ROWS)).dequantize(self._dtype)
            )
            for begin in range(0, self._rows, self.TILE_ROWS)
        ]
        return tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=-1)


class _DenseCodes:
    """A weight with codes of fewer than 8 bits as bit streams, a row of words for each output channel."""

    def __init__(self, weight: QuantizedTensor) -> None:
        codes = weight.parts()["codes"]
        self._bits, self._in_features = weight.scheme.bits, weight.in_features
        self._words = pack_words(codes, self._bits)
        # The weight without its codes: a single expanded byte is their placeholder.
        self._rest = replace(cast(Any, weight), codes=codes.new_zeros(1, 1).expand(codes.shape))
        self.nbytes = self._words.nbytes + weight.nbytes - codes.nbytes

    def rows(self, rows: slice) -> QuantizedTensor:
        codes = unpack_words(self._words[rows], self._bits)[:, : self._in_features].contiguous()
        return replace(cast(Any, self._rest.rows(rows)), codes=codes)


class Int4PackLinear:
    """W4A16 GEMM of torch on CPU, bf16: `(code - 8) * scale + offset`, so zero z becomes (8 - z) * scale."""

    def __init__(self, weight: QuantizedTensor, dtype: torch.dtype) -> None:
        assert isinstance(weight, IntTensor)
        group = weight.scheme.group_size
        self._group = weight.in_features if group == PER_CHANNEL else group
        codes, scales = weight.codes.to(torch.int32), weight.scales.float()
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        pairs = torch.stack([scales, (8.0 - weight.zeros.float()) * scales], dim=-1)
        self._scales_and_offsets = pairs.transpose(0, 1).contiguous().to(dtype)
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


REPOSITORY = "kernels-community/quantization"
MARLIN_GPUS = (8, 9, 10, 12)
"""Compute capabilities, major."""
MARLIN_WEIGHTS = "plain symmetric 4-bit integers"
DEEP_GEMM_WEIGHTS = "e4m3 in blocks with e4m3 inputs"
GROUPS = (32, 64, 128)
LEAST_OUT, LEAST_IN = 64, 128
LOCKS = 16
"""Locks in the workspace for each tile of `LEAST_OUT` outputs."""
_GROUPED = [row + 8 * column for row in range(8) for column in range(8)]
_WHOLE = [2 * row + column for row in range(4) for column in (0, 1, 8, 9, 16, 17, 24, 25)]
"""The order of scales in which a thread meets them: with several groups of inputs, and with one."""


def refuses_marlin(scheme: IntScheme, out_features: int, in_features: int) -> str | None:
    is_plain = scheme.activations is None and scheme.symmetric and not scheme.permuted
    if not is_plain or scheme.bits != 4:
        return f"it is for {MARLIN_WEIGHTS}, not {scheme.label}"
    if scheme.group_size not in (PER_CHANNEL, *GROUPS) or not scheme.divides(in_features):
        return f"it has no groups of {scheme.group_size}"
    if out_features % LEAST_OUT or in_features % LEAST_IN:
        shape = f"{out_features} × {in_features}"
        return f"it needs out % {LEAST_OUT} = 0 and in % {LEAST_IN} = 0, not {shape}"
    return hub_kernel(REPOSITORY).reason


class MarlinLinear:
    """`gptq_marlin_gemm` on a weight in Marlin's order."""

    def __init__(self, weight: QuantizedTensor, dtype: torch.dtype) -> None:
        assert isinstance(weight, IntTensor)
        self._shape = weight.out_features, weight.in_features
        device = weight.codes.device
        self._none = torch.empty(0, dtype=torch.int32, device=device)
        library = hub_kernel(REPOSITORY).module
        out_features, in_features = self._shape
        words = packed_by_inputs(weight.codes)
        self._codes = library.gptq_marlin_repack(words, self._none, in_features, out_features, 4)
        self._scales = permuted_scales(weight.scales.to(dtype))
        locks = out_features // LEAST_OUT * LOCKS
        self._workspace = torch.zeros(locks, dtype=torch.int32, device=device)
        self._type = library.scalar_type.scalar_types.uint4b8
        self.weight_bytes = self._codes.nbytes + self._scales.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        multiply = hub_kernel(REPOSITORY).module.gptq_marlin_gemm
        none, flags = self._none, (True, False, True, False)
        # Flags: is_k_full, use_atomic_add, use_fp32_reduce, is_zp_float.
        weight = self._codes, self._scales, None, none, none, none, self._workspace, self._type
        return multiply(x.contiguous(), None, *weight, len(x), *self._shape, *flags)


def packed_by_inputs(codes: torch.Tensor) -> torch.Tensor:
    """GPTQ's layout: codes uint8 [out, in], eight consecutive inputs in an int32, [in / 8, out]."""
    by_word = codes.T.reshape(-1, 8, len(codes)).to(torch.int32)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=codes.device)
    # Bits do not overlap, so the sum is their union; in int32 it wraps to the sign.
    return (by_word << shifts[None, :, None]).sum(dim=1, dtype=torch.int32).contiguous()


def permuted_scales(scales: torch.Tensor) -> torch.Tensor:
    """Scales [out, groups] in Marlin's order, [groups, out]."""
    by_group = scales.T.contiguous()
    order = _WHOLE if len(by_group) == 1 else _GROUPED
    return by_group.reshape(-1, len(order))[:, order].reshape(by_group.shape).contiguous()


NAME = "deep_gemm"


def refuses_dtype(device: str, dtype: torch.dtype) -> str | None:
    """Reason why DeepGEMM does not support a dtype on a device, installed or not, or None."""
    # Compute capability 10 takes scales that are powers of two, which ours are not.
    if (reason := refuses_device(device, (9,))) is not None:
        return reason
    return None if dtype is torch.bfloat16 else f"its outputs are bfloat16, not {dtype}"


def refuses_deep_gemm(scheme: FloatScheme, out_features: int, in_features: int) -> str | None:
    activations = scheme.activations
    if scheme.granularity != "block" or activations is None:
        return f"it is for {DEEP_GEMM_WEIGHTS}, not {scheme.label}"
    is_blockwise = activations.kind == "fp8" and activations.granularity == "group128"
    if not is_blockwise or not activations.dynamic:
        return f"it is for e4m3 inputs with a scale for each {BLOCK}, not {scheme.label}"
    if out_features % BLOCK or in_features % BLOCK:
        return f"it needs whole blocks, not {out_features} × {in_features}"
    return lacks_deep_gemm()


def lacks_deep_gemm() -> str | None:
    """Reason why DeepGEMM cannot be called here. 1.0.0 of the package index is older than `fp8_gemm_nt`."""
    library = package(NAME)
    if library.reason is None and not hasattr(library.module, "fp8_gemm_nt"):
        return "this deep_gemm has no fp8_gemm_nt: install version 2 or newer"
    return library.reason


class DeepGemmLinear:
    """`fp8_gemm_nt` in bfloat16: `weight` is e4m3 [out, in], and float32 scales [out / 128, in / 128]."""

    def __init__(self, weight: QuantizedTensor, dtype: torch.dtype) -> None:
        assert isinstance(weight, Fp8Tensor) and weight.scheme.activations is not None
        self.activation_quant = ActivationQuant(weight.scheme.activations)
        self.weight = weight.values.contiguous(), weight.scales.float().contiguous()
        self._dtype = dtype
        self.weight_bytes = sum(part.nbytes for part in self.weight)

    def __call__(self, x: Rows) -> torch.Tensor:
        from ..elementwise.triton_rows import round_rows

        rows = x if isinstance(x, QuantizedActivations) else round_rows(x, self.activation_quant)
        values = self.weight[0]
        out = torch.empty(len(rows.codes), len(values), dtype=self._dtype, device=values.device)
        if len(out):
            library = package(NAME).module
            # As Hopper's kernel reads them: transposed, rows padded to 16 bytes.
            scales = library.get_mn_major_tma_aligned_tensor(rows.scales)
            library.fp8_gemm_nt((rows.codes, scales), self.weight, out)
        return out
