"""Make the virtual environment and install the project into it: what `make` runs before anything else.

    python3 tools/install.py .venv

Standard library only, because it runs before anything is installed. torch is the reason that this is more
than one pip command: on Linux, PyPI's torch brings gigabytes of CUDA libraries, which a machine without an
NVIDIA driver cannot use. pip is asked what it would install before it downloads anything.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
FOLDERS = ("bench", "cli", "engine", "quant", "recipes")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python3 tools/install.py FOLDER")
    if sys.version_info < (3, 11):  # noqa: UP036 - whoever runs this may have any Python
        sys.exit(f"error: Python 3.11 or newer is needed, this is {sys.version.split()[0]}")
    folder = Path(sys.argv[1]).resolve()
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True, symlinks=True)
    options = torch_options(python)
    command = [python, "-m", "pip", "install", "--quiet", "--constraint", CONSTRAINTS, *options]
    print("installing llmopt and what it needs: a few minutes the first time", flush=True)
    if subprocess.run([*command, "--editable", f"{ROOT}[dev]"]).returncode:
        sys.exit("error: pip could not install the project; its own message stands above")
    link_sources(folder / "links" / "llmopt")


def torch_options(python: Path) -> list[str]:
    """The options that make pip take a torch which suits this machine."""
    release = re.search(r"^torch==\S+$", CONSTRAINTS.read_text(), re.MULTILINE)
    if release is None:
        sys.exit(f"error: {CONSTRAINTS.name} does not pin torch")
    if shutil.which("nvidia-smi"):
        return []
    offered = would_install(python, release[0], [])
    if offered is not None and not brings_cuda(offered):
        return []
    options = ["--extra-index-url", CPU_INDEX]
    offered = would_install(python, release[0], options)
    if offered is not None and not brings_cuda(offered):
        return options
    sys.exit(
        f"error: pip finds no CPU build of {release[0]} here or at {CPU_INDEX}, and this machine has no "
        "NVIDIA driver: make a CPU wheel reachable (PIP_FIND_LINKS=FOLDER) and run again"
    )


def would_install(python: Path, requirement: str, options: list[str]) -> list[str] | None:
    """Names of the packages that pip would add for a requirement; None if it cannot resolve it."""
    command = [python, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-"]
    run = subprocess.run([*command, *options, requirement], capture_output=True, text=True)
    if run.returncode:
        return None
    return [entry["metadata"]["name"] for entry in json.loads(run.stdout)["install"]]


def brings_cuda(names: list[str]) -> bool:
    return any(name.lower().startswith(("nvidia-", "cuda-")) for name in names)


def link_sources(folder: Path) -> None:
    """Lay the source folders out under their installed name, for tools that cannot follow an editable
    install."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in FOLDERS:
        link = folder / name
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(ROOT / name, folder), target_is_directory=True)


if __name__ == "__main__":
    main()
