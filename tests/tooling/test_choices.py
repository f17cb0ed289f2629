"""Where tools/choices.py keeps what is too large for a record."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from llmopt.quant.models import resolve_model

from tools import choices
from tools.structure import ROOT


def test_the_reference_is_kept_below_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hidden states of a real model are a hundred megabytes, and records lie in docs/measured."""
    kept: list[Path] = []

    def scorer(folder: Path, passage: Any, where: Path) -> None:
        kept.append(where)

    text = ROOT / "recipes" / "data" / "evaluation.txt"
    record = tmp_path / "choices.json"
    words = ["--model", resolve_model("stories260K"), "--text", text, "--calibration", text]
    words += ["--num-tokens", 2048, "--only", "no such row", "--output", record]
    monkeypatch.setattr(choices, "Scorer", scorer)
    monkeypatch.setattr(sys, "argv", ["choices.py", *map(str, words)])
    assert choices.main() == 0
    assert kept == [ROOT / "build" / "references"]
