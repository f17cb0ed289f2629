"""GGUF container, version 3: header, typed key-value metadata, tensor infos, aligned tensor data.

Layout, all little endian (ggml's `docs/gguf.md`):

    "GGUF"  u32 version  u64 tensors  u64 keys
    each key:     string key, u32 type, value             (a string is u64 length, then utf-8)
    each tensor:  string name, u32 dims, u64 × dims (row length first), u32 type, u64 offset
    padding, then the data; offsets count from its start, and each is a multiple of the alignment

The `gguf` package's reader makes an array of every string (seconds for a vocabulary, at each of three opens)
and names no key of a damaged file; its writer refuses texts that are no utf-8, and knows no size beforehand.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ...base.atomic_io import atomic_file
from ...base.errors import BadInput
from ..kinds.ggml.scheme import BLOCK_NUMBERS, GGUF_BLOCKS
from ..model.checkpoint import GGUF_MAGIC

VERSION = 3
ALIGNMENT = 32  # where a file has no `general.alignment`
_MAX_DIMS = 4  # `GGML_MAX_DIMS`

# Weights and bytes per block, by type name; then ggml's type numbers.
TYPE_SIZES = {"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), **GGUF_BLOCKS}
TYPE_NUMBERS = {"F32": 0, "F16": 1, "BF16": 30, **BLOCK_NUMBERS}
# Types whose headers alone are read here: weights and bytes per block (`GGML_QUANT_SIZES`), and number.
_UNREAD = {
    "TQ1_0": (256, 54, 34),
    "TQ2_0": (256, 66, 35),
    "NVFP4": (64, 36, 40),
    "Q1_0": (128, 18, 41),
}
_SIZES = TYPE_SIZES | {name: (weights, size) for name, (weights, size, _) in _UNREAD.items()}
_TYPE_NAMES = {number: name for name, number in TYPE_NUMBERS.items()}
_TYPE_NAMES |= {number: name for name, (_, _, number) in _UNREAD.items()}

# `struct`'s codes of the value types: u8 to i32, f32, bool, and (from 10) u64, i64, f64.
_SCALARS = dict(enumerate("BbHhIif?")) | dict(enumerate("Qqd", 10))
_STRING, _ARRAY = 8, 9  # value types without such a code


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: torch's shape, the name of its ggml type, first byte and size of its data."""

    name: str
    shape: tuple[int, ...]
    type: str
    start: int
    nbytes: int


_Header = tuple[dict[str, Any], dict[str, TensorInfo]]
"""Keys and values, and tensors by name."""


def data_bytes(type_name: str, shape: Sequence[int]) -> int:
    per_block, block_bytes = _SIZES[type_name]
    return prod(shape) // per_block * block_bytes


