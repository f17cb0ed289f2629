"""Install the project with every direct dependency at its lower bound: what `make lowest` tests.

    python3 tools/lowest.py build/lowest

torch is that of constraints.txt, and with its CUDA build so is Triton, which that build names. Standard
library only, because it runs before anything is installed.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import install

EXTRAS = "dev,hub,mlflow"
"""Extras of which a test imports a package; `dev` has what `all` and `ct` have."""
BOUND = re.compile(r"([\w-]+)>=([\d.]+)")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python3 tools/lowest.py FOLDER")
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    pins = lowest(install.ROOT / "pyproject.toml", install.CONSTRAINTS, install.cuda_is_welcome())
    install.CONSTRAINTS = folder / "constraints.txt"
    install.CONSTRAINTS.write_text("".join(f"{pin}\n" for pin in pins))
    install.install(folder, EXTRAS)


def lowest(project: Path, constraints: Path, with_cuda: bool) -> Iterator[str]:
    """Pins of the direct dependencies at their lower bounds."""
    kept = ("torch", "triton") if with_cuda else ("torch",)
    for line in constraints.read_text().splitlines():
        if line.partition("==")[0] in kept:
            yield line
    for name, bound in lower_bounds(project).items():
        if name not in kept:
            yield f"{name}=={bound}"


def lower_bounds(project: Path) -> dict[str, str]:
    """The lowest version of every direct dependency, by name; extras included, also those that name others.

    Raises:
        ValueError: one has none.
    """
    table = tomllib.loads(project.read_text())["project"]
    bounds = {}
    for group in (table["dependencies"], *table["optional-dependencies"].values()):
        for requirement in group:
            if requirement.startswith("llmopt["):
                continue
            found = BOUND.match(requirement)
            if found is None:
                raise ValueError(f"{project.name}: {requirement!r} has no lower bound")
            bounds[found[1]] = found[2]
    return bounds


if __name__ == "__main__":
    main()
