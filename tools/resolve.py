"""Resolve what an install takes on every machine: `python tools/resolve.py`, or `make resolve`.

For Linux on x86-64 and aarch64, with the CUDA and the CPU build of torch, and for macOS on arm64, with each
Python, uv resolves three sets from metadata alone, wheels only: `pinned`, what tools/install.py asks for
within constraints.txt; `newest`, the newest that pyproject.toml allows, torch included; and `lowest`, every
direct dependency at its lower bound, extras included. The exit code is 1 where a set has no resolution,
where a lower bound is not what `lowest` takes, since such a bound was never tested, or where `newest` takes
an older torch than the bound allows.

PyPI's torch for Linux is the CUDA build. The CPU build is stood in for by a wheel of metadata, with the
requirements of the installed torch but CUDA's and Triton: one machine rarely reaches all its wheels.

Then it prints which packages of the field resolve in one environment with llmopt. With `--neighbours` it
resolves these alone, and writes the table into docs/compatibility.md. With `--count` it counts the packages
of an install without llmopt itself: the core and each extra, on Linux x86-64 within constraints.txt.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import requires
from itertools import product
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from uv import find_uv_bin

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools.document_part import write_part
from tools.lowest import lower_bounds
from tools.neighbours import neighbours, table

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ROOT / "pyproject.toml"
CONSTRAINTS = ROOT / "constraints.txt"
PAGE = ROOT / "docs" / "compatibility.md"
PART = "resolve.py --neighbours"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
COUNTED_PYTHON = "3.12"
PLATFORMS = {
    "Linux x86-64": "x86_64-manylinux_2_31",
    "Linux aarch64": "aarch64-manylinux_2_31",
    "macOS arm64": "aarch64-apple-darwin",
}
"""uv's names; llguidance's wheels are for glibc 2.31."""
MACOS = "14.0"
"""The release that torch's wheels are for."""
SETS = ("pinned", "newest", "lowest")
SHOWN = ("torch", "triton", "numpy", "transformers", "fastapi")
NOT_RESOLVED = ("docs", "eval")
"""Extras that are not resolved: a dependency of lm-eval (sqlitedict) is published as source alone, and
`docs` is installed without llmopt (tools/site_packages.py)."""
OF_CUDA = re.compile(r"(cuda|nvidia)-|triton")


@dataclass(frozen=True, slots=True)
class Machine:
    platform: str
    python: str
    build: str


@dataclass(frozen=True, slots=True)
class Resolution:
    """Versions by name; none and a fault where there is no resolution."""

    versions: Mapping[str, Version]
    fault: str = ""


class Resolver:
    """uv on one project.

    Args:
        project: pyproject.toml.
        scratch: folder for the stand-ins.
    """

    def __init__(self, project: Path, constraints: Path, scratch: Path) -> None:
        self._project, self._constraints, self._scratch = project, constraints, scratch
        self._uv = find_uv_bin()
        self._environment = uv_environment()

    def resolve(
        self, wanted: str, machine: Machine, extras: Sequence[str] | None = None
    ) -> Resolution:
        """A set on a machine with PyPI's torch, or with the CPU build of the same release.

        `extras` replaces those of the set.
        """
        if extras is None:
            extras = ["dev"] if wanted == "pinned" else extras_of(self._project)
        on_pypi = self._compile(wanted, machine, extras)
        if machine.build != "CPU" or on_pypi.fault:
            return on_pypi
        release = on_pypi.versions["torch"].base_version
        parts = (wanted, machine.platform, machine.python, *extras[:1])
        folder = self._scratch / "-".join(parts).replace(" ", "-")
        folder.mkdir()
        stand_in(folder, release)
        pin = folder / "cpu.txt"
        pin.write_text(f"torch=={release}+cpu\n")
        return self._compile(wanted, machine, extras, "--find-links", folder, "--constraint", pin)

    def _compile(
        self, wanted: str, machine: Machine, extras: Sequence[str], *more: str | Path
    ) -> Resolution:
        command = [self._uv, "pip", "compile", self._project, "--quiet", "--no-header"]
        command += ["--no-annotate", "--only-binary", ":all:", "--no-python-downloads"]
        command += ["--python", sys.executable, "--python-version", machine.python]
        command += ["--python-platform", PLATFORMS[machine.platform]]
        command += ["--resolution", "lowest-direct" if wanted == "lowest" else "highest"]
        command += [word for extra in extras for word in ("--extra", extra)]
        if wanted == "pinned":
            command += ["--constraint", self._constraints]
        run = subprocess.run(
            [*command, *more], env=self._environment, capture_output=True, text=True
        )
        if run.returncode:
            return Resolution({}, " ".join(run.stderr.split()))
        pins = re.findall(r"^(\S+)==(\S+)$", run.stdout, re.MULTILINE)
        versions: dict[str, Version] = {
            canonicalize_name(name): Version(version) for name, version in pins
        }
        return Resolution(versions, "; ".join(untested(self._project, versions, wanted)))


def extras_of(project: Path) -> list[str]:
    extras = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    return [name for name in extras if name not in NOT_RESOLVED]


