"""Variables that the Makefile gives to the commands that it runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINKS = ROOT / "build" / "links"


def given(target: str, **environment: str) -> str:
    """PYTHONPATH and OMP_NUM_THREADS as a command of a target sees them; nothing of it is run."""
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    show = "PYTHON=sh -c 'echo \"<$$PYTHONPATH> <$$OMP_NUM_THREADS>\"'"
    unset = {"PYTHONPATH", "OMP_NUM_THREADS", "MAKEFLAGS", "MAKELEVEL"}
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    made = subprocess.run(
        ["make", "--silent", "-o", str(LINKS / "llmopt"), show, target],
        cwd=ROOT, env=inherited | environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return made.stdout.strip()


def test_packages_beside_the_checkout_are_seen() -> None:
    assert given("gpu-doctor") == f"<{LINKS}> <>"
    assert given("gpu-doctor", PYTHONPATH="/opt/torch:/opt/x") == f"<{LINKS}:/opt/torch:/opt/x> <>"


def test_threads_are_the_machines() -> None:
    assert given("gpu-doctor").endswith("<>")
    assert given("gpu-doctor", OMP_NUM_THREADS="12").endswith("<12>")
