"""The C kernels' tests with gcc's sanitizers compiled in: `python tools/check_native.py [avx2 ...]`.

Reads and writes outside of what a call was given, and arithmetic that C does not define, stop the run. A
path at a time, since compiling with sanitizers takes tens of seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from llmopt.quant.native.build import FLAGS_VARIABLE
from llmopt.quant.native.processor import PATHS, processor_flags

ROOT = Path(__file__).resolve().parents[1]
FLAGS = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all"
TESTS = [
    *(
        f"tests/engine/kernels/test_native_{part}.py"
        for part in ("linear", "lookup", "attention", "layer", "experts", "argmax")
    ),
    "tests/engine/kernels/test_trellis_linear.py",
    "tests/quant/trellis/test_viterbi.py",
]


def main() -> int:
    here = [path.name for path in PATHS if path.needs <= processor_flags()]
    names = sys.argv[1:] or here
    libraries = [_library(name) for name in ("libasan.so", "libubsan.so")]
    failed = 0
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            **os.environ,
            FLAGS_VARIABLE: FLAGS,
            "LD_PRELOAD": " ".join(libraries),
            "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter keeps what it has until it ends
            "XDG_CACHE_HOME": cache,
            "OMP_NUM_THREADS": "1",
        }
        for name in names:
            print(f"{name}:", flush=True)
            command = [sys.executable, "-m", "pytest", *TESTS, "-k", f"[{name}"]
            failed |= subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
            libraries_made = list(Path(cache).glob("llmopt/native/*.so"))
            print(f"{len(libraries_made)} libraries with sanitizers so far", flush=True)
    return failed


def _library(name: str) -> str:
    found = subprocess.run(
        ["cc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
