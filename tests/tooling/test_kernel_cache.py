"""Kernels made on a machine without a GPU, in a process of their own; another one then compiles nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCHES = """
import json, torch
from llmopt.engine.kernels.elementwise.triton_rows import TritonGate, TritonNorm
from tools.kernel_cache import making
with making(90) as made:
    x = torch.zeros(4, 256, dtype=torch.bfloat16)
    TritonNorm(x[0], 1e-5)(x, x)
    TritonGate("silu")(x, x)
print(json.dumps(made))
"""


def test_a_fresh_process_compiles_nothing_that_was_made_ahead(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is for Linux alone")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    for name in ("TRITON_INTERPRET", "LLMOPT_TRITON"):
        environment.pop(name, None)
    run = [sys.executable, "-c", LAUNCHES]
    for had in ("false", "true"):
        done = subprocess.run(run, capture_output=True, text=True, env=environment, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == f'[["_norm", {had}], ["_gate", {had}]]'


@pytest.mark.whole
@pytest.mark.timeout(900)
def test_the_contacts_kernels_are_made_ahead(tmp_path: Path) -> None:
    """A stage in small shapes, twice: the second process finds each of its kernels."""
    pytest.importorskip("triton", reason="Triton is for Linux alone")
    run = [sys.executable, "-m", "tools.kernel_cache", str(tmp_path), "--small", "--stage"]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    for new in (True, False):
        done = subprocess.run(
            [*run, "machine", "experts"], capture_output=True, text=True, env=environment, cwd=ROOT
        )
        assert done.returncode == 0 and "experts, " not in done.stderr, done.stderr
        lines = dict(line.split(": ") for line in done.stdout.splitlines())
        assert lines["machine"] == f"1 kernels, {int(new)} new"
        assert lines["experts"].endswith(" 0 new") == (not new)
