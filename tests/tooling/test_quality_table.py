"""Rows that the bundled model's table keeps of an earlier run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tools.quality_table import Row, kept_rows

RECORD = {"model": "m", "token_sha256": "t", "calibration_samples": 4, "original_perplexity": 3.5}
ROWS = [Row(method, "int4", 4, 4.1, 4.0, 0.1, 0.8, 1.0) for method in ("rtn", "awq", "hqq")]


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({}, ["awq", "hqq"]),
        ({"original_perplexity": 3.500001}, ["awq", "hqq"]),
        ({"original_perplexity": 3.6}, []),
        ({"token_sha256": "u"}, []),
    ],
)
def test_rows_of_other_methods_stay_on_the_same_tokens(
    tmp_path: Path, change: dict[str, Any], kept: list[str]
) -> None:
    path = tmp_path / "table.json"
    assert kept_rows(RECORD, path, ["rtn"]) == []
    path.write_text(json.dumps({**RECORD, **change, "rows": [asdict(row) for row in ROWS]}))
    assert [row.method for row in kept_rows(RECORD, path, ["rtn"])] == kept
