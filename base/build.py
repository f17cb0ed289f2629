"""JIT compilation of the C kernels: built once per machine, cached in the user's cache folder.

A library's name contains a hash of its sources, the compiler's version and the options, so that none is
ever out of date. It is compiled under a temporary name and renamed atomically: concurrent processes at
worst compile twice. Kernels run on torch's OpenMP threads while these spin for long, else on a pool.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from .processor import OPENMP_SPINS_ARE_BOUNDED, choose_path, processor_flags

MOST_SPINS = 10_000
"""Rounds of GOMP_SPINCOUNT after which idle threads still leave their cores soon enough."""


@lru_cache(maxsize=1)
def openmp_start() -> int | None:
    """Address of `GOMP_parallel` in the OpenMP runtime that torch has loaded; None if there is none."""
    import torch  # the C kernels are compiled without it

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


def sleeps_soon() -> bool:
    """True if idle OpenMP threads leave their cores to another pool soon."""
    if sys.platform == "darwin" or os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive":
        return True
    spins = os.environ.get("GOMP_SPINCOUNT", "")
    return OPENMP_SPINS_ARE_BOUNDED and spins.isdigit() and int(spins) <= MOST_SPINS


_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
HEADERS = Path(__file__).parent
"""The folder of the header that every library includes."""
OPTIONS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-shared", "-fPIC")
LIBRARIES = ("-lm",)
FLAGS_VARIABLE = "LLMOPT_NATIVE_CFLAGS"
"""Extra compiler options, appended to `OPTIONS`: sanitizers, debug symbols for a profile."""
COMPILE_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Native:
    """A compiled and loaded library, or the reason why there is none."""

    path: str | None
    library: ctypes.CDLL | None
    reason: str | None

    def function(self, name: str) -> Any:
        assert self.library is not None, self.reason
        return getattr(self.library, name)


class BuildFailed(RuntimeError):
    """Compilation failed; the message is one line with the reason."""


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "llmopt" / "native"


def native(source: Path) -> Native:
    """The library of a C file, for the instruction path that the environment and the processor select. Raises
    BadInput: `LLMOPT_NATIVE` names an unknown or unsupported path."""
    path = choose_path()
    if isinstance(path, str):
        return Native(None, None, path)
    return _load(source, path.name, path.compiler_options(processor_flags()))


def beside(module: str, source: str) -> Callable[[], Native]:
    """`native` of a C file in the folder of a module, which is given by its `__file__`."""
    return partial(native, Path(module).with_name(source))


def fields(pointers: str = "", numbers: str = "") -> list[tuple[str, Any]]:
    """Fields of a C struct from their names: pointers, then numbers of 64 bits."""
    kinds = (pointers, ctypes.c_void_p), (numbers, ctypes.c_int64)
    return [(name, kind) for names, kind in kinds for name in names.split()]


@lru_cache
def _load(source: Path, name: str, options: tuple[str, ...]) -> Native:
    try:
        library = open_library(compiled(source, options))
    except (BuildFailed, OSError) as error:
        return Native(None, None, str(error))
    library.llmopt_set_parallel.argtypes = [ctypes.c_void_p]
    library.llmopt_set_parallel(parallel_start().address)
    return Native(name, library, None)


@dataclass(frozen=True, slots=True)
class ParallelStart:
    """The function, like `GOMP_parallel`, that runs a kernel on several threads: its address (None: kernels
    run on the calling thread), and the name shown to people."""

    address: int | None
    name: str


@lru_cache(maxsize=1)
def parallel_start() -> ParallelStart:
    """The pool of `pool.c`, or torch's OpenMP threads while these spin: two pools would share the cores."""
    if openmp_start() is not None and not sleeps_soon():
        return ParallelStart(openmp_start(), "torch's OpenMP")
    try:
        pool = ctypes.CDLL(str(compiled(HEADERS / "pool.c", ("-pthread",))))
    except (BuildFailed, OSError):
        return ParallelStart(openmp_start(), "torch's OpenMP" if openmp_start() else "the caller")
    return ParallelStart(ctypes.cast(pool.llmopt_pool_run, ctypes.c_void_p).value, "a pool")


def compiler_command() -> list[str]:
    """The C compiler, by its full path, and the options that `CC` gives it. Raises BuildFailed: there is
    none."""
    given = os.environ.get("CC") or "cc"
    try:
        compiler = shlex.split(given)
    except ValueError as error:
        raise BuildFailed(f"CC={given}: {error}") from error
    executable = shutil.which(compiler[0]) if compiler else None
    if executable is None:
        raise BuildFailed(f"there is no C compiler ({compiler[0] if compiler else given})")
    return [executable, *compiler[1:]]


def open_library(file: Path) -> ctypes.CDLL:
    """Load a compiled library. (The tests of another machine's code run it in an emulator instead.)"""
    return ctypes.CDLL(str(file))


def compiled(source: Path, options: tuple[str, ...]) -> Path:
    """The compiled library of a source, from the cache or newly built. Raises BuildFailed: there is no
    compiler, or it fails, or there is nowhere to write."""
    more = shlex.split(os.environ.get(FLAGS_VARIABLE, ""))
    command = [*compiler_command(), *OPTIONS, *options, *more]
    name = f"{source.stem}-{_fingerprint(source, [*command, *LIBRARIES])}.so"
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
            included = (f"-I{HEADERS}", f"-I{_shared(source)}")
            _compile([*command, *included, str(source), "-o", temporary, *LIBRARIES])
            Path(temporary).replace(folder / name)
        finally:
            Path(temporary).unlink(missing_ok=True)
        return folder / name
    raise BuildFailed(
        f"neither {cache_folder()}, by this user alone, nor a temporary folder can be written"
    )


def _shared(source: Path) -> Path:
    """The folder beside a source's own, whose headers several operations share; it need not be there."""
    return source.parent.parent / "common"


def _is_private(path: Path) -> bool:
    """True if only this user (or root) can have written it: code of anybody else must not be loaded."""
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
    for file in (source, *sorted(_included(source) - {source})):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    digest.update("\0".join(command).encode())
    digest.update(compiler_version(command[0]))
    return digest.hexdigest()[:20]


def _included(source: Path) -> set[Path]:
    """The files of ours that a source includes, those that they include, and the source itself."""
    files, left = set[Path](), [source]
    while left:
        file = left.pop().resolve()
        if file not in files and file.is_file():
            files.add(file)
            for name in _INCLUDE.findall(file.read_text(encoding="utf-8")):
                left += [folder / name for folder in (file.parent, _shared(source), HEADERS)]
    return files


@lru_cache
def compiler_version(compiler: str) -> bytes:
    """Ask a compiler for its `--version`. Raises BuildFailed: it does not run."""
    try:
        return subprocess.run(
            [compiler, "--version"], capture_output=True, timeout=COMPILE_SECONDS, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"the C compiler did not run: {error}") from error
