"""Whole output of three plans, as text and as JSON, against files that were read and committed.

A change of what a plan says shows there: `LLMOPT_WRITE_GOLDEN=1 pytest` with this file writes them again.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from llmopt.cli.main import main
from llmopt.cli.output.console import stdout

FOLDER = Path(__file__).with_name("golden")
PLANS = {
    "gemma-3-27b-128k": ["gemma-3-27b", "--ctx", "128k", "--gpu", "h100,h200"],
    "llama-70b-on-one-gpu": ["llama-70b", "--ctx", "128k", "--gpu", "h100", "--tp", "1"],
    "qwen3-30b-a3b-under-load": [
        "qwen3-30b-a3b",
        *("--gpu", "h100", "--input-len", "512", "--output-len", "64", "--concurrency", "16"),
    ],
}


@pytest.mark.parametrize("form", ["txt", "json"])
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_says_what_it_said(
    name: str,
    form: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stdout, "_width", 100)
    with pytest.raises(SystemExit) as stop:
        main(["kv-plan", *PLANS[name], *(["--json"] if form == "json" else [])])
    assert stop.value.code == 0
    said, file = capsys.readouterr().out, FOLDER / f"{name}.{form}"
    said = "".join(f"{line.rstrip()}\n" for line in said.splitlines())
    if os.environ.get("LLMOPT_WRITE_GOLDEN"):
        FOLDER.mkdir(exist_ok=True)
        file.write_text(said, encoding="utf-8")
    golden = file.read_text(encoding="utf-8")
    if form == "json" and sys.version_info >= (3, 12):  # whose `sum` rounds once
        assert _same(json.loads(said), json.loads(golden))
    else:
        assert said == golden


def _same(said: Any, golden: Any) -> bool:
    """True if two values of JSON are equal but for the last digits of numbers."""
    if isinstance(golden, dict):
        return [*said] == [*golden] and all(_same(said[key], golden[key]) for key in golden)
    if isinstance(golden, list):
        return len(said) == len(golden) and all(map(_same, said, golden))
    return said == (pytest.approx(golden, rel=1e-9) if isinstance(golden, float) else golden)
