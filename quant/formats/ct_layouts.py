"""compressed-tensors layouts: pack-quantized, int-quantized, float-quantized (writers and readers).

`pack-quantized`, for `b`-bit codes and `G` groups per row:

    P.weight_packed      int32        [out, ceil(in*b/32)]  one bit stream per row, LSB first
    P.weight_scale       model dtype  [out, G]
    P.weight_zero_point  int32        [ceil(out*b/32), G]   asymmetric only; packed along `out`
    P.weight_shape       int64        [2]                   (out, in)
    P.weight_g_idx       int32        [in]                  read only: the library dropped it in 2026

`int-quantized` holds `P.weight` int8 `[out, in]`, `P.weight_scale`, and int8 `P.weight_zero_point` where
asymmetric. `float-quantized` holds `P.weight` float8_e4m3fn `[out, in]` and `P.weight_scale` `[1]`,
`[out, 1]` or one for each 128 × 128 block. Both have `P.input_scale` `[1]` for static activations.

The library's codes are signed, from `-2**(b-1)`, and it adds `2**(b-1)` before packing; ours are unsigned,
so packed words hold our codes unchanged.
"""

from __future__ import annotations

import torch

from ..base.errors import BadInput
from ..kinds.fp8.scheme import FloatScheme
from ..kinds.integer.scheme import IntScheme
from ..tensors.fp8 import Fp8Tensor
from ..tensors.integer import IntTensor
from .base import (
    SCALE_DTYPES,
    TensorSource,
    check_groups,
    expect_dtype,
    expect_matrix,
    expect_shape,
    pack_words,
    unpack_words,
)

_INT8_MIDDLE = 128


def pack_codes(module: str, tensor: IntTensor) -> dict[str, torch.Tensor]:
    """Write `pack-quantized`."""
    bits = tensor.scheme.bits
    packed = {
        f"{module}.weight_packed": pack_words(tensor.codes, bits),
        f"{module}.weight_scale": tensor.scales.contiguous(),
        f"{module}.weight_shape": torch.tensor(tensor.shape, dtype=torch.int64),
    }
    if not tensor.scheme.symmetric:
        packed[f"{module}.weight_zero_point"] = pack_words(tensor.zeros.t(), bits).t().contiguous()
    return packed


def unpack_codes(module: str, source: TensorSource, scheme: IntScheme) -> IntTensor:
    """Read `pack-quantized`."""
    name = f"{module}.weight_shape"
    shape = expect_shape(name, source.tensor(name), (2,))
    out_features, in_features = (int(width) for width in shape)
    check_groups(module, in_features, scheme)
    groups = scheme.num_groups(in_features)
    name = f"{module}.weight_packed"
    words = expect_matrix(name, source.tensor(name), torch.int32)
    if scheme.symmetric:
        zeros = torch.full((out_features, groups), scheme.middle, dtype=torch.uint8)
    else:
        zero_name = f"{module}.weight_zero_point"
        packed = expect_matrix(zero_name, source.tensor(zero_name), torch.int32)
        zeros = _fields(zero_name, packed.t(), (groups, out_features), scheme.bits).t().contiguous()
    index = None
    if scheme.permuted:
        index_name = f"{module}.weight_g_idx"
        index = expect_shape(index_name, source.tensor(index_name), (in_features,)).to(torch.int32)
        if int(index.min()) < 0 or int(index.max()) >= groups:
            raise BadInput(f"{index_name} names groups outside 0..{groups - 1}")
    return IntTensor(
        codes=_fields(name, words, (out_features, in_features), scheme.bits),
        scales=_scales(module, source, (out_features, groups)),
        zeros=zeros,
        scheme=scheme,
        group_index=index,
    )


