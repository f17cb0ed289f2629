"""How integers are stored: the formats of their own, their layouts in compressed-tensors, and who loads them.

Layouts in `docs/formats.md`. The codes of the library are signed, from `-2**(b-1)`, and it adds `2**(b-1)`
before packing; ours are unsigned, so packed words hold our codes unchanged.
"""

from __future__ import annotations

from typing import Any

import torch

from ....base.errors import BadInput
from ...base.scheme import PER_CHANNEL, SUPPORTED_BITS
from ..base.containers import (
    CompressedLayouts,
    input_scale_part,
    read_input_scale,
    read_scales,
    read_weights,
    spread_over_rows,
    unsupported,
)
from ..base.format import Config, Stored, expect_shape, pack_words, unpack_words
from ..base.kind import EXPERTS, LoaderRules, RankMatrix, Storage
from ..base.raw import Entries, Raw
from .awq import AwqFormat
from .gptq import GptqFormat
from .kind import IntTensor
from .raw import read_int_quantized, read_pack_quantized
from .scheme import IntScheme

PACKED, INT8 = "pack-quantized", "int-quantized"
_INT8_MIDDLE = 128
_MARLIN_GROUPS = (-1, 32, 64, 128)  # of vLLM's kernels
_TRITON_GROUPS = (*_MARLIN_GROUPS, 256)
_HUMMING = "Humming (needs the package humming)"


class IntegerLayouts(CompressedLayouts):
    """Integers in compressed-tensors: 2 to 8 bits packed, or int8 with quantized inputs."""

    layouts = (PACKED, INT8)
    naive = INT8

    def describes(self, weights: Config) -> bool:
        return weights.get("type", "int") == "int"

    def layout_of(self, scheme: IntScheme) -> str | None:
        if scheme.activations is None:
            return None if scheme.permuted else PACKED
        return INT8 if scheme.bits == 8 and scheme.activations.kind == "int8" else None

    def weights(self, scheme: IntScheme) -> dict[str, Any]:
        fields = {"type": "int", "symmetric": scheme.symmetric, "strategy": "channel"}
        if scheme.group_size != PER_CHANNEL:
            fields |= {"strategy": "group", "group_size": scheme.group_size}
        return fields

    def scheme(self, layout: str, group: Config) -> IntScheme:
        widths = SUPPORTED_BITS if layout == PACKED else (8,)
        weights, strategy, activations = read_weights(layout, group, "int", widths)
        if strategy not in ("group", "channel") and not (layout == INT8 and strategy == "tensor"):
            raise unsupported(f"the {strategy!r} strategy")
        return IntScheme(
            bits=weights.get("num_bits", 8),
            group_size=int(weights["group_size"]) if strategy == "group" else PER_CHANNEL,
            symmetric=bool(weights.get("symmetric", True)),
            activations=activations,
            permuted=layout == PACKED and weights.get("actorder") in ("group", "dynamic"),
        )

    def check(self, module: str, out_features: int, in_features: int, scheme: IntScheme) -> None:
        # Rows are padded to whole words, so any width packs; only group sizes must divide.
        scheme.check_groups(module, in_features)

    def pack(self, module: str, tensor: IntTensor) -> dict[str, torch.Tensor]:
        bits, is_int8 = tensor.scheme.bits, self.layout_of(tensor.scheme) == INT8
        codes = _signed(tensor.codes) if is_int8 else pack_words(tensor.codes, bits)
        packed = {
            f"{module}.weight" if is_int8 else f"{module}.weight_packed": codes,
            f"{module}.weight_scale": tensor.scales.contiguous(),
        }
        if not is_int8:
            packed[f"{module}.weight_shape"] = torch.tensor(tensor.shape, dtype=torch.int64)
        if not tensor.scheme.symmetric:
            zeros = tensor.zeros
            packed[f"{module}.weight_zero_point"] = (
                _signed(zeros) if is_int8 else pack_words(zeros.t(), bits).t().contiguous()
            )
        return packed | input_scale_part(module, tensor.input_scale)

    def unpack(self, stored: Stored, layout: str, scheme: IntScheme) -> IntTensor:
        return (_unpack_int8 if layout == INT8 else _unpack_codes)(stored, scheme)

    def read_raw(
        self, entries: Entries, module: str, layout: str | None, group: dict[str, Any]
    ) -> Raw:
        if layout == PACKED:
            return read_pack_quantized(entries, module, group["weights"])
        return read_int_quantized(entries, module, group)


