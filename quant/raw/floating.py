"""Raw readers of fp8, bitsandbytes and lookup-table weights."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from .container import Array, Entries, Floats, Raw, bit_fields, read_array, read_numbers

Config = dict[str, Any]


def read_float8(entries: Entries, module: str, scale_name: str, extra: dict[str, Array]) -> Raw:
    """e4m3 values and their scales: `[1, 1]`, `[out, 1]`, or one for each 128 × 128 block.

    ModelOpt writes block scales as `[blocks, 1, blocks, 1]`.
    e4m3fn's only NaN has all seven bits below the sign set; there is no infinity.
    """
    values = read_array(entries[f"{module}.weight"], "F8_E4M3")
    stored, scales = read_numbers(entries[scale_name])
    out_features, in_features = values.shape
    blocks = (-(-out_features // 128), -(-in_features // 128))
    if scales.ndim == 4:
        scales = scales.reshape(scales.shape[0] * scales.shape[1], -1)
    if scales.size == 1:
        shape = (1, 1)
    elif scales.size == out_features and scales.shape != blocks:
        shape = (out_features, 1)
    elif scales.shape == blocks:
        shape = blocks
    else:
        raise ValueError(f"scales {scales.shape} do not fit {values.shape} weights")
    problems = ("has weights that are NaN",) if ((values & 127) == 127).any() else ()
    parts = {"values": values, "scales": stored.reshape(shape)} | extra
    return Raw(parts, {"scales": scales.reshape(shape)}, (out_features, in_features), problems)


def read_fp8(entries: Entries, module: str, config: Config) -> Raw:
    """`quant_method: fp8`, with either name of the scales."""
    names = [f"{module}.weight_scale_inv", f"{module}.weight_scale"]
    scale_name = next((name for name in names if name in entries), names[0])
    static = config.get("activation_scheme") == "static"
    return read_float8(
        entries, module, scale_name, read_input_scale(entries, module) if static else {}
    )


def read_input_scale(entries: Entries, module: str) -> dict[str, Array]:
    """The per-tensor scale of static activations, float32 `[1]`."""
    names = [module + ending for ending in (".input_scale", ".activation_scale")]
    name = next((name for name in names if name in entries), names[0])
    scale = read_numbers(entries[name])[1]
    if scale.size != 1 or not np.isfinite(scale).all() or (scale == 0).any():
        raise ValueError(f"{name} is no usable number")
    return {"input_scale": scale.reshape(1)}


def read_bitsandbytes(entries: Entries, module: str, config: Config) -> Raw:
    """bitsandbytes: int8 rows, or two 4-bit codes per byte with the first in the high nibble."""
    if f"{module}.SCB" in entries:
        codes = read_array(entries[f"{module}.weight"], "I8")
        absmax = read_array(entries[f"{module}.SCB"], "F32")
        if absmax.shape != codes.shape[:1]:
            raise ValueError(f"SCB has shape {absmax.shape} for {codes.shape[0]} rows")
        shape = (codes.shape[0], codes.shape[1])
        return Raw({"codes": codes, "absmax": absmax}, {"absmax": absmax}, shape)
    prefix = f"{module}.weight.quant_state."
    (state_name,) = [name for name in entries if name.startswith(prefix)]
    state = json.loads(read_array(entries[state_name], "U8").tobytes())
    out_features, in_features = state["shape"]
    packed = read_array(entries[f"{module}.weight"], "U8").reshape(-1)
    codes = np.stack([packed // 16, packed % 16], axis=1).reshape(out_features, in_features)
    absmax = read_array(entries[f"{module}.weight.absmax"], "F32", "U8")
    if absmax.size != -(-codes.size // state["blocksize"]):
        raise ValueError(f"absmax has {absmax.size} values for {codes.size} weights")
    parts: dict[str, Array] = {"codes": codes, "absmax": absmax}
    numbers: dict[str, Floats] = {} if absmax.dtype == np.uint8 else {"absmax": absmax}
    if "nested_offset" in state:
        parts["nested_absmax"] = read_array(entries[f"{module}.weight.nested_absmax"], "F32")
        parts["nested_map"] = read_array(entries[f"{module}.weight.nested_quant_map"], "F32")
        parts["nested_offset"] = np.array([state["nested_offset"]], dtype=np.float32)
        numbers |= {name: part for name, part in parts.items() if name.startswith("nested")}
    return Raw(parts, numbers, (out_features, in_features))


def read_squeezellm(entries: Entries, module: str, config: Config) -> Raw:
    """llmopt's SqueezeLLM layout: bit streams and tables per row, CSR sparse weights."""
    bits = int(config["bits"])
    out_features, in_features = (
        int(n) for n in read_array(entries[f"{module}.weight_shape"], "I64")
    )
    words = read_array(entries[f"{module}.qweight"], "I32")
    table = read_array(entries[f"{module}.lookup_table"], "F16")
    if words.shape[0] != out_features or table.shape != (out_features, 1 << bits):
        raise ValueError(f"qweight {words.shape} and lookup_table {table.shape} do not fit")
    parts: dict[str, Array] = {"codes": bit_fields(words, bits, in_features), "table": table}
    problems: tuple[str, ...] = ()
    if f"{module}.sparse_rows" in entries:
        rows = read_array(entries[f"{module}.sparse_rows"], "I32").view(np.int32)
        columns = read_array(entries[f"{module}.sparse_columns"], "I32").view(np.int32)
        values = read_array(entries[f"{module}.sparse_values"], "F16")
        if len(rows) != out_features + 1 or not rows[-1] == len(columns) == len(values):
            raise ValueError("the sparse weights do not fit their rows")
        if columns.size and (columns.min() < 0 or columns.max() >= in_features):
            problems = (f"has sparse weights outside columns 0..{in_features - 1}",)
        parts |= {"sparse_rows": rows, "sparse_columns": columns, "sparse_values": values}
    numbers = {
        name: parts[name].astype(np.float32) for name in ("table", "sparse_values") if name in parts
    }
    return Raw(parts, numbers, (out_features, in_features), problems)
