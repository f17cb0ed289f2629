"""How 4-bit floats are stored: compressed-tensors, ModelOpt, and the experts of gpt-oss; and who loads them.

Layouts in `docs/formats.md`. gpt-oss (`quant_method: mxfp4`, read only) has a layer's experts in `P_blocks`
uint8 `[experts, out, in/32, 16]`, two e2m1 codes a byte, low nibble first, and `P_scales` uint8 `[experts,
out, in/32]`, exponents of two with a bias of 127 (OCP Microscaling Formats 1.0, 5.3.3 and 5.4).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ....base.errors import BadInput
from ...base.consumed import Consumed
from ...base.scheme import Activations, Scheme
from ..base.containers import CompressedLayouts, ModelOptAlgorithms, one_number, unsupported
from ..base.format import (
    PROVENANCE,
    Config,
    Stored,
    TensorSource,
    expect_dtype,
    expect_shape,
    pack_nibbles,
    unpack_nibbles,
)
from ..base.kind import LoaderRules, RankMatrix, Storage
from ..base.raw import Array, Bytes, Entries, Floats, Raw, read_array, read_number
from .kind import Fp4Tensor
from .scheme import FP4_BLOCKS, Fp4Scheme

NVFP4, MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
METHOD = "mxfp4"
"""The `quant_method` of gpt-oss, whose experts alone have it."""
_EXPERTS_BLOCK = 32
_LAYOUTS = {"nvfp4": NVFP4, "mxfp4": MXFP4}
# Of weights and of inputs, as the presets NVFP4 and MXFP4 of compressed-tensors have them.
_FIELDS: dict[str, dict[str, Any]] = {
    "nvfp4": {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"},
    "mxfp4": {"strategy": "group", "scale_dtype": "torch.uint8"},
}
_FP4_MARLIN = "FP4 Marlin"


class Fp4Layouts(CompressedLayouts):
    """Both kinds in compressed-tensors."""

    layouts = (NVFP4, MXFP4)

    def describes(self, weights: Config) -> bool:
        return weights.get("type") == "float" and weights.get("num_bits") == 4

    def layout_of(self, scheme: Fp4Scheme) -> str | None:
        return _LAYOUTS[scheme.kind]

    def weights(self, scheme: Fp4Scheme) -> dict[str, Any]:
        return _fields(scheme.kind)

    def inputs(self, activations: Activations) -> dict[str, Any]:
        # Dynamic group scales; `local` where a calibrated global scale is their unit.
        dynamic = True if activations.dynamic else "local"
        return {"num_bits": 4, "dynamic": dynamic} | _fields(activations.kind)

    def scheme(self, layout: str, group: Config) -> Fp4Scheme:
        kind = "nvfp4" if layout == NVFP4 else "mxfp4"
        wanted = {"num_bits": 4} | _fields(kind)
        inputs = group.get("input_activations")
        for part, fields in (("weights", group.get("weights") or {}), ("inputs", inputs)):
            for name in ("num_bits", "type", "symmetric", "group_size", "strategy"):
                if fields and fields.get(name, wanted[name]) != wanted[name]:
                    raise unsupported(f"{name} {fields[name]!r} of {part} in the layout {layout}")
        if group.get("output_activations"):
            raise unsupported("quantized outputs")
        if not inputs:
            return Fp4Scheme(kind)
        if kind == "mxfp4":
            return Fp4Scheme(kind, Activations("mxfp4", "group32"))
        return Fp4Scheme(kind, Activations("nvfp4", "group16", dynamic=False))

    def check(self, module: str, out_features: int, in_features: int, scheme: Fp4Scheme) -> None:
        _check_blocks(module, in_features, scheme)

    def pack(self, module: str, tensor: Fp4Tensor) -> dict[str, torch.Tensor]:
        codes, scales = pack_nibbles(tensor.codes), tensor.scales.contiguous()
        stored = {f"{module}.weight_packed": codes, f"{module}.weight_scale": scales}
        for name, scale in (("weight", tensor.global_scale), ("input", tensor.input_scale)):
            if scale is not None:
                stored[f"{module}.{name}_global_scale"] = scale.reshape(1)
        return stored

    def unpack(self, stored: Stored, layout: str, scheme: Fp4Scheme) -> Fp4Tensor:
        codes = unpack_nibbles(stored.matrix("weight_packed", torch.uint8))
        nvidia, static = scheme.kind == "nvfp4", scheme.has_static_inputs
        return Fp4Tensor(
            codes,
            _block_scales(stored, codes, scheme),
            scheme,
            global_scale=one_number(stored, "weight_global_scale") if nvidia else None,
            input_scale=one_number(stored, "input_global_scale") if static else None,
        )

    def read_raw(
        self, entries: Entries, module: str, layout: str | None, group: dict[str, Any]
    ) -> Raw:
        nvidia = group["weights"].get("strategy") == "tensor_group"
        names = {"global_scale": "weight_global_scale"} if nvidia else {}
        if nvidia and group.get("input_activations"):
            names["input_scale"] = "input_global_scale"
        wholes = {part: read_number(entries, f"{module}.{name}") for part, name in names.items()}
        kind = "nvfp4" if nvidia else "mxfp4"
        return _read_codes(entries, module, "weight_packed", kind, wholes)


def _fields(kind: str) -> dict[str, Any]:
    return {"type": "float", "symmetric": True, "group_size": FP4_BLOCKS[kind]} | _FIELDS[kind]


class NvFp4Algorithms(ModelOptAlgorithms):
    """NVFP4 in ModelOpt's checkpoints, whose scales of whole tensors are multipliers."""

    algorithms: Mapping[str, Scheme] = {
        "NVFP4": Fp4Scheme("nvfp4", Activations("nvfp4", "group16", dynamic=False)),
        "W4A16_NVFP4": Fp4Scheme("nvfp4"),
    }
    raw_dtype = "U8"

    def group_size(self, scheme: Fp4Scheme) -> dict[str, int]:
        return {"group_size": scheme.block_size}

    def check(self, module: str, out_features: int, in_features: int, scheme: Fp4Scheme) -> None:
        _check_blocks(module, in_features, scheme)

    def pack(self, module: str, tensor: Fp4Tensor) -> dict[str, torch.Tensor]:
        assert tensor.global_scale is not None
        stored = {
            f"{module}.weight": pack_nibbles(tensor.codes),
            f"{module}.weight_scale": tensor.scales.contiguous(),
            f"{module}.weight_scale_2": (1 / tensor.global_scale).reshape(()),
        }
        if tensor.input_scale is not None:
            stored[f"{module}.input_scale"] = (1 / tensor.input_scale).reshape(())
        return stored

    def unpack(self, stored: Stored, scheme: Fp4Scheme) -> Fp4Tensor:
        codes = unpack_nibbles(stored.matrix("weight", torch.uint8))
        return Fp4Tensor(
            codes,
            _block_scales(stored, codes, scheme),
            scheme,
            1 / one_number(stored, "weight_scale_2"),
            1 / one_number(stored, "input_scale") if scheme.has_static_inputs else None,
        )

    def read_raw(self, entries: Entries, module: str, config: dict[str, Any]) -> Raw:
        names = {"global_scale": f"{module}.weight_scale_2", "input_scale": f"{module}.input_scale"}
        if names["input_scale"] not in entries or config.get("quant_algo") == "W4A16_NVFP4":
            del names["input_scale"]
        inverse = {part: np.float32(1) / read_number(entries, n) for part, n in names.items()}
        wholes = {part: number.astype(np.float32) for part, number in inverse.items()}
        return _read_codes(entries, module, "weight", "nvfp4", wholes)


