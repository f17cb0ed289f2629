"""Kernel, engine and quantizer tests by instruction level: `python -m tools.instruction_levels [avx2 ...]`.

A level is forced on the C kernels and on torch's operations, which compute in float32 below AVX-512.
`no-compiler` is a machine on whose PATH there is none. Without arguments: each level that this processor has,
but not the one that it takes by itself, which `make test` runs. What was not run is named.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from llmopt.quant.base.processor import PATHS, VARIABLE, InstructionPath, processor_flags

ROOT = Path(__file__).resolve().parents[1]
NO_COMPILER = "no-compiler"
TORCH_LEVELS = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avxvnni": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2_VNNI"},
    "avx512vnni": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
}
"""Environment of torch at the levels of x86; on aarch64 it has no such variables."""
COMPILER = re.compile(r"(.+-)?(cc|gcc|g\+\+|c\+\+|clang|clang\+\+|tcc|c89|c99)(-[\d.]+)?")
# What depends on the level: the kernels, and what joins them. Triton's interpreter does not.
TESTS = (
    "tests/engine/kernels",
    "tests/engine/execution",
    "tests/engine/cache",
    "tests/engine/sampling",
    "tests/engine/test_equalities.py",
    "tests/engine/test_state_equalities.py",
    "tests/quant/base",
    "tests/quant/grids",
    "tests/quant/pipeline/test_reverted_codes.py",
    "tests/quant/pipeline/test_stored_statistics.py",
    "tests/quant/e8p",
    "tests/quant/trellis",
    "tests/quant/gguf",
)
OPTIONS = ("-m", "not alone", "-n", "2", "--dist", "loadfile", "--ignore-glob=*/test_triton_*")


def levels(flags: frozenset[str]) -> tuple[list[str], list[str]]:
    """Names of the levels that a processor with these flags has, its own first; lines on those it lacks."""
    is_arm = "asimd" in flags
    family = [path for path in PATHS if ("asimd" in path.needs) == is_arm]
    here = [path for path in family if path.needs <= flags]
    lacking = [
        f"{path.name}: not run, this processor lacks {', '.join(sorted(path.needs - flags))}"
        for path in family
        if path not in here
    ]
    return [path.name for path in here], [*lacking, *map(_without, here[:1], [flags])]


def _without(own: InstructionPath, flags: frozenset[str]) -> str:
    missing = [flag for flag, _ in own.extras if flag not in flags]
    lacks = f", without {', '.join(missing)}" if missing else ""
    return f"{own.name}: this processor's own, which `make test` runs{lacks}"


def path_without_compilers(folders: str, links: Path) -> str:
    """PATH with a folder of links in place of each one that has a C compiler."""
    found = []
    for number, folder in enumerate(filter(os.path.isdir, folders.split(os.pathsep))):
        files = sorted(Path(folder).iterdir())
        kept = [file for file in files if not COMPILER.fullmatch(file.name)]
        if len(kept) == len(files):
            found.append(folder)
            continue
        mirror = links / str(number)
        mirror.mkdir()
        for file in kept:
            (mirror / file.name).symlink_to(file.absolute())
        found.append(str(mirror))
    return os.pathsep.join(found)


def run(level: str) -> int:
    """Run the tests at a level; pytest's exit status."""
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory() as links:
        if level == NO_COMPILER:
            environment["PATH"] = path_without_compilers(environment["PATH"], Path(links))
            environment.pop("CC", None)
        else:
            environment |= {VARIABLE: level, **TORCH_LEVELS.get(level, {})}
        command = [sys.executable, "-m", "pytest", *OPTIONS, *TESTS]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main() -> int:
    here, notes = levels(processor_flags())
    chosen = sys.argv[1:] or [*here[1:], NO_COMPILER]
    if unknown := set(chosen) - {*here, NO_COMPILER}:
        print(f"{', '.join(sorted(unknown))}: choose of {', '.join([*here, NO_COMPILER])}")
        return 2
    failed = []
    for level in chosen:
        print(f"instruction level {level}", flush=True)
        if run(level):
            failed.append(level)
    for note in notes:
        print(note)
    print(f"ran: {', '.join(chosen)}; failed: {', '.join(failed) or 'none'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
