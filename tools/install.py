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
PACKAGES = {"CPU": 103, "CUDA": 121}
"""Packages that an install for developers takes, by build of torch: `python tools/resolve.py --count`."""
NAMED = re.compile(r"(?:Collecting|Requirement already satisfied:) ([\w.-]+)|Processing \S*/(\w+)-")
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
    count = PACKAGES["CUDA" if cuda_is_welcome() else "CPU"]
    build = "" if cuda_is_welcome() else " with the CPU build of torch"
    print(
        f"installing llmopt and about {count} packages{build} from the index that pip is configured with; "
        "what pip has in its cache is not fetched again",
        flush=True,
    )
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
    """None if pip installed it, within the constraints; else the last line of pip's errors."""
    command = [python, "-m", "pip", "install", "--progress-bar", "off", "--constraint", CONSTRAINTS]
    with subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pip:
        assert pip.stdout is not None
        lines = [FETCHED.read(line.strip()) for line in pip.stdout]
    if pip.returncode == 0:
        return None
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["it prints nothing"])[-1].removeprefix("ERROR: ")


class Fetched:
    """Packages that pip has resolved so far, and the bytes that it fetches for them, shown as a bar."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.megabytes = 0.0

    def read(self, line: str) -> str:
        """Take a line of pip's output into account, and return it."""
        if found := NAMED.match(line):
            name = (found[1] or found[2]).lower().replace("_", "-")
            if name not in self.names:
                self.names.add(name)
                self._show(name, is_milestone=len(self.names) % 20 == 0)
        elif found := re.match(r"Downloading (\S+) \(([\d.]+) ([kMG]B)\)", line):
            megabytes = float(found[2]) * {"kB": 1e-3, "MB": 1, "GB": 1e3}[found[3]]
            self.megabytes += megabytes
            self._show(found[1].partition("-")[0], is_milestone=megabytes >= 10)
        return line

    def _show(self, name: str, *, is_milestone: bool) -> None:
        """Redraw the bar on a terminal; in a log, a line for each milestone."""
        if sys.stdout.isatty():
            print(f"{self.bar} {name[:24]:<24}", end="\r", flush=True)
        elif is_milestone:
            print(f"{self.bar} {name}", flush=True)

    @property
    def bar(self) -> str:
        most = PACKAGES["CUDA" if cuda_is_welcome() else "CPU"]
        done = min(len(self.names) / most, 1.0)
        count = f"{len(self.names)} of about {most} packages, {self.megabytes:,.0f} MB"
        return f"[{'#' * round(20 * done):<20}] {count}"


FETCHED = Fetched()


def link_sources(folder: Path) -> None:
    """Lay the sources out under their installed name, for tools that cannot follow an editable install."""
    folder.mkdir(parents=True, exist_ok=True)
    for source in (*(ROOT / PACKAGE).glob("*.py"), *(ROOT / name for name in FOLDERS)):
        link = folder / source.name
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(source, folder), target_is_directory=source.is_dir())


if __name__ == "__main__":
    main()
