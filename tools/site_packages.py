"""Make the environment of `make docs`: `python3 tools/site_packages.py FOLDER`.

It has the packages of the extra `docs` of pyproject.toml, and neither llmopt nor torch.
Standard library only.
"""

from __future__ import annotations

import sys
import tomllib
import venv
from pathlib import Path

import install

PROJECT = install.ROOT / "pyproject.toml"


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python3 tools/site_packages.py FOLDER")
    folder = Path(sys.argv[1]).resolve()
    venv.create(folder, clear=True, with_pip=True, symlinks=True)
    packages = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]["docs"]
    if reason := install.pip_install(folder / "bin" / "python", *packages):
        sys.exit(f"error: pip could not install the packages of the site: {reason}")


if __name__ == "__main__":
    main()