class GgufFile:
    """A checked GGUF file: keys and values, tensors in file order. BadInput: cut off, or unknown types."""

    # The last header, its bytes and its digest: a start opens its model three times, and a vocabulary has
    # hundreds of thousands of strings.
    _last: ClassVar[tuple[_Header, int, bytes] | None] = None

    def __init__(self, path: Path | str):
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < 24:
                    raise BadInput(f"{self.path} has only {size} bytes: it is no whole GGUF file")
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise BadInput(f"{self.path} cannot be read: {error.strerror}") from error
        last = GgufFile._last
        if last is None or self._digest(last[1]) != last[2]:
            header, end = self._read_header()
            GgufFile._last = last = header, end, self._digest(end)
        self.metadata, self.tensors = last[0]

    def _digest(self, end: int) -> bytes:
        size = len(self._bytes)
        return sha256(self._bytes[:end] + size.to_bytes(8, "little")).digest()

    def _read_header(self) -> tuple[_Header, int]:
        cursor = _Cursor(self._bytes, self.path)
        if cursor.take(4, "its first bytes") != GGUF_MAGIC:
            raise BadInput(f"{self.path} is no GGUF file: it does not begin with 'GGUF'")
        version = cursor.number("I", "the version")
        if version and not version & 0xFFFF:  # as llama.cpp knows them, in its gguf.cpp
            raise BadInput(
                f"{self.path} is a big-endian file: convert it with llama.cpp's gguf_convert_endian.py"
            )
        if version != VERSION:
            raise BadInput(f"{self.path} has GGUF version {version}: this reads version {VERSION}")
        num_tensors = cursor.number("Q", "the number of tensors")
        num_keys = cursor.number("Q", "the number of keys")
        metadata: dict[str, Any] = {}
        for index in range(num_keys):
            key = cursor.string(f"key {index} of {num_keys}")
            if not key or key in metadata:
                fault = f"holds the key {key} twice" if key else f"has no name for key {index}"
                raise BadInput(f"{self.path} {fault}: it is damaged")
            metadata[key] = cursor.value(cursor.number("I", key), key)
        infos = self._read_infos(cursor, num_tensors, metadata)
        return (metadata, infos), cursor.position

    def _read_infos(
        self, cursor: _Cursor, count: int, metadata: Mapping[str, Any]
    ) -> dict[str, TensorInfo]:
        raw = []
        for index in range(count):
            name = cursor.string(f"tensor {index} of {count}")
            dims = cursor.number("I", name)
            if not 1 <= dims <= _MAX_DIMS:
                raise BadInput(f"{self.path}: tensor {name!r} has {dims} dimensions: it is damaged")
            sizes = [cursor.number("Q", name) for _ in range(dims)]
            number, offset = cursor.number("I", name), cursor.number("Q", name)
            raw.append((name, tuple(reversed(sizes)), number, offset))
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise BadInput(f"{self.path}: general.alignment is {alignment!r}: it is damaged")
        base = -(-cursor.position // alignment) * alignment
        infos: dict[str, TensorInfo] = {}
        for name, shape, number, offset in raw:
            type_name = _TYPE_NAMES.get(number)
            if type_name is None:
                raise BadInput(
                    f"{self.path}: tensor {name!r} has ggml type {number}, which is not read here "
                    f"(read are {', '.join(TYPE_NUMBERS)})"
                )
            if shape[-1] % _SIZES[type_name][0]:
                raise BadInput(f"{self.path}: rows of {shape[-1]} do not fit {type_name} ({name})")
            if name in infos:
                raise BadInput(f"{self.path} holds tensor {name!r} twice: it is damaged")
            info = TensorInfo(name, shape, type_name, base + offset, data_bytes(type_name, shape))
            if info.start + info.nbytes > len(self._bytes):
                raise BadInput(
                    f"{self.path} is cut off: tensor {name!r} should end at byte "
                    f"{info.start + info.nbytes}, the file has {len(self._bytes)}"
                )
            infos[name] = info
        return infos

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        return self.bytes_of(self.tensors[name])

    def bytes_of(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self._bytes, np.uint8, count=info.nbytes, offset=info.start)

    def release(self) -> None:
        """Drop the header that is kept, and the mapped pages (`madvise`), which are read again on access."""
        GgufFile._last = None
        if hasattr(mmap, "MADV_DONTNEED"):
            self._bytes.madvise(mmap.MADV_DONTNEED)


class _Cursor:
    """A sequential reader of a file's bytes; BadInput names what is missing where the file ends early."""

    def __init__(self, data: mmap.mmap, path: Path):
        self._data, self._path, self.position = data, path, 0

    def take(self, count: int, what: str) -> bytes:
        end = self.position + count
        if end > len(self._data):
            raise self._cut_off(what)
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def number(self, code: str, what: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))[0]

    def string(self, what: str) -> str:
        # Vocabularies of old files hold bytes that are no utf-8; they come back as lone surrogates.
        data = self.take(self.number("Q", what), what)
        return data.decode("utf-8", errors="surrogateescape")

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.string(key)
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], key)
        if kind != _ARRAY:
            raise BadInput(f"{self._path}: key {key!r} has value type {kind}: it is damaged")
        inner, count = self.number("I", key), self.number("Q", key)
        if inner in _SCALARS:
            code = _SCALARS[inner]
            packed = self.take(count * struct.calcsize(f"<{code}"), key)
            return list(struct.unpack(f"<{count}{code}", packed))
        if inner != _STRING:
            return [self.value(inner, key) for _ in range(count)]
        # One loop without calls: vocabularies have hundreds of thousands of strings.
        data, position, length_at = self._data, self.position, struct.Struct("<Q").unpack_from
        strings, size = [], len(data)
        for _ in range(count):
            begin = position + 8
            position = begin + length_at(data, position)[0] if begin <= size else size + 1
            if position > size:
                raise self._cut_off(key)
            strings.append(data[begin:position].decode("utf-8", "surrogateescape"))
        self.position = position
        return strings

    def _cut_off(self, what: str) -> BadInput:
        return BadInput(
            f"{self._path} is cut off or damaged: it ends within {what} "
            f"(byte {self.position} of {len(self._data)})"
        )


