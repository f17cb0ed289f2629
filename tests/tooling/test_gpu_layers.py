"""The table of a decode layer on a GPU that is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.gpu_layers import table

ROOT = Path(__file__).resolve().parents[2]


def test_what_changed_is_told_with_an_arrow() -> None:
    before = {"A": {"launches": 70.0, "captured": False, "micros": 3.0, "spilled": 0}}
    now = {"A": {"launches": 8.667, "captured": True, "micros": 2.96, "spilled": 0}}
    assert table([before, now]).endswith("| A | 70 → 8.667 | no → yes | 3.0 | 0 |")
    assert table([now]).endswith("| A | 8.667 | yes | 3.0 | 0 |")


@pytest.mark.whole
@pytest.mark.timeout(900)
def test_a_hybrid_takes_twenty_launches_a_layer_and_one_replay(tmp_path: Path) -> None:
    """By the command, in real widths."""
    pytest.importorskip("triton", reason="Triton is for Linux alone")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    run = [sys.executable, "-m", "tools.gpu_layers", "--only", "Qwen3-Next-80B-A3B"]
    done = subprocess.run(run, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    cells = [cell.strip() for cell in done.stdout.splitlines()[-1].split("|")]
    _, name, launches, captured, micros, *_ = cells
    assert (name, captured) == ("Qwen3-Next-80B-A3B", "yes")
    assert 0 < float(launches) <= 20 and float(micros) > 0
