"""Raw readers of integer codes: AWQ, GPTQ, and two layouts of compressed-tensors."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from ..base.raw import (
    Array,
    Bytes,
    Entries,
    Floats,
    Raw,
    bit_fields,
    read_array,
    read_input_scale,
    read_numbers,
    rows_first,
)

Config = dict[str, Any]


def _raw(
    codes: Bytes,
    stored_scales: Array,
    scales: Floats,
    zeros: Bytes,
    group_size: int,
    extra: dict[str, Array] | None = None,
    problems: tuple[str, ...] = (),
) -> Raw:
    out_features, in_features = codes.shape
    groups = 1 if group_size < 1 else in_features / group_size
    if scales.shape != (out_features, groups) or zeros.shape != scales.shape:
        raise ValueError(
            f"scales {scales.shape} and zeros {zeros.shape} do not fit {codes.shape} weights in groups "
            f"of {group_size}"
        )
    parts = {"codes": codes, "scales": stored_scales, "zeros": zeros} | (extra or {})
    return Raw(parts, {"scales": scales}, (out_features, in_features), problems)


def read_awq(entries: Entries, module: str, config: Config) -> Raw:
    """AWQ. GEMM: within a word of eight channels, the even ones come first, then the odd ones."""
    words = read_array(entries[f"{module}.qweight"], "I32")
    zero_words = read_array(entries[f"{module}.qzeros"], "I32")
    stored, scales = read_numbers(entries[f"{module}.scales"])
    group_size = int(config.get("group_size", config.get("q_group_size", 128)))
    if str(config.get("format") or config.get("version") or "gemm").lower() == "gemv":
        in_features = words.shape[1] * 8
        groups = 1 if group_size < 1 else in_features // group_size
        codes, zeros = bit_fields(words, 4, in_features), bit_fields(zero_words, 4, groups)
        stored, scales = np.ascontiguousarray(stored[:, :groups]), scales[:, :groups]
        return _raw(codes, stored, scales, zeros, group_size)

    def unshuffle(packed: Array) -> Bytes:
        columns = np.empty((packed.shape[0], packed.shape[1] * 8), dtype=np.uint8)
        for column in range(8):
            nibble = column // 2 if column % 2 == 0 else 4 + column // 2
            columns[:, column::8] = (packed >> np.uint32(4 * nibble)) & np.uint32(15)
        return rows_first(columns)

    return _raw(unshuffle(words), rows_first(stored), scales.T, unshuffle(zero_words), group_size)


def read_gptq(entries: Entries, module: str, config: Config) -> Raw:
    """GPTQ: bit streams along the columns. Version 1 stores zero points minus one."""
    fields = dict(config)
    for key, override in (config.get("dynamic") or {}).items():
        if key[:2] != "-:" and re.match(key[2:] if key[:2] == "+:" else key, module):
            fields.update(override or {})
            break
    bits, group_size = int(fields["bits"]), int(fields.get("group_size", 128))
    words = rows_first(read_array(entries[f"{module}.qweight"], "I32"))
    stored, scales = read_numbers(entries[f"{module}.scales"])
    codes = bit_fields(words, bits, words.shape[1] * 32 // bits)
    zero_words = read_array(entries[f"{module}.qzeros"], "I32")
    zeros = bit_fields(zero_words, bits, codes.shape[0])
    labelled = config.get("checkpoint_format") or config.get("format") or "gptq"
    first_version, problems = labelled == "gptq", ()
    if fields.get("sym", True):
        middle = 1 << (bits - 1)
        if (zeros == middle).all() or (zeros == middle - 1).all():
            is_symmetric = bool((zeros == middle - 1).all())
            if is_symmetric != first_version:
                holds = "gptq" if is_symmetric else "gptq_v2"
                problems = (f"holds zero codes of {holds}, but its config says {labelled}",)
            first_version = is_symmetric
        else:
            problems = ("says symmetric, but its zero codes are not in the middle",)
    if first_version:
        zeros = (zeros + 1) & ((1 << bits) - 1)
    groups, index = scales.shape[0], np.zeros(0, np.int32)
    if f"{module}.g_idx" in entries:
        index = read_array(entries[f"{module}.g_idx"], "I32").view(np.int32)
        if index.shape != (codes.shape[1],):
            raise ValueError(f"g_idx has shape {index.shape} for {codes.shape[1]} inputs")
        if index.min() < 0 or index.max() >= groups:
            problems += (f"has a g_idx outside 0..{groups - 1}",)
    if not index.any():  # zeros alone stand for none
        index = (np.arange(codes.shape[1]) // (codes.shape[1] // groups)).astype(np.int32)
    zeros, extra = rows_first(zeros.astype(np.uint8)), {"group_index": index}
    return _raw(codes, rows_first(stored), scales.T, zeros, group_size, extra, problems)


def read_pack_quantized(entries: Entries, module: str, weights: Config) -> Raw:
    """compressed-tensors pack-quantized: bit streams along the rows, zero points along the columns."""
    bits = int(weights["num_bits"])

    def fields(words: Array, count: int) -> Bytes:
        per_word = 32 // bits
        if words.shape[1] == -(-count // per_word) != -(-count * bits // 32):
            # Before 0.20 no code straddled two words.
            return np.ascontiguousarray(
                bit_fields(words.reshape(-1, 1), bits, per_word).reshape(len(words), -1)[:, :count]
            )
        return bit_fields(words, bits, count)

    shape = read_array(entries[f"{module}.weight_shape"], "I64", "I32")
    out_features, in_features = (int(n) for n in shape)
    words = read_array(entries[f"{module}.weight_packed"], "I32")
    if words.shape[0] != out_features:
        raise ValueError(f"weight_packed has {words.shape[0]} rows for {out_features} outputs")
    stored, scales = read_numbers(entries[f"{module}.weight_scale"])
    zeros = np.full(scales.shape, 1 << (bits - 1), dtype=np.uint8)
    if not weights.get("symmetric", True) or f"{module}.weight_zero_point" in entries:
        zero_words = read_array(entries[f"{module}.weight_zero_point"], "I32")
        zeros = rows_first(fields(rows_first(zero_words), out_features))
    extra: dict[str, Array] = {}
    if f"{module}.weight_g_idx" in entries:
        extra["group_index"] = read_array(entries[f"{module}.weight_g_idx"], "I32").view(np.int32)
    group_size = weights.get("group_size") or -1
    problems = _zero_points(weights, zeros, 1 << (bits - 1))
    return _raw(fields(words, in_features), stored, scales, zeros, group_size, extra, problems)


def _zero_points(weights: Config, zeros: Bytes, middle: int) -> tuple[str, ...]:
    dropped = weights.get("symmetric", True) and (zeros != middle).any()
    return ("has zero points, but its config says symmetric",) if dropped else ()


def read_int_quantized(entries: Entries, module: str, group: Config) -> Raw:
    """compressed-tensors int-quantized: signed int8; ours is unsigned with 128 as zero."""
    weights, activations = group["weights"], group.get("input_activations") or {"dynamic": True}
    extra = {} if activations.get("dynamic") else read_input_scale(entries, module)
    codes = read_array(entries[f"{module}.weight"], "I8").view(np.uint8) ^ np.uint8(128)
    stored, scales = read_numbers(entries[f"{module}.weight_scale"])
    group_size = weights.get("group_size") or -1
    shape = (codes.shape[0], 1 if group_size < 1 else codes.shape[1] // group_size)
    if scales.size in (1, shape[0]) and shape[1] == 1:
        stored = np.ascontiguousarray(np.broadcast_to(stored.reshape(-1, 1), shape))
        scales = np.broadcast_to(scales.reshape(-1, 1), shape)
    zeros = np.full(shape, 128, dtype=np.uint8)
    if not weights.get("symmetric", True) or f"{module}.weight_zero_point" in entries:
        signed = read_array(entries[f"{module}.weight_zero_point"], "I8").view(np.uint8)
        zeros = signed ^ np.uint8(128)
        zeros = np.ascontiguousarray(np.broadcast_to(zeros.reshape(-1, shape[1]), shape))
    problems = _zero_points(weights, zeros, 128)
    return _raw(codes, stored, scales, zeros, group_size, extra, problems)
