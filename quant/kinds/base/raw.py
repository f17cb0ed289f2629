"""Reading safetensors files with numpy, and what the second readers of several formats share."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Array = npt.NDArray[Any]

# bfloat16 and float8 have no numpy type: their bits are kept as they are.
_NUMPY_OF = {
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "F8_E4M3": "u1",
    "I32": "<u4",
    "I64": "<i8",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
}
_FLOATS = ("F32", "F16", "BF16")
_PIECE = 2**24  # bits unpacked per chunk


class Entry(NamedTuple):
    """Location of one tensor: file, offset, dtype, shape."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


Entries = dict[str, Entry]


class Raw(NamedTuple):
    """One module as read from disk.

    Attributes:
        parts: the unpacked contents, under the names of `QuantizedTensor.parts`.
        numbers: the floating-point parts, as float32. `scales` must not be zero, the rest may.
        problems: defects of a readable module.
    """

    parts: dict[str, Array]
    numbers: dict[str, Floats]
    shape: tuple[int, int]
    problems: tuple[str, ...] = ()


def read_headers(paths: list[Path]) -> Entries:
    """Every tensor of safetensors files: 8 bytes of header length, a JSON header, then the data. Raises
    ValueError, KeyError, TypeError or struct.error: a header is damaged."""
    entries: Entries = {}
    for path in paths:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > path.stat().st_size:
                raise ValueError("its header is longer than the file")
            header = dict(json.loads(file.read(length)))
        header.pop("__metadata__", None)
        for name, info in header.items():
            start, stop = (8 + length + offset for offset in info["data_offsets"])
            entries[name] = Entry(path, info["dtype"], tuple(info["shape"]), start, stop)
    return entries


def read_array(entry: Entry, *dtypes: str) -> Array:
    if entry.dtype not in dtypes:
        raise ValueError(f"{entry.dtype} where {' or '.join(dtypes)} belongs")
    with entry.path.open("rb") as file:
        file.seek(entry.start)
        data = file.read(entry.nbytes)
    return np.frombuffer(data, dtype=_NUMPY_OF[entry.dtype]).reshape(entry.shape)


def read_numbers(entry: Entry) -> tuple[Array, Floats]:
    """Floats as stored, and as float32; bfloat16 is the upper half of one."""
    stored = read_array(entry, *_FLOATS)
    if entry.dtype == "BF16":
        return stored, (stored.astype(np.uint32) << 16).view(np.float32)
    return stored, stored.astype(np.float32)


def bit_fields(words: Array, bits: int, count: int) -> Bytes:
    """The first `count` fields of `bits` bits in each row of 32-bit words, LSB first."""
    if words.shape[1] * 32 < count * bits:
        raise ValueError(f"{words.shape[1]} words cannot hold {count} codes of {bits} bits")
    rows = words.shape[0]
    codes = np.empty((rows, count), dtype=np.uint8)
    step = max(1, _PIECE // max(1, words.shape[1] * 32))
    for begin in range(0, rows, step):
        part = np.ascontiguousarray(words[begin : begin + step]).view(np.uint8)
        spread = np.unpackbits(part, axis=1, bitorder="little")[:, : count * bits]
        fields = spread.reshape(part.shape[0], count, bits)
        codes[begin : begin + step] = np.packbits(fields, axis=2, bitorder="little")[..., 0]
    return codes


def rows_first(array: Array) -> Array:
    return np.ascontiguousarray(array.T)


def read_input_scale(entries: Entries, module: str) -> dict[str, Array]:
    """The per-tensor scale of static activations, float32 `[1]`."""
    names = [module + ending for ending in (".input_scale", ".activation_scale")]
    name = next((name for name in names if name in entries), names[0])
    scale = read_numbers(entries[name])[1]
    if scale.size != 1 or not np.isfinite(scale).all() or (scale == 0).any():
        raise ValueError(f"{name} is no usable number")
    return {"input_scale": scale.reshape(1)}


def read_number(entries: Entries, name: str) -> Floats:
    """A scale of a whole tensor, float32 `[1]`."""
    number = read_numbers(entries[name])[1]
    if number.size != 1 or not np.isfinite(number).all() or not (number > 0).all():
        raise ValueError(f"{name} is no usable number")
    return number.reshape(1)
