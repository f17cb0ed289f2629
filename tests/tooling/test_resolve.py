"""The check of resolutions: sets without one are found, in an index of a few stand-ins and without a network."""

from __future__ import annotations

import os
import re
import zipfile
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from packaging.version import Version

pytest.importorskip("uv")

from tools import resolve
from tools.lowest import lower_bounds, lowest
from tools.neighbours import neighbours, short_reason, table
from tools.resolve import CONSTRAINTS, PROJECT, Machine, Resolver

CUDA = Machine("Linux x86-64", "3.13", "CUDA")
CPU = Machine("Linux x86-64", "3.13", "CPU")
MACOS = Machine("macOS arm64", "3.13", "PyPI's")


def wheel(index: Path, name: str, version: str, *requirements: str) -> None:
    inside = f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requirements]
    with zipfile.ZipFile(index / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{inside}/METADATA", "\n".join([*lines, ""]))
        file.writestr(f"{inside}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        file.writestr(f"{inside}/RECORD", "")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose torch wants one Triton on Linux, and the index it is resolved from."""
    index = tmp_path / "index"
    index.mkdir()
    wheel(index, "torch", "2.13.0", 'triton==3.7.1; sys_platform == "linux"', "numpy")
    for name, versions in (("triton", ("3.6.0", "3.7.1")), ("numpy", ("2.3", "2.4"))):
        for version in versions:
            wheel(index, name, version)
    config = tmp_path / "uv.toml"
    config.write_text(f'no-index = true\nfind-links = ["{index}"]\n')
    monkeypatch.setenv("UV_CONFIG_FILE", str(config))
    monkeypatch.setattr(resolve, "requires", lambda name: ["numpy", "triton==3.7.1", "nvidia-nccl"])
    path = tmp_path / "pyproject.toml"
    path.write_text(
        '[project]\nname = "small"\nversion = "1"\nrequires-python = ">=3.11"\n'
        'dependencies = ["torch>=2.13,<2.14", "numpy>=2.3"]\n[project.optional-dependencies]\n'
        "dev = [\"triton>=3.6; sys_platform == 'linux'\"]\n"
    )
    return path


def resolver(project: Path, *pins: str) -> Resolver:
    constraints = project.parent / "constraints.txt"
    constraints.write_text("".join(f"{pin}\n" for pin in pins))
    return Resolver(project, constraints, project.parent)


def test_a_pin_beside_torchs_own_triton_is_a_fault_where_torch_names_one(project: Path) -> None:
    """A Triton of constraints.txt beside the CUDA build of torch; pip said ResolutionImpossible."""
    found = resolver(project, "torch==2.13.0", "triton==3.6.0")
    fault = found.resolve("pinned", CUDA).fault
    assert "torch==2.13.0" in fault and "triton" in fault
    assert not found.resolve("pinned", MACOS).fault


def test_the_cpu_build_asks_for_no_triton_of_its_own(project: Path) -> None:
    found = resolver(project, "torch==2.13.0", "triton==3.7.1")
    assert str(found.resolve("pinned", CUDA).versions["torch"]) == "2.13.0"
    of_cpu = found.resolve("newest", CPU)
    assert {name: str(version) for name, version in of_cpu.versions.items()} == {
        "torch": "2.13.0+cpu",
        "triton": "3.7.1",
        "numpy": "2.4",
    }


def test_a_lower_bound_that_nothing_takes_is_a_fault(project: Path) -> None:
    found = resolver(project)
    assert not found.resolve("lowest", MACOS).fault
    project.write_text(project.read_text().replace("numpy>=2.3", "numpy>=2.2"))
    assert found.resolve("lowest", MACOS).fault == "numpy>=2.2 is not taken, 2.3 is"


def test_an_upper_bound_of_torch_that_nothing_takes_is_a_fault(project: Path) -> None:
    found = resolver(project)
    project.write_text(project.read_text().replace("<2.14", "<2.15"))
    assert found.resolve("newest", MACOS).fault == "torch<2.15 is allowed, 2.13.0 is taken"


CORE = ("torch>=2.13", "llguidance>=1.9")


def test_the_reason_of_a_neighbour_is_what_both_cannot_share() -> None:
    message = (
        "error: No solution found when resolving dependencies cause: Because server>=2 depends on "
        "llguidance{platform_machine == 'x86_64'}>=1.7.0,<1.8.0 and you require server==2, we can conclude "
        "that you require llguidance>=1.7.0,<1.8.0."
    )
    expected = "needs llguidance>=1.7.0,<1.8.0, llmopt needs llguidance>=1.9"
    assert short_reason(message, CORE) == expected
    assert short_reason("no wheels", CORE) == "no wheels"


def test_neighbours_take_their_newest_version_or_name_the_conflict(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older torch is taken, for a newer version of the neighbour."""
    index = project.parent / "index"
    wheel(index, "torch", "2.12.0", "numpy")
    wheel(index, "tuner", "1.0")
    wheel(index, "tuner", "2.0", "torch<2.13")
    wheel(index, "numpy", "2.2")
    wheel(index, "server", "1.0", "numpy<2.3")
    monkeypatch.setattr("tools.neighbours.NEIGHBOURS", ("tuner", "server"))
    project.write_text(project.read_text().replace("torch>=2.13", "torch>=2.12"))
    tuner, server = neighbours(project, {**os.environ})
    assert (tuner.versions["tuner"], tuner.versions["torch"]) == ("2.0", "2.12.0")
    assert server.reason == "server 1.0: needs numpy<2.3, llmopt needs numpy>=2.3"
    assert table([tuner, server]).splitlines()[2:] == [
        "| tuner | 2.0 | 2.12.0 | - |",
        "| server | no: server 1.0: needs numpy<2.3, llmopt needs numpy>=2.3 | | |",
    ]


def test_every_dependency_has_a_lower_bound_and_torch_an_upper_one() -> None:
    assert {"torch", "fastapi", "uvicorn", "numpy", "lm-eval", "uv"} <= lower_bounds(PROJECT).keys()
    assert '"torch>=2.11,<2.16"' in PROJECT.read_text()


def test_constraints_are_within_the_bounds() -> None:
    bounds = lower_bounds(PROJECT)
    pins = re.findall(r"^([\w.-]+)==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE)
    pinned = {canonicalize_name(name): Version(version) for name, version in pins}
    assert {"torch", "triton", "fastapi"} <= pinned.keys() & bounds.keys()
    assert not [name for name in pinned.keys() & bounds if pinned[name] < Version(bounds[name])]


def test_the_lower_bounds_are_installed_beside_the_pinned_torch() -> None:
    """With the Triton that its CUDA build names, or with the lowest."""
    on_cpu, on_cuda = (set(lowest(PROJECT, CONSTRAINTS, cuda)) for cuda in (False, True))
    assert {"torch==2.13.0", "fastapi==0.132"} <= on_cpu & on_cuda
    assert on_cpu - on_cuda == {"triton==3.6"}
    assert on_cuda - on_cpu == {"triton==3.7.1"}