def untested(project: Path, versions: Mapping[str, Version], wanted: str) -> Iterator[str]:
    """Lower bounds that the set `lowest` cannot take, because another dependency wants more, and torch's
    upper bound, if `newest` stops below it."""
    if wanted == "newest":
        above = re.search(r'"torch>=[\d.]+,<(\d+)\.(\d+)"', project.read_text())
        if above is not None and versions["torch"].release[:2] != (
            int(above[1]),
            int(above[2]) - 1,
        ):
            yield f"torch<{above[1]}.{above[2]} is allowed, {versions['torch']} is taken"
    if wanted != "lowest":
        return
    for name, bound in lower_bounds(project).items():
        taken = versions.get(name)
        if taken is not None and Version(taken.public) != Version(bound):
            yield f"{name}>={bound} is not taken, {taken} is"


def stand_in(folder: Path, release: str) -> None:
    """A wheel of torch's CPU build without torch in it."""
    lines = [
        f"Requires-Dist: {line}"
        for line in requires("torch") or ()
        if "extra ==" not in line and not OF_CUDA.match(canonicalize_name(Requirement(line).name))
    ]
    inside = f"torch-{release}+cpu.dist-info"
    head = ["Metadata-Version: 2.1", "Name: torch", f"Version: {release}+cpu"]
    with zipfile.ZipFile(folder / f"torch-{release}+cpu-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{inside}/METADATA", "\n".join([*head, *lines, ""]))
        wheel.writestr(f"{inside}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{inside}/RECORD", "")


def uv_environment() -> dict[str, str]:
    """This one, and the index that pip is configured with: uv does not read pip's files."""
    environment = {"MACOSX_DEPLOYMENT_TARGET": MACOS, **os.environ}
    if not {"UV_DEFAULT_INDEX", "UV_INDEX_URL"} & environment.keys():
        command = [sys.executable, "-m", "pip", "config", "list"]
        listing = subprocess.run(command, capture_output=True, text=True).stdout
        found = dict(re.findall(r"^(\S+)\.index-url='(.*)'$", listing, re.MULTILINE))
        if found:
            environment["UV_DEFAULT_INDEX"] = found.get(":env:") or next(iter(found.values()))
    return environment


def machines() -> Iterator[Machine]:
    for platform, python in product(PLATFORMS, PYTHONS):
        for build in ("CUDA", "CPU") if platform.startswith("Linux") else ("PyPI's",):
            yield Machine(platform, python, build)


def count() -> int:
    """Print how many packages an install takes with each extra, and those of the core by name."""
    installs = [(), *((extra,) for extra in extras_of(PROJECT))]
    builds = [Machine("Linux x86-64", COUNTED_PYTHON, build) for build in ("CPU", "CUDA")]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(8) as pool:
        resolver = Resolver(PROJECT, CONSTRAINTS, Path(scratch))
        cells = [("pinned", machine, extras) for extras in installs for machine in builds]
        resolutions = list(pool.map(lambda cell: resolver.resolve(*cell), cells))
    if faults := [resolution.fault for resolution in resolutions if resolution.fault]:
        print(*faults, sep="\n")
        return 1
    packages = [sorted({*resolution.versions} - {"llmopt"}) for resolution in resolutions]
    print(f"{'install':<20} {'CPU':>4} {'CUDA':>5}")
    for extras, cpu, cuda in zip(installs, packages[::2], packages[1::2], strict=True):
        name = f"llmopt[{extras[0]}]" if extras else "llmopt"
        print(f"{name:<20} {len(cpu):>4} {len(cuda):>5}")
    names = f"llmopt, CPU: {', '.join(packages[0])}"
    print(textwrap.fill(names, 100, subsequent_indent="  ", break_on_hyphens=False))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--neighbours", action="store_true", help="write the table of neighbours")
    parser.add_argument("--count", action="store_true", help="count the packages of an install")
    arguments = parser.parse_args()
    if arguments.count:
        return count()
    if arguments.neighbours:
        write_part(PAGE, PART, table(neighbours(PROJECT, uv_environment())))
        return 0
    faults = resolve_sets()
    print(table(neighbours(PROJECT, uv_environment())))
    return 1 if faults else 0


def resolve_sets() -> int:
    """Print every set on every machine, and return the number of faults."""
    cells = list(product(SETS, machines()))
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(8) as pool:
        resolver = Resolver(PROJECT, CONSTRAINTS, Path(scratch))
        found = list(pool.map(lambda cell: resolver.resolve(*cell), cells))
    print(f"{'set':<7} {'platform':<14} {'torch':<7} {'Python':<6}", *(f"{n:<12}" for n in SHOWN))
    for (wanted, machine), resolution in zip(cells, found, strict=True):
        shown = (f"{resolution.versions.get(name, '-')!s:<12}" for name in SHOWN)
        print(
            f"{wanted:<7} {machine.platform:<14} {machine.build:<7} {machine.python:<6}",
            *((f"FAULT: {resolution.fault}",) if resolution.fault else shown),
        )
    faults = sum(bool(resolution.fault) for resolution in found)
    print(f"{len(found)} resolutions, {faults} with faults\n")
    return faults


if __name__ == "__main__":
    sys.exit(main())
