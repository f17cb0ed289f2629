"""Atomic file writes (temporary file, fsync, rename), safetensors streaming on them, deferred
Ctrl-C, and the end of a parent."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, BinaryIO

from .errors import BadInput

if TYPE_CHECKING:
    import torch

TEMPORARY_SUFFIX = ".writing"
_PIECE = 16 * 2**20
HOLLOW_BYTES = 2**16
"""Bytes at the start of a hollow tensor that are written."""
_PR_SET_PDEATHSIG = 1
_SCHEME = re.compile(r"[A-Za-z][\w+.-]+:")  # that a path begins with which was a URL


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Atomic write: a temporary file, fsynced and renamed into place on exit; missing folders are made.
    Raises BadInput: the disk is full. An existing file is untouched."""
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        flush(path.parent)
    except OSError as error:
        raise no_space_or(error, path) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes | str) -> None:
    """Write bytes, or text as UTF-8, atomically; see `atomic_file`."""
    with atomic_file(path) as file:
        file.write(data if isinstance(data, bytes) else data.encode("utf-8"))


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], hollow: Collection[str] = ()
) -> str:
    """Write a safetensors file of tensors in memory; see `stream_tensors`."""
    return stream_tensors(path, layout_of(tensors), tensors.__getitem__, hollow)


def stream_tensors(
    path: Path,
    layout: Mapping[str, Entry],
    read: Callable[[str], torch.Tensor],
    hollow: Collection[str] = (),
) -> str:
    """Stream a safetensors file to disk, one tensor in memory at a time; returns its SHA-256.

    Args:
        layout: dtype and shape of each tensor, see `layout_of`.
        read: called for one tensor after the other.
        hollow: tensors that are a hole in the file, zeros that take no space, after `HOLLOW_BYTES`; the
            digest is without the holes.
    """
    names, text = _header(layout)
    digest = hashlib.sha256()
    with atomic_file(path) as file:
        for start in (len(text).to_bytes(8, "little"), text):
            digest.update(start)
            file.write(start)
        for name in names:
            view = memoryview(raw_bytes(read(name)))
            end = file.tell() + len(view)
            view = view[: HOLLOW_BYTES if name in hollow else None]
            for begin in range(0, len(view), _PIECE):
                digest.update(view[begin : begin + _PIECE])
                file.write(view[begin : begin + _PIECE])
            file.seek(end)
        file.truncate()  # extends the file where it ends with a hole
    return digest.hexdigest()


Entry = tuple[str, tuple[int, ...]]
"""Dtype, as safetensors spells it, and shape of a tensor."""

_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6} | {
    name: 64 if "64" in name else 32 if "32" in name else 16 if "16" in name else 8
    for name in _NAMES.values()
}
"""Bits of an element, also of the dtypes that other tools' files have and torch lacks."""


def layout_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Entry]:
    """Dtype and shape of each tensor, for the header that `stream_tensors` writes first."""
    return {
        name: (_NAMES[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape))
        for name, tensor in tensors.items()
    }


def file_bytes(layout: Mapping[str, Entry]) -> int:
    """File size of `write_tensors` for this layout, header included."""
    return 8 + len(_header(layout)[1]) + sum(map(entry_bytes, layout.values()))


def _header(layout: Mapping[str, Entry]) -> tuple[list[str], bytes]:
    """File order (widest elements first, so that all are aligned) and the safetensors header."""
    names = sorted(layout, key=lambda name: (-_BITS[layout[name][0]], name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        dtype, shape = layout[name]
        end = offset + entry_bytes(layout[name])
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    return names, text + b" " * (-len(text) % 8)


def entry_bytes(entry: Entry) -> int:
    """Bytes of a tensor of this dtype and shape."""
    return _BITS[entry[0]] * prod(entry[1]) // 8


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order; no copy where the tensor is contiguous."""
    import torch

    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data  # pyright: ignore[reportReturnType]


def expanded(name: str | Path) -> Path:
    """A path with the home folder in place of its `~`. Raises BadInput: it names the home of a user who is
    not known here."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise BadInput(f"{name} names the home of nobody here: give the folder's path") from error


def check_output(path: Path, option: str, *, folder: bool | None = None) -> None:
    """Write to the nearest existing folder above `path`, or to `path` if it is one; leaves nothing behind.

    Permission bits do not tell: root ignores them, and file systems may be read-only or full. `folder` is
    True if one is to be made at `path`, False for a file, None if what is there decides. Raises BadInput:
    nothing can be written there, it is a URL, or a file is where a folder is wanted, or the other way round;
    the message names `option`."""
    above = path.parent
    first = path.parts[0] if path.parts else ""
    if _SCHEME.fullmatch(first) and not Path(first).exists():
        raise BadInput(
            f"{option} {path}: URLs are not supported: name a folder, such as one that storage is mounted at"
        )
    try:
        if path.is_dir():
            above = path
            if folder is False:
                raise BadInput(f"{option} {path}: a folder is there: name a file in it")
        elif folder and path.exists():
            raise BadInput(f"{option} {path}: a file is there: name a folder")
        while not above.exists():
            above = above.parent
        with tempfile.TemporaryFile(dir=above) as file:
            file.write(b"0")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise BadInput(
            f"{option} {path}: cannot write in {above}: {reason}; name another place"
        ) from error


def make_folder(folder: Path, option: str) -> None:
    """`mkdir -p`. Raises BadInput: it cannot be created; the message names `option`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise BadInput(
            f"cannot make the folder {folder}: {reason}; choose another one with {option}"
        ) from error


def in_the_way(output: Path) -> BadInput:
    return BadInput(f"{output} exists: remove it, or choose another folder with --output")


def check_absent(output: Path) -> None:
    """Raises BadInput for an output that is there, if only an empty folder."""
    if output.exists():
        raise in_the_way(output)


def is_taken(folder: Path) -> bool:
    """True if there is a file, or a folder with something in it."""
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))


@contextmanager
def atomic_folder(output: Path, unfinished: str) -> Iterator[Path]:
    """Atomic creation of a folder: one of the name `unfinished`, fsynced and renamed on exit, removed on
    errors. An older one of that name is removed. Raises BadInput: something is in `output`, it cannot be
    created, or the disk is full."""
    if is_taken(output):
        raise in_the_way(output)
    work = output.with_name(unfinished)
    if work.exists():
        shutil.rmtree(work)
    make_folder(work, "--output")
    try:
        yield work
        for path in work.rglob("*"):
            flush(path)
        flush(work)
        work.rename(output)
        flush(output.parent)
    except OSError as error:
        raise no_space_or(error, work) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def flush(path: Path) -> None:
    """fsync a file, or a folder, so that renames in it survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def no_space_or(error: OSError, path: Path) -> Exception:
    """A BadInput if `error` is ENOSPC or EDQUOT, else `error` itself."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return BadInput(
            f"no space left while writing {path}: free some and run the same command again"
        )
    return error


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Ignore the first Ctrl-C while a result is assembled; a second one interrupts as usual.

    Only the main thread receives signals, so in other threads this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def hold(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, previous)

    previous = signal.getsignal(signal.SIGINT)
    if previous is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def end_with_parent() -> None:
    """Have Linux end a child when this process dies, also by SIGKILL: a killed benchmark that is continued
    must find the GPU free. Called in the child; PR_SET_PDEATHSIG of prctl(2).

    It heeds SIGINT again, by which it is stopped: a shell has its background jobs ignore that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
