"""Raw readers of 4-bit floats: NVFP4 and MXFP4 of compressed-tensors, and ModelOpt's weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from .container import Array, Bytes, Entries, Floats, Raw, read_array, read_numbers
from .floating import read_float8

Config = dict[str, Any]
_BLOCKS = {"nvfp4": 16, "mxfp4": 32}


def read_packed_fp4(entries: Entries, module: str, group: Config) -> Raw:
    """compressed-tensors nvfp4-pack-quantized and mxfp4-pack-quantized; global scales are divisors."""
    nvidia = group["weights"].get("strategy") == "tensor_group"
    names = {"global_scale": "weight_global_scale"} if nvidia else {}
    if nvidia and group.get("input_activations"):
        names["input_scale"] = "input_global_scale"
    wholes = {part: _number(entries, f"{module}.{name}") for part, name in names.items()}
    return _fp4(entries, module, "weight_packed", "nvfp4" if nvidia else "mxfp4", wholes)


def read_modelopt(entries: Entries, module: str, config: Config) -> Raw:
    """ModelOpt: fp8 with `weight_scale`, or NVFP4 whose global scales are stored as multipliers."""
    stored = entries[f"{module}.weight"]
    inputs = {"input_scale": f"{module}.input_scale"}
    inputs = {part: name for part, name in inputs.items() if name in entries}
    if stored.dtype == "F8_E4M3":
        extra: dict[str, Array] = {part: _number(entries, name) for part, name in inputs.items()}
        return read_float8(entries, module, f"{module}.weight_scale", extra)
    if config.get("quant_algo") == "W4A16_NVFP4":
        inputs = {}
    names = {"global_scale": f"{module}.weight_scale_2"} | inputs
    wholes = {
        part: (np.float32(1) / _number(entries, name)).astype(np.float32)
        for part, name in names.items()
    }
    return _fp4(entries, module, "weight", "nvfp4", wholes)


def _fp4(
    entries: Entries, module: str, codes_name: str, kind: str, wholes: dict[str, Floats]
) -> Raw:
    """Two codes a byte, the even column in the low nibble, and one byte of scale a block."""
    packed = read_array(entries[f"{module}.{codes_name}"], "U8")
    if packed.ndim != 2:
        raise ValueError(f"{codes_name} has shape {packed.shape}, and is no matrix")
    codes = np.empty((packed.shape[0], packed.shape[1] * 2), dtype=np.uint8)
    codes[:, 0::2], codes[:, 1::2] = packed & 15, packed >> 4
    scales = read_array(entries[f"{module}.weight_scale"], "F8_E4M3" if wholes else "U8")
    blocks, rest = divmod(codes.shape[1], _BLOCKS[kind])
    if rest or scales.shape != (codes.shape[0], blocks):
        raise ValueError(
            f"scales {scales.shape} do not fit {codes.shape} weights in blocks of {_BLOCKS[kind]}"
        )
    parts: dict[str, Array] = {"codes": codes, "scales": scales} | wholes
    return Raw(parts, {}, (codes.shape[0], codes.shape[1]), _problems(scales, kind))


def _problems(scales: Bytes, kind: str) -> tuple[str, ...]:
    """e4m3's NaN has all bits below the sign set, and scales have no sign; E8M0's NaN is 255."""
    if kind == "mxfp4":
        return ("has scales that are NaN",) if (scales == 255).any() else ()
    problems = ("has scales that are NaN",) if ((scales & 127) == 127).any() else ()
    return (*problems, "has scales below zero") if (scales > 128).any() else problems


def _number(entries: Entries, name: str) -> Floats:
    """A scale of a whole tensor, float32 `[1]`."""
    number = read_numbers(entries[name])[1]
    if number.size != 1 or not np.isfinite(number).all() or not (number > 0).all():
        raise ValueError(f"{name} is no usable number")
    return number.reshape(1)
