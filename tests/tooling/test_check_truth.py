"""The record of what loaders do with checkpoints of other tools, and what `check` said of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from tools.check_truth.cases import CASES
from tools.check_truth.table import Row, likeness, parts, rows_of
from tools.document_part import part_of

MEASURED = Path(__file__).resolve().parents[2] / "docs" / "measured"
RECORD = json.loads((MEASURED / "check.json").read_text(encoding="utf-8"))


def test_the_page_is_that_of_the_record() -> None:
    for name, text in parts(RECORD).items():
        assert part_of(MEASURED / "check.md", f"check_truth {name}") == text, name


def test_no_checkpoint_is_said_to_load_that_does_not() -> None:
    rows = rows_of(RECORD)
    assert len({row.checkpoint for row in rows}) >= 40
    verdicts = Counter(row.verdict for row in rows)
    assert verdicts['wrong "loads"'] == 0
    assert verdicts["unknown"] <= 2


def test_each_checkpoint_is_a_case_of_its_own() -> None:
    folders = [case.folder for case in CASES]
    assert len(folders) == len({*folders})
    assert {row.checkpoint for row in rows_of(RECORD)} <= {*folders}


def test_a_loader_with_other_values_has_not_loaded() -> None:
    row = Row("name", "transformers", "", 0.2, "loads", "", is_other=True)
    assert not row.loads and row.verdict == 'wrong "loads"'
    assert Row("name", "vllm", "no kernel", None, "does not", "").verdict == "right"
    assert Row("name", "vllm", "", 1.0, "unknown", "").verdict == "unknown"


def test_likeness_is_the_correlation_at_each_position() -> None:
    plain = [[{"1": 0.0, "2": 1.0, "3": 2.0}]]
    assert likeness({"logprobs": [[{"1": 1.0, "2": 3.0, "3": 5.0}]]}, plain) == 1.0
    assert likeness({"error": "refused"}, plain) is None
