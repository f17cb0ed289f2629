"""A second reader of quantized checkpoints, written from the formats' descriptions with numpy alone.

It shares no code with the writers, nor with the reader that the engine uses: a mistake in either cannot
hide in both. It is plain rather than fast.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]

# bfloat16 has no numpy type: its bits are kept as they are.
_NUMPY_OF = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<u4", "I64": "<i8", "U8": "u1"}


class Entry(NamedTuple):
    """Where one tensor lies."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Codes(NamedTuple):
    """One module as it was read: codes `[out, in]`, zeros and scales `[out, groups]`.

    `scales` keep the bits that are stored; `scale_values` are the same as float32.
    """

    codes: Bytes
    scales: Array
    zeros: Bytes
    scale_values: npt.NDArray[np.float32]


def read_headers(paths: list[Path]) -> dict[str, Entry]:
    """Every tensor of safetensors files: 8 bytes of header length, a JSON header, then the data."""
    entries: dict[str, Entry] = {}
    for path in paths:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, info in header.items():
            if name != "__metadata__":
                start, stop = info["data_offsets"]
                base = 8 + length
                shape = tuple(info["shape"])
                entries[name] = Entry(path, info["dtype"], shape, base + start, base + stop)
    return entries


def read_array(entry: Entry) -> Array:
    """The elements of one tensor."""
    with entry.path.open("rb") as file:
        file.seek(entry.start)
        data = file.read(entry.stop - entry.start)
    return np.frombuffer(data, dtype=_NUMPY_OF[entry.dtype]).reshape(entry.shape)


def as_float(array: Array, dtype: str) -> npt.NDArray[np.float32]:
    """Stored numbers as float32; bfloat16 is the upper half of a float32."""
    if dtype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def read_awq(entries: dict[str, Entry], module: str, config: dict[str, Any]) -> Codes:
    """AWQ GEMM: within a word of eight channels, the even ones come first, then the odd ones."""

    def unshuffle(words: Array) -> Bytes:
        columns = np.empty((words.shape[0], words.shape[1] * 8), dtype=np.uint8)
        for column in range(8):
            nibble = column // 2 if column % 2 == 0 else 4 + column // 2
            columns[:, column::8] = (words >> np.uint32(4 * nibble)) & np.uint32(15)
        return columns

    entry = entries[f"{module}.scales"]
    scales = np.ascontiguousarray(read_array(entry).T)
    return Codes(
        codes=np.ascontiguousarray(unshuffle(read_array(entries[f"{module}.qweight"])).T),
        scales=scales,
        zeros=np.ascontiguousarray(unshuffle(read_array(entries[f"{module}.qzeros"])).T),
        scale_values=as_float(scales, entry.dtype),
    )


def read_pack_quantized(entries: dict[str, Entry], module: str, config: dict[str, Any]) -> Codes:
    """compressed-tensors pack-quantized: lowest bits first, rows padded to whole words."""
    (group,) = list(config["config_groups"].values())[:1]
    bits = int(group["weights"]["num_bits"])

    def fields(words: Array, count: int) -> Bytes:
        bytes_of = np.ascontiguousarray(words).view(np.uint8)
        if bits == 4:
            halves = np.stack([bytes_of & 15, bytes_of >> 4], axis=-1)
            bytes_of = halves.reshape(words.shape[0], -1).astype(np.uint8)
        return np.ascontiguousarray(bytes_of[:, :count])

    out_features, in_features = (int(n) for n in read_array(entries[f"{module}.weight_shape"]))
    entry = entries[f"{module}.weight_scale"]
    scales = read_array(entry)
    zero_point = entries.get(f"{module}.weight_zero_point")
    if zero_point is None:
        zeros = np.full(scales.shape, 2 ** (bits - 1), dtype=np.uint8)
    else:
        zeros = np.ascontiguousarray(fields(read_array(zero_point).T, out_features).T)
    return Codes(
        codes=fields(read_array(entries[f"{module}.weight_packed"]), in_features),
        scales=scales,
        zeros=zeros,
        scale_values=as_float(scales, entry.dtype),
    )


READERS: dict[str, tuple[str, Callable[[dict[str, Entry], str, dict[str, Any]], Codes]]] = {
    "awq": (".qweight", read_awq),
    "compressed-tensors": (".weight_packed", read_pack_quantized),
}
