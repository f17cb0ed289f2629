"""Kernel, engine and quantizer tests as other processors: `python -m tools.processor_profiles [generic ...]`.

A setting is a profile of `LLMOPT_CPU`, an instruction path of the C kernels (`LLMOPT_NATIVE`), or
`no-compiler`: a machine without a C compiler on its PATH. CI runs `make test` whole as `native` and `avx2`;
without arguments this runs what is left. A setting that this processor cannot take is named, with the reason.
`--differs avx2` runs nothing: it exits with 0 where the profile leaves out instructions of this processor, so
that the suite as `avx2` is another one than as `native`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from llmopt.base.processor import (
    PATHS,
    PROFILE_VARIABLE,
    PROFILES,
    VARIABLE,
    machine_flags,
)

ROOT = Path(__file__).resolve().parents[1]
NO_COMPILER = "no-compiler"
DEFAULT = ("generic", "avxvnni", NO_COMPILER)
"""No vector instructions, the path of consumer processors, and no compiler."""
COMPILER = re.compile(r"(.+-)?(cc|gcc|g\+\+|c\+\+|clang|clang\+\+|tcc|c89|c99)(-[\d.]+)?")
TESTS = (
    "tests/engine/kernels",
    "tests/engine/execution",
    "tests/engine/cache",
    "tests/engine/sampling",
    "tests/engine/test_equalities.py",
    "tests/engine/test_state_equalities.py",
    "tests/base",
    "tests/quant/base",
    "tests/quant/grids",
    "tests/quant/pipeline/test_reverted_codes.py",
    "tests/quant/pipeline/test_stored_statistics.py",
    "tests/quant/e8p",
    "tests/quant/trellis",
    "tests/quant/gguf",
)
"""The kernels, and what calls them. Triton's interpreter does not depend on the processor."""
OPTIONS = ("-m", "not whole", "-n", "2", "--dist", "loadfile", "--ignore-glob=*/test_triton_*")


def settings(flags: frozenset[str]) -> tuple[dict[str, dict[str, str]], list[str]]:
    """The environment of each setting that these flags allow, and a line on each other setting."""
    # A profile comes before a path of its name, which would keep this machine's default dtype.
    named = {path.name: (path.needs, {VARIABLE: path.name}) for path in PATHS}
    named |= {known.name: (known.flags, {PROFILE_VARIABLE: known.name}) for known in PROFILES}
    arm = {path.name for path in PATHS if "asimd" in path.needs}
    environments = {NO_COMPILER: dict[str, str]()}
    lacking = []
    for name, (needed, environment) in named.items():
        if (name in arm) != ("asimd" in flags):
            continue
        if needed <= flags:
            environments[name] = environment
        else:
            missing = ", ".join(sorted(needed - flags))
            lacking.append(f"{name}: not run, this processor lacks {missing}")
    return environments, lacking


def left_out(name: str, flags: frozenset[str]) -> frozenset[str]:
    """Flags that a processor has, that some profile or path uses, and that this profile does not."""
    used = frozenset[str]().union(*(known.flags for known in PROFILES), *(p.needs for p in PATHS))
    profile_flags = next(known.flags for known in PROFILES if known.name == name)
    return (used & flags) - profile_flags


def path_without_compilers(folders: str, links: Path) -> str:
    """PATH with a folder of links in place of each folder that has a C compiler."""
    kept_folders = []
    for number, folder in enumerate(filter(os.path.isdir, folders.split(os.pathsep))):
        files = sorted(Path(folder).iterdir())
        kept = [file for file in files if not COMPILER.fullmatch(file.name)]
        if len(kept) == len(files):
            kept_folders.append(folder)
            continue
        mirror = links / str(number)
        mirror.mkdir()
        for file in kept:
            (mirror / file.name).symlink_to(file.absolute())
        kept_folders.append(str(mirror))
    return os.pathsep.join(kept_folders)


def run(name: str, changes: dict[str, str]) -> int:
    """Run the tests in an environment; pytest's exit status."""
    environment = os.environ | changes
    with tempfile.TemporaryDirectory() as links:
        if name == NO_COMPILER:
            environment["PATH"] = path_without_compilers(environment["PATH"], Path(links))
            environment.pop("CC", None)
        command = [sys.executable, "-m", "pytest", *OPTIONS, *TESTS]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main() -> int:
    if sys.argv[1:2] == ["--differs"]:
        name = sys.argv[2]
        flags = left_out(name, machine_flags())
        print(f"{name} leaves out: {', '.join(sorted(flags)) or 'nothing that this processor has'}")
        return 0 if flags else 1
    environments, notes = settings(machine_flags())
    chosen = sys.argv[1:] or [name for name in DEFAULT if name in environments]
    if unknown := set(chosen) - environments.keys():
        print(f"{', '.join(sorted(unknown))}: choose of {', '.join(environments)}")
        return 2
    failed = []
    for name in chosen:
        print(f"as {name}", flush=True)
        if run(name, environments[name]):
            failed.append(name)
    for note in notes:
        print(note)
    print(f"ran: {', '.join(chosen)}; failed: {', '.join(failed) or 'none'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
