"""JIT compilation of the C kernels: built once per machine, cached in the user's cache folder.

A library's name contains a hash of its sources, the compiler's version and the options, so that none is
ever out of date. It is compiled under a temporary name and renamed atomically: concurrent processes at
worst compile twice.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from .processor import choose_path, processor_flags

HEADERS = Path(__file__).parent
"""The folder of the headers that several operations share."""
OPTIONS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-shared", "-fPIC")
FLAGS_VARIABLE = "LLMOPT_NATIVE_CFLAGS"
"""Extra compiler options, appended to `OPTIONS`: sanitizers, debug symbols for a profile."""
COMPILE_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Native:
    """A compiled and loaded library, or the reason why there is none."""

    path: str | None
    library: ctypes.CDLL | None
    reason: str | None


class BuildFailed(RuntimeError):
    """Compilation failed; the message is one line with the reason."""


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "llmopt" / "native"


def native(source: Path) -> Native:
    """The library of a C file, for the instruction path that the environment and the processor select.

    Raises:
        BadInput: `LLMOPT_NATIVE` names an unknown or unsupported path.
    """
    path = choose_path()
    if isinstance(path, str):
        return Native(None, None, path)
    return _load(source, path.name, path.compiler_options(processor_flags()))


@lru_cache
def _load(source: Path, name: str, options: tuple[str, ...]) -> Native:
    try:
        library = ctypes.CDLL(str(compiled(source, options)))
    except (BuildFailed, OSError) as error:
        return Native(None, None, str(error))
    start = openmp_start()
    library.llmopt_set_parallel.argtypes = [ctypes.c_void_p]
    library.llmopt_set_parallel(start)
    return Native(name, library, None)


def compiled(source: Path, options: tuple[str, ...]) -> Path:
    """The compiled library of a source, from the cache or newly built.

    Raises:
        BuildFailed: there is no compiler, or it fails, or there is nowhere to write.
    """
    compiler = shlex.split(os.environ.get("CC") or "cc")
    executable = shutil.which(compiler[0])
    if executable is None:
        raise BuildFailed(f"there is no C compiler ({compiler[0]})")
    more = shlex.split(os.environ.get(FLAGS_VARIABLE, ""))
    command = [executable, *compiler[1:], *OPTIONS, *options, *more]
    name = f"{source.stem}-{_fingerprint(source, command)}.so"
    for choose_folder in (cache_folder, _private_folder):
        try:
            folder = choose_folder()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_private(folder):
                continue
            if _is_private(folder / name):
                return folder / name
            handle, temporary = tempfile.mkstemp(suffix=".so", dir=folder)
        except (OSError, RuntimeError):
            continue  # no home, or one that cannot be written
        os.close(handle)
        try:
            _compile([*command, f"-I{HEADERS}", str(source), "-o", temporary])
            Path(temporary).replace(folder / name)
        finally:
            Path(temporary).unlink(missing_ok=True)
        return folder / name
    raise BuildFailed(
        f"neither {cache_folder()}, by this user alone, nor a temporary folder can be written"
    )


def _is_private(path: Path) -> bool:
    """Whether only this user (or root) can have written it: code of anybody else must not be loaded."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022


@lru_cache(maxsize=1)
def _private_folder() -> Path:
    """Fallback where the cache cannot be written: a folder that is removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="llmopt-native-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _compile(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"the C compiler did not run: {error}") from error
    if done.returncode:
        line = next(
            (x for x in done.stderr.splitlines() if "error" in x), f"exit {done.returncode}"
        )
        raise BuildFailed(f"the C compiler failed: {line}")


def _fingerprint(source: Path, command: list[str]) -> str:
    digest = hashlib.sha256()
    headers = {*source.parent.glob("*.h"), *HEADERS.glob("*.h")}
    for file in (source, *sorted(headers)):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    digest.update("\0".join(command).encode())
    digest.update(_version(command[0]))
    return digest.hexdigest()[:20]


@lru_cache
def _version(compiler: str) -> bytes:
    try:
        return subprocess.run(
            [compiler, "--version"], capture_output=True, timeout=COMPILE_SECONDS, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"the C compiler did not run: {error}") from error


@lru_cache(maxsize=1)
def openmp_start() -> int | None:
    """Address of `GOMP_parallel` in the OpenMP runtime that torch has loaded; None if there is none."""
    if not torch.backends.openmp.is_available():
        return None
    try:
        mapped = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    names = dict.fromkeys(line.split(maxsplit=5)[-1] for line in mapped if "omp" in line)
    files = [file for file in names if any(part in file for part in ("gomp", "iomp", "libomp"))]
    for file in sorted(files, key=lambda file: "torch" not in file):
        try:
            start = ctypes.CDLL(file).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(start, ctypes.c_void_p).value
    return None
