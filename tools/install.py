"""Make the virtual environment and install the project into it: what `make` runs before anything else.

    python3 tools/install.py .venv

Standard library only, because it runs before anything is installed. torch is the reason that this is more
than one pip command: on Linux, PyPI's torch brings gigabytes of CUDA libraries. So, on a machine without an
NVIDIA driver, the CPU build is asked for by its own name, which no CUDA build answers to. (Asking pip what
it would install does not help: its dry run downloads the wheels that publish no metadata.)
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
FOLDERS = ("base", "bench", "cli", "engine", "quant", "recipes")
PACKAGE = "package"
"""The folder whose files are those of `llmopt` itself."""


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python3 tools/install.py FOLDER")
    if sys.version_info < (3, 11):  # noqa: UP036 - whoever runs this may have any Python
        sys.exit(f"error: Python 3.11 or newer is needed, this is {sys.version.split()[0]}")
    install(Path(sys.argv[1]).resolve())


def install(folder: Path, extras: str = "dev") -> None:
    """The project, editable, in an environment in the folder."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True, symlinks=True)
    print("installing llmopt and what it needs: a few minutes the first time", flush=True)
    if not cuda_is_welcome() and not has_torch(python):
        install_cpu_torch(python)
    if reason := pip_install(python, "--editable", f"{ROOT}[{extras}]"):
        sys.exit(f"error: pip could not install the project: {reason}")
    link_sources(folder / "links" / "llmopt")


def cuda_is_welcome() -> bool:
    """True where PyPI's torch is the right one: with an NVIDIA driver, and off Linux, where it has no
    CUDA in it."""
    return platform.system() != "Linux" or shutil.which("nvidia-smi") is not None


def has_torch(python: Path) -> bool:
    """Whether the environment holds a torch already: then it is kept, whichever build it is."""
    probe = "import importlib.metadata as m; m.version('torch')"
    return subprocess.run([python, "-c", probe], capture_output=True).returncode == 0


def install_cpu_torch(python: Path) -> None:
    """The CPU build of the pinned release, from what pip is configured with or from PyTorch's own index."""
    release = re.search(r"^torch==[^\s+]+", CONSTRAINTS.read_text(), re.MULTILINE)
    if release is None:
        sys.exit(f"error: {CONSTRAINTS.name} does not pin torch")
    build = f"{release[0]}+cpu"
    for options in ((), ("--extra-index-url", CPU_INDEX, "--retries", "1")):
        if pip_install(python, *options, build) is None:
            return
    sys.exit(
        f"error: pip found no {build}, neither where it looks nor at {CPU_INDEX}: make the wheel "
        f"reachable (PIP_FIND_LINKS=FOLDER) or install a torch with {python}, and run again"
    )


def pip_install(python: Path, *arguments: str) -> str | None:
    """None if pip installed it, within the constraints; else the last line of what pip says."""
    command = [python, "-m", "pip", "install", "--quiet", "--constraint", CONSTRAINTS, *arguments]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode == 0:
        return None
    said = [line for line in run.stderr.splitlines() if line.startswith("ERROR")]
    return (said or run.stderr.splitlines() or ["it says nothing"])[-1].removeprefix("ERROR: ")


def link_sources(folder: Path) -> None:
    """Lay the sources out under their installed name, for tools that cannot follow an editable install."""
    folder.mkdir(parents=True, exist_ok=True)
    for source in (*(ROOT / PACKAGE).glob("*.py"), *(ROOT / name for name in FOLDERS)):
        link = folder / source.name
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(source, folder), target_is_directory=source.is_dir())


if __name__ == "__main__":
    main()
