"""Which torch the installer asks pip for: never one with CUDA libraries where there is no driver."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "install.py"


@pytest.fixture
def installer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("installer", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pip_that(asked: list[tuple[str, ...]], *answers: str | None) -> Callable[..., str | None]:
    left = list(answers)

    def pip_install(python: Path, *arguments: str) -> str | None:
        asked.append(arguments)
        return left.pop(0)

    return pip_install


def test_the_cpu_build_is_asked_for_by_name(
    installer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(installer, "pip_install", pip_that(asked, None))
    installer.install_cpu_torch(Path("python"))
    assert asked == [("torch==2.13.0+cpu",)]


def test_the_public_cpu_index_is_asked_next(
    installer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(installer, "pip_install", pip_that(asked, "none found", None))
    installer.install_cpu_torch(Path("python"))
    assert asked[1][:2] == ("--extra-index-url", installer.CPU_INDEX)
    assert asked[1][-1] == "torch==2.13.0+cpu"


def test_without_a_cpu_build_it_stops_with_one_line(
    installer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installer, "pip_install", pip_that([], "none found", "no network"))
    with pytest.raises(SystemExit, match=r"no torch==2\.13\.0\+cpu.*PIP_FIND_LINKS") as stop:
        installer.install_cpu_torch(Path("python"))
    assert "\n" not in str(stop.value)


@pytest.mark.parametrize(
    ("system", "driver", "welcome"),
    [("Linux", None, False), ("Linux", "nvidia-smi", True), ("Darwin", None, True)],
)
def test_cuda_is_welcome_where_it_runs_or_does_not_exist(
    installer: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    system: str,
    driver: str | None,
    welcome: bool,
) -> None:
    monkeypatch.setattr(installer.platform, "system", lambda: system)
    monkeypatch.setattr(installer.shutil, "which", lambda name: driver)
    assert installer.cuda_is_welcome() is welcome


def test_a_torch_that_is_there_is_kept(installer: ModuleType) -> None:
    assert installer.has_torch(Path(sys.executable))


def test_pip_says_why_not_in_one_line(
    installer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip's own resolution, from an empty index."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    nothing = ("--no-index", "--find-links", str(SCRIPT.parent), "no-such-distribution-of-ours")
    reason = installer.pip_install(Path(sys.executable), *nothing)
    assert reason == "No matching distribution found for no-such-distribution-of-ours"


def test_the_bar_says_how_much_is_fetched(
    installer: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installer, "cuda_is_welcome", lambda: False)
    fetched = installer.Fetched()
    for line in (
        "Requirement already satisfied: torch==2.13.0+cpu in somewhere",
        "Collecting numpy (from llmopt)",
        "Downloading numpy-2.4.0-cp312.whl (16.5 MB)",
        "Collecting numpy>=2 (from scipy)",
        "Processing folder/typing_extensions-4.1-py3-none-any.whl",
        "Downloading six-1.17.0-py2.py3-none-any.whl.metadata (1.7 kB)",
    ):
        assert fetched.read(line) == line
    assert (len(fetched.names), round(fetched.megabytes, 1)) == (3, 16.5)
    (shown,) = capsys.readouterr().out.splitlines()
    assert shown.startswith("[") and shown.endswith("2 of about 103 packages, 16 MB numpy")


def test_the_number_of_packages_is_that_of_the_documents(installer: ModuleType) -> None:
    page = (SCRIPT.parents[1] / "docs" / "compatibility.md").read_text(encoding="utf-8")
    row = next(line.split() for line in page.splitlines() if line.startswith("llmopt[dev]"))
    assert [int(cell) for cell in row[1:]] == list(installer.PACKAGES.values())
