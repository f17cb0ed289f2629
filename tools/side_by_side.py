"""Install a checkout into an environment of its own, beside others that share its dependencies.

    python3 tools/side_by_side.py CHECKOUT ENVIRONMENT

The dependencies lie in `dependencies-<hash>` beside the environment, where the hash is that of the checkout's
constraints.txt and pyproject.toml: two checkouts that want the same share one installation, and a change of
a dependency is measured as what it is. The environment itself holds only llmopt. Standard library only,
because it runs before anything is installed.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import install

PINS = ("constraints.txt", "pyproject.toml")


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: python3 tools/side_by_side.py CHECKOUT ENVIRONMENT")
    checkout, environment = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    missing = [name for name in PINS if not (checkout / name).is_file()]
    if missing:
        sys.exit(f"error: {checkout} is no checkout of llmopt: it has no {missing[0]}")
    shared = environment.parent / f"dependencies-{pins_hash(checkout)}"
    if not (shared / "complete").exists():
        install_dependencies(checkout, shared)
    install_checkout(checkout, environment, shared)


def pins_hash(checkout: Path) -> str:
    """What the dependencies of a checkout are known by."""
    digest = hashlib.sha256()
    for name in PINS:
        digest.update((checkout / name).read_bytes())
    return digest.hexdigest()[:12]


def install_dependencies(checkout: Path, folder: Path) -> None:
    """An environment with all that the checkout needs, without the checkout."""
    print(
        f"installing the dependencies of {checkout.name}: minutes, where pip has no cache",
        flush=True,
    )
    venv.create(folder, with_pip=True, symlinks=True, clear=True)
    python = folder / "bin" / "python"
    install.CONSTRAINTS = checkout / "constraints.txt"
    if not install.cuda_is_welcome():
        install.install_cpu_torch(python)
    project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    if reason := install.pip_install(python, *wanted):
        sys.exit(f"error: pip could not install the dependencies: {reason}")
    (folder / "complete").touch()


def install_checkout(checkout: Path, environment: Path, shared: Path) -> None:
    """llmopt alone in an environment whose path continues in the shared one."""
    venv.create(environment, with_pip=False, symlinks=True, clear=True)
    (site_packages(environment) / "dependencies.pth").write_text(f"{site_packages(shared)}\n")
    command = [shared / "bin" / "python", "-m", "pip", "--python", environment / "bin" / "python"]
    arguments = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", checkout]
    if subprocess.run([*command, *arguments]).returncode:
        sys.exit(f"error: pip could not install {checkout}")


def site_packages(environment: Path) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return environment / "lib" / version / "site-packages"


if __name__ == "__main__":
    main()