def _unpack_codes(stored: Stored, scheme: IntScheme) -> IntTensor:
    out_features, in_features = stored.weight_shape()
    scheme.check_groups(stored.module, in_features)
    groups = scheme.num_groups(in_features)
    words = stored.matrix("weight_packed", torch.int32)
    zeros = words.new_full((out_features, groups), scheme.middle, dtype=torch.uint8)
    if not scheme.symmetric or "weight_zero_point" in stored:
        packed = stored.matrix("weight_zero_point", torch.int32).t()
        name = f"{stored.module}.weight_zero_point"
        zeros = _fields(name, packed, (groups, out_features), scheme.bits).t().contiguous()
    _expect_symmetric(stored, zeros, scheme)
    index, name = None, f"{stored.module}.weight_packed"
    if scheme.permuted:
        index = stored.group_index("weight_g_idx", in_features, groups)
    elif "weight_g_idx" in stored and not bool((stored.tensor("weight_g_idx") < 0).all()):
        raise BadInput(
            f"{stored.module}.weight_g_idx permutes the groups, but the config has no actorder: group"
        )
    return IntTensor(
        codes=_fields(name, words, (out_features, in_features), scheme.bits),
        scales=read_scales(stored, (out_features, groups)),
        zeros=zeros,
        scheme=scheme,
        group_index=index,
    )


def _expect_symmetric(stored: Stored, zeros: torch.Tensor, scheme: IntScheme) -> None:
    if scheme.symmetric and bool((zeros != scheme.middle).any()):
        raise BadInput(
            f"{stored.module}.weight_zero_point holds zero points, but the config says symmetric"
        )