def _fields(name: str, words: torch.Tensor, shape: tuple[int, int], bits: int) -> torch.Tensor:
    """Unpack codes of `shape`, packed densely or as the library did before 0.20."""
    rows, count = shape
    dense, old = -(-count * bits // 32), -(-count // (32 // bits))
    if words.shape[1] == old != dense:
        # Older versions left the rest of each word empty for 3, 5 and 6 bits.
        codes = unpack_words(words.reshape(-1, 1), bits)[:, : 32 // bits].reshape(
            words.shape[0], -1
        )
    else:
        expect_shape(name, words, (rows, dense))
        codes = unpack_words(words, bits)
    return codes[:, :count].contiguous()


def pack_int8(module: str, tensor: IntTensor) -> dict[str, torch.Tensor]:
    """Write `int-quantized`."""
    stored = {
        f"{module}.weight": _signed(tensor.codes),
        f"{module}.weight_scale": tensor.scales.contiguous(),
    }
    if not tensor.scheme.symmetric:
        stored[f"{module}.weight_zero_point"] = _signed(tensor.zeros)
    return stored | _input_scale_of(module, tensor.input_scale)


def unpack_int8(module: str, source: TensorSource, scheme: IntScheme) -> IntTensor:
    """Read `int-quantized`; a per-tensor scale is expanded to per-channel."""
    name = f"{module}.weight"
    signed = expect_matrix(name, source.tensor(name), torch.int8)
    out_features, in_features = signed.shape
    check_groups(module, in_features, scheme)
    shape = (out_features, scheme.num_groups(in_features))
    if scheme.symmetric:
        zeros = torch.full(shape, _INT8_MIDDLE, dtype=torch.uint8)
    else:
        name = f"{module}.weight_zero_point"
        stored_zeros = expect_dtype(name, source.tensor(name), torch.int8)
        zeros = _unsigned(_spread(name, stored_zeros, shape))
    return IntTensor(
        codes=_unsigned(signed),
        scales=_scales(module, source, shape),
        zeros=zeros,
        scheme=scheme,
        input_scale=_input_scale(module, source, scheme),
    )


def pack_float(module: str, tensor: Fp8Tensor) -> dict[str, torch.Tensor]:
    """Write `float-quantized`."""
    scales = tensor.scales
    if tensor.scheme.granularity == "tensor":
        scales = scales.view(1)
    return {
        f"{module}.weight": tensor.values,
        f"{module}.weight_scale": scales.contiguous(),
    } | _input_scale_of(module, tensor.input_scale)


def unpack_float(module: str, source: TensorSource, scheme: FloatScheme) -> Fp8Tensor:
    """Read `float-quantized`."""
    name = f"{module}.weight"
    values = expect_matrix(name, source.tensor(name), torch.float8_e4m3fn)
    return Fp8Tensor(
        values=values,
        scales=_scales(module, source, scheme.scale_shape(*values.shape)),
        scheme=scheme,
        input_scale=_input_scale(module, source, scheme),
    )


def _scales(module: str, source: TensorSource, shape: tuple[int, int]) -> torch.Tensor:
    name = f"{module}.weight_scale"
    return _spread(name, expect_dtype(name, source.tensor(name), *SCALE_DTYPES), shape)


def _spread(name: str, tensor: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Expand a scalar or a vector of rows to a matrix of `shape`."""
    if tensor.numel() == 1:
        return tensor.reshape(1, 1).expand(shape).contiguous()
    if tensor.shape == (shape[0],) and shape[1] == 1:
        return tensor.reshape(shape)
    return expect_shape(name, tensor, shape)


def _input_scale_of(module: str, scale: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {} if scale is None else {f"{module}.input_scale": scale.reshape(1)}


def _input_scale(
    module: str, source: TensorSource, scheme: IntScheme | FloatScheme
) -> torch.Tensor | None:
    """The scale of static activations, float32 `[1]`."""
    if scheme.activations is None or scheme.activations.dynamic:
        return None
    name = f"{module}.input_scale"
    scale = source.tensor(name)
    if scale.numel() != 1:
        raise BadInput(
            f"{name} has shape {tuple(scale.shape)}: only a per-tensor scale is supported"
        )
    return expect_dtype(name, scale, *SCALE_DTYPES).to(torch.float32).reshape(1)


def _signed(codes: torch.Tensor) -> torch.Tensor:
    return (codes ^ _INT8_MIDDLE).view(torch.int8)


def _unsigned(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8) ^ _INT8_MIDDLE