class Fp4Rules(LoaderRules):
    """vLLM's FP4 kernels, which need a GPU; transformers leaves the global scale of NVFP4 out."""

    def vllm_kernel(
        self, scheme: Fp4Scheme, matrix: RankMatrix, format_name: str
    ) -> tuple[bool, str]:
        if matrix.in_features % scheme.block_size:
            size = scheme.block_size
            return False, f"{scheme.kind} needs inputs in multiples of {size} on a rank"
        if scheme.activations is None:
            return True, f"{_FP4_MARLIN}, on a GPU alone"
        return True, f"W4A4 kernels on Blackwell, else {_FP4_MARLIN}, on a GPU alone"

    def merged_right(self, scheme: Fp4Scheme) -> bool:
        return scheme.kind == "mxfp4" and scheme.activations is None

    def transformers_needs(self, scheme: Fp4Scheme) -> str:
        return " and dtype=torch.bfloat16, to which it decompresses 4-bit floats"


def _check_blocks(module: str, in_features: int, scheme: Fp4Scheme) -> None:
    if in_features % scheme.block_size:
        raise BadInput(
            f"{module} has {in_features} inputs, and {scheme.kind} takes multiples of "
            f"{scheme.block_size}: leave it out with --ignore"
        )


def _block_scales(stored: Stored, codes: torch.Tensor, scheme: Fp4Scheme) -> torch.Tensor:
    dtype = torch.float8_e4m3fn if scheme.kind == "nvfp4" else torch.uint8
    _check_blocks(stored.module, codes.shape[1], scheme)
    shape = codes.shape[0], codes.shape[1] // scheme.block_size
    return stored.tensor("weight_scale", dtype, shape=shape)