@dataclass(frozen=True, slots=True)
class TensorToWrite:
    """A tensor of a file that is written: torch's shape, ggml type, and a function that yields its bytes, of
    which a `hollow` one has none: it is a hole of zeros in the file."""

    name: str
    shape: tuple[int, ...]
    type: str
    chunks: Callable[[], Iterable[bytes]]
    hollow: bool = False


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Sequence[TensorToWrite]) -> None:
    """Write a GGUF file atomically, one tensor in memory at a time; BadInput if the disk is full. Values are
    str, bool, int (stored as u32), float (f32), or a list of str, int (i32) or float."""
    with atomic_file(path) as file:
        file.write(_header(metadata, tensors))
        for tensor in tensors:
            start, expected = file.tell(), data_bytes(tensor.type, tensor.shape)
            if tensor.hollow:
                file.seek(expected, os.SEEK_CUR)
            for chunk in () if tensor.hollow else tensor.chunks():
                file.write(chunk)
            written = file.tell() - start
            if written != expected:
                raise ValueError(f"{tensor.name} gave {written} bytes, its shape says {expected}")
            file.write(bytes(_aligned(written) - written))
        file.truncate()  # extends the file where it ends with a hole


def gguf_bytes(metadata: Mapping[str, Any], tensors: Sequence[TensorToWrite]) -> int:
    data = sum(_aligned(data_bytes(tensor.type, tensor.shape)) for tensor in tensors)
    return len(_header(metadata, tensors)) + data


def _header(metadata: Mapping[str, Any], tensors: Sequence[TensorToWrite]) -> bytes:
    parts = [GGUF_MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    parts += [_string(key) + _typed(value) for key, value in metadata.items()]
    offset = 0
    for tensor in tensors:
        sizes = struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
        parts.append(_string(tensor.name) + struct.pack("<I", len(tensor.shape)) + sizes)
        parts.append(struct.pack("<IQ", TYPE_NUMBERS[tensor.type], offset))
        offset += _aligned(data_bytes(tensor.type, tensor.shape))
    header = b"".join(parts)
    return header.ljust(_aligned(len(header)), b"\0")


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def _string(text: str) -> bytes:
    data = text.encode("utf-8", errors="surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _typed(value: Any) -> bytes:
    """The number of the type, then the value."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if value and isinstance(value[0], str):
        head = struct.pack("<IIQ", _ARRAY, _STRING, len(value))
        texts = [item.encode("utf-8", errors="surrogateescape") for item in value]
        return head + b"".join(x for text in texts for x in (len(text).to_bytes(8, "little"), text))
    number, code = (6, "f") if value and isinstance(value[0], float) else (5, "i")
    return struct.pack(f"<IIQ{len(value)}{code}", _ARRAY, number, len(value), *value)
