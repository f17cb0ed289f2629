"""The soak of the server, short; its half hour is `python -m tools.soak`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.whole
def test_a_short_soak_leaves_nothing_behind(tmp_path: Path) -> None:
    output = tmp_path / "soak.json"
    command = [sys.executable, "-m", "tools.soak", "--seconds", "5", "--clients", "24"]
    command += ["--fault-every", "0", "--return-within", "60", "--output", str(output)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=110,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text())
    assert len(found["checks"]) == 12 and all(found["checks"].values())
    assert found["outcomes"]["answered"] and found["samples"]