def check_mxfp4(config: Config) -> None:
    """Raises BadInput where the `quantization_config` of gpt-oss has a key that nothing reads."""
    Consumed(config).refuse_unread(PROVENANCE, f"quant_method {METHOD}: the quantization_config")


def mxfp4_names(projection: str) -> tuple[str, str]:
    return f"{projection}_blocks", f"{projection}_scales"


def read_mxfp4(
    source: TensorSource, projection: str, num_experts: int, out_features: int, in_features: int
) -> list[Fp4Tensor]:
    """Each expert's weight `[out, in]`; BadInput for a tensor that is missing or of another shape."""
    if in_features % _EXPERTS_BLOCK:
        raise BadInput(
            f"{projection} has {in_features} inputs: mxfp4 takes multiples of {_EXPERTS_BLOCK}"
        )
    shape = (num_experts, out_features, in_features // _EXPERTS_BLOCK)
    shapes = (*shape, _EXPERTS_BLOCK // 2), shape
    blocks, scales = (
        expect_dtype(name, expect_shape(name, source.tensor(name), expected), torch.uint8)
        for name, expected in zip(mxfp4_names(projection), shapes, strict=True)
    )
    return [
        Fp4Tensor(unpack_nibbles(packed.reshape(out_features, -1)), exponents, Fp4Scheme("mxfp4"))
        for packed, exponents in zip(blocks, scales, strict=True)
    ]


_RAW_BLOCKS = {"nvfp4": 16, "mxfp4": 32}


def _read_codes(
    entries: Entries, module: str, codes_name: str, kind: str, wholes: dict[str, Floats]
) -> Raw:
    """Two codes a byte, the even column in the low nibble, and one byte of scale a block."""
    packed = read_array(entries[f"{module}.{codes_name}"], "U8")
    if packed.ndim != 2:
        raise ValueError(f"{codes_name} has shape {packed.shape}, and is no matrix")
    codes = np.empty((packed.shape[0], packed.shape[1] * 2), dtype=np.uint8)
    codes[:, 0::2], codes[:, 1::2] = packed & 15, packed >> 4
    scales = read_array(entries[f"{module}.weight_scale"], "F8_E4M3" if wholes else "U8")
    blocks, rest = divmod(codes.shape[1], _RAW_BLOCKS[kind])
    if rest or scales.shape != (codes.shape[0], blocks):
        raise ValueError(
            f"scales {scales.shape} do not fit {codes.shape} weights in blocks of {_RAW_BLOCKS[kind]}"
        )
    parts: dict[str, Array] = {"codes": codes, "scales": scales} | wholes
    return Raw(parts, {}, (codes.shape[0], codes.shape[1]), _problems(scales, kind))


def _problems(scales: Bytes, kind: str) -> tuple[str, ...]:
    """e4m3's NaN has all bits below the sign set, and scales have no sign; E8M0's NaN is 255."""
    if kind == "mxfp4":
        return ("has scales that are NaN",) if (scales == 255).any() else ()
    problems = ("has scales that are NaN",) if ((scales & 127) == 127).any() else ()
    return (*problems, "has scales below zero") if (scales > 128).any() else problems


STORAGE = Storage(compressed_tensors=Fp4Layouts(), modelopt=NvFp4Algorithms(), rules=Fp4Rules())
