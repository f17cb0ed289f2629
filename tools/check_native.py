"""The C kernels' tests with gcc's sanitizers compiled in: `python tools/check_native.py [avx2 ...]`.

Reads and writes outside of what a call was given, and arithmetic that C does not define, stop the run
(address, undefined; a path at a time); so do data races between the threads of a call, or in the pool that
runs them (thread; on the first path). Every C file is compiled first: tests skip one that takes long.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from llmopt.base import build
from llmopt.base.processor import PATHS, InstructionPath, processor_flags

ROOT = Path(__file__).resolve().parents[1]
INSTALLED = build.HEADERS.parents[1]
SOURCES = sorted(
    file for part in ("base", "engine", "quant") for file in (INSTALLED / part).rglob("*.c")
)
COMPILE_SECONDS = 1800
SUPPRESSIONS = ROOT / "tools" / "thread_sanitizer.txt"
"""Races that are none: between threads of torch's own operations, which gcc's pool synchronizes."""
TESTS = [
    *(
        f"tests/engine/kernels/test_native_{part}.py"
        for part in (
            "linear",
            "lookup",
            "attention",
            "layer",
            "experts",
            "argmax",
            "rows",
            "halves",
            "fp8",
        )
    ),
    "tests/engine/kernels/test_packed_scales.py",
    "tests/engine/kernels/test_trellis_linear.py",
    "tests/quant/gguf/test_block_codes.py",
    "tests/quant/grids/test_ranged.py",
    "tests/quant/methods/test_int_rounding.py",
    "tests/quant/trellis/test_viterbi.py",
]
RACES = (
    "never_depends or own_prefix or whatever_the_threads or loop_bit_for_bit or rope or gates "
    "or dequantized_weight or argmax or multiplied_exactly or codes_are_those or ranges_are_those "
    "or bits_of_torch"
)
"""Tests of every kernel, with two threads."""


@dataclass(frozen=True, slots=True)
class Sanitizer:
    """A build with sanitizers, and how its tests run.

    Attributes:
        flags: of the compiler.
        libraries: to be loaded before everything else.
        environment: of the tests.
        command: what runs Python: gcc 12's thread sanitizer needs addresses that are not random.
    """

    flags: str
    libraries: tuple[str, ...]
    environment: dict[str, str]
    command: tuple[str, ...] = ()

    def compile_all(self, path: InstructionPath) -> int:
        """Compile every C file for a path, into the cache that the tests load from; the number of them."""
        os.environ[build.FLAGS_VARIABLE] = self.flags
        build.COMPILE_SECONDS = COMPILE_SECONDS
        options = path.compiler_options(processor_flags())

        def compiled(source: Path) -> Path:
            is_pool = source == build.HEADERS / "pool.c"
            return build.compiled(source, ("-pthread",) if is_pool else options)

        with ThreadPoolExecutor(2) as compilers:
            return len({*compilers.map(compiled, SOURCES)})

    def test(self, *arguments: str) -> int:
        """Run pytest with the sanitizers; its exit status."""
        libraries = [_library(name) for name in self.libraries]
        environment = {
            **os.environ,
            **self.environment,
            build.FLAGS_VARIABLE: self.flags,
            "LD_PRELOAD": " ".join(libraries),
        }
        command = [*self.command, sys.executable, "-m", "pytest", "-q", "-rs", *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


ADDRESS = Sanitizer(
    "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all",
    ("libasan.so", "libubsan.so"),
    # The interpreter keeps what it has until it ends.
    {"ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "1"},
)
THREAD = Sanitizer(
    "-O1 -g -fsanitize=thread",
    ("libtsan.so",),
    {
        "TSAN_OPTIONS": f"halt_on_error=1 die_after_fork=0 suppressions={SUPPRESSIONS}",
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "passive",  # calls run in our pool: gcc's is not instrumented
    },
    ("setarch", "-R"),
)


def main() -> int:
    here = {path.name: path for path in PATHS if path.needs <= processor_flags()}
    names = sys.argv[1:] or list(here)
    failed = 0
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        for name in names:
            print(f"{name}: address, undefined", flush=True)
            print(f"{ADDRESS.compile_all(here[name])} of {len(SOURCES)} C files", flush=True)
            failed |= ADDRESS.test(*TESTS, "-k", f"[{name}")
        print(f"{names[0]}: thread", flush=True)
        print(f"{THREAD.compile_all(here[names[0]])} of {len(SOURCES)} C files", flush=True)
        failed |= THREAD.test("tests/base/test_thread_pool.py")
        failed |= THREAD.test(*TESTS, "-k", f"[{names[0]} and ({RACES})")
    return failed


def _library(name: str) -> str:
    found = subprocess.run(
        ["cc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