def _fields(name: str, words: torch.Tensor, shape: tuple[int, int], bits: int) -> torch.Tensor:
    """Unpack codes of `shape`, packed densely or as the library did before 0.20."""
    rows, count = shape
    dense, old = -(-count * bits // 32), -(-count // (32 // bits))
    if words.shape[1] == old != dense:
        # Older versions left the rest of each word empty for 3, 5 and 6 bits.
        codes = unpack_words(words.reshape(-1, 1), bits)[:, : 32 // bits]
        codes = codes.reshape(words.shape[0], -1)
    else:
        expect_shape(name, words, (rows, dense))
        codes = unpack_words(words, bits)
    return codes[:, :count].contiguous()


def _unpack_int8(stored: Stored, scheme: IntScheme) -> IntTensor:
    # A per-tensor scale is expanded to per-channel.
    signed = stored.matrix("weight", torch.int8)
    out_features, in_features = signed.shape
    scheme.check_groups(stored.module, in_features)
    shape = (out_features, scheme.num_groups(in_features))
    zeros = signed.new_full(shape, _INT8_MIDDLE, dtype=torch.uint8)
    if not scheme.symmetric or "weight_zero_point" in stored:
        zeros = spread_over_rows(stored, "weight_zero_point", torch.int8, shape=shape)
        zeros = zeros.view(torch.uint8) ^ _INT8_MIDDLE
    _expect_symmetric(stored, zeros, scheme)
    return IntTensor(
        codes=signed.view(torch.uint8) ^ _INT8_MIDDLE,
        scales=read_scales(stored, shape),
        zeros=zeros,
        scheme=scheme,
        input_scale=read_input_scale(stored, scheme.activations),
    )


def _signed(codes: torch.Tensor) -> torch.Tensor:
    return (codes ^ _INT8_MIDDLE).view(torch.int8)


class IntegerRules(LoaderRules):
    """vLLM's Marlin, Triton and CUTLASS kernels, and transformers' dequantization."""

    def vllm_kernel(
        self, scheme: IntScheme, matrix: RankMatrix, format_name: str
    ) -> tuple[bool, str]:
        if scheme.activations is not None:
            if not scheme.symmetric:
                return False, "with quantized activations it supports symmetric int8 weights only"
            if matrix.out_features % 16 or matrix.in_features % 16:
                return True, "the slower Triton W8A8, since CUTLASS needs multiples of 16"
            return True, "CUTLASS W8A8"
        fits = scheme.bits in (4, 8) and scheme.symmetric and not scheme.permuted
        if format_name == "gptq" and not fits:
            why = "of this format it reads symmetric 4 and 8 bits, without dynamic act-order"
            return False, why
        if scheme.group_size > 0 and matrix.in_features % scheme.group_size:
            return False, f"it needs whole groups of {scheme.group_size} on every rank"
        broken = _marlin_rule(matrix, scheme)
        if broken is None:
            return True, "Marlin"
        return _other_kernel(matrix, format_name, scheme, broken)

    def vllm_tried(self, scheme: IntScheme, format_name: str) -> bool:
        if scheme.activations is not None:
            return format_name == "compressed-tensors" and scheme.activations.dynamic
        if scheme.bits != 4:
            return False
        return scheme.symmetric or format_name in ("compressed-tensors", "awq")

    def vllm_tried_with_images(self, scheme: IntScheme) -> bool:
        return scheme.symmetric and scheme.activations is None

    def merged_right(self, scheme: IntScheme) -> bool:
        return scheme.activations is None and scheme.symmetric

    def transformers_needs(self, scheme: IntScheme) -> str:
        rare = scheme.activations is None and scheme.bits in (2, 5, 6)
        return "; not tried with such widths" if rare else ""


def _marlin_rule(matrix: RankMatrix, scheme: IntScheme) -> str | None:
    """The first of Marlin's rules that it violates."""
    if scheme.bits not in (4, 8):
        return f"Marlin has no {scheme.bits}-bit weights"
    if not scheme.symmetric and scheme.bits != 4:
        return "Marlin supports zero points with 4 bits only"
    if scheme.group_size not in _MARLIN_GROUPS:
        return f"Marlin has no groups of {scheme.group_size}"
    if EXPERTS not in matrix.module:
        return None
    hidden, inner = matrix.in_features, matrix.out_features
    if matrix.row_parallel:
        hidden, inner = inner, hidden
    if hidden % 128:
        return f"Marlin needs experts on hidden states in multiples of 128, not {hidden}"
    if scheme.group_size > 0 and inner % scheme.group_size:
        return f"Marlin needs experts with whole groups of {scheme.group_size} inside, not {inner}"
    return None


def _other_kernel(
    matrix: RankMatrix, name: str, scheme: IntScheme, broken: str
) -> tuple[bool, str]:
    """The kernel in place of Marlin, whose rule is `broken`."""
    if EXPERTS in matrix.module:
        if scheme.group_size > 0 and scheme.bits in (4, 8):
            return True, f"Triton experts, since {broken}"
    elif name == "awq":
        return True, f"the slower AWQ GEMM, since {broken}"
    elif name == "gptq":
        return False, f"{broken}, and vLLM reads no gptq without it"
    elif scheme.bits == 4 and scheme.group_size in _TRITON_GROUPS and not matrix.out_features % 8:
        return True, f"Triton, since {broken}"
    if name == "compressed-tensors":
        return True, f"{_HUMMING}, since {broken}"
    return False, f"{broken}, and the format {name} has no other kernel"


STORAGE = Storage(
    formats=(AwqFormat(), GptqFormat()), compressed_tensors=IntegerLayouts(), rules=IntegerRules()
)
