"""The table of fields in docs/measured/fields.md is that of the models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_table_of_fields_is_the_present_one() -> None:
    command = [sys.executable, str(ROOT / "tools" / "field_table.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
