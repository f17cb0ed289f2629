"""Runs as CSV for Apache Otava: what its importer needs, and which runs have no row."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from llmopt.base.errors import BadInput
from llmopt.bench.report.otava import write_otava
from llmopt.cli.main import main

from tests.support.run_results import IDENTITY, result_of, write_results

PAGE = Path(__file__).parents[3] / "docs" / "commands" / "report.md"
RESULTS = Path(__file__).parents[1] / "record" / "results"


def rows_of(tmp_path: Path, *results: Mapping[str, Any]) -> tuple[list[dict[str, str]], list[str]]:
    """Rows of the table of these results, and the notes on runs that are not in it."""
    notes = write_otava(tmp_path / "runs.csv", write_results(tmp_path / "runs", results))
    with (tmp_path / "runs.csv").open(newline="") as file:
        return [*csv.DictReader(file)], notes


def test_a_row_a_run_in_the_order_of_time(tmp_path: Path) -> None:
    rows, notes = rows_of(tmp_path, result_of(5, 4.0), result_of(30, 3.0), result_of(1, 2.0))
    assert notes == [] and [row["commit"] for row in rows] == ["c001", "c005", "c030"]
    assert [row["time"] for row in rows][::2] == ["2026-01-01T01:00:00", "2026-01-02T06:00:00"]
    assert [float(row["median_tpot_ms"]) for row in rows] == pytest.approx([2.0, 4.0, 3.0])
    assert [float(row["output_throughput"]) for row in rows] == pytest.approx([500, 250, 1000 / 3])
    assert {(row["perplexity"], row["weight_bytes"]) for row in rows} == {("4.0", "1000.0")}


def test_the_configuration_of_the_docs_names_columns(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0]
    test = yaml.safe_load(text)["tests"]["nightly"]
    (row, _), _ = rows_of(tmp_path, result_of(1, 2.0), result_of(2, 2.0))
    assert row.keys() >= {test["time_column"], *test["attributes"], *test["metrics"]}
    assert all(float(row[name]) > 0 for name in test["metrics"])


def test_a_metric_that_a_run_lacks_has_no_column(tmp_path: Path) -> None:
    """Otava stops at an empty cell."""
    unscored = result_of(2, 2.0)
    unscored["llmopt"]["quality"] = None
    rows, _ = rows_of(tmp_path, result_of(1, 2.0), unscored)
    assert "perplexity" not in rows[0] and all(value for row in rows for value in row.values())


def test_disturbed_passes_and_runs_do_not_count(tmp_path: Path) -> None:
    partly = result_of(1, 2.0)
    busy = {**partly["llmopt"]["runs"][0], "median_tpot_ms": 9.0, "other_load": 0.9}
    partly["llmopt"]["runs"] = [*partly["llmopt"]["runs"], busy]
    failed, loaded = result_of(2, 2.0, failed=3), result_of(3, 2.0, other_load=0.5)
    rows, notes = rows_of(tmp_path, partly, failed, loaded, result_of(4, 2.0, other_load=None))
    assert [row["commit"] for row in rows] == ["c001", "c004"]
    assert float(rows[0]["median_tpot_ms"]) == pytest.approx(2.0)
    assert "run-0001 was left out: 3 of its requests failed" in notes[0]
    assert "run-0002 was left out: other processes used more than 25%" in notes[1]
    with pytest.raises(BadInput, match=r"no run to export: .*3 of its requests failed"):
        write_otava(tmp_path / "none.csv", [tmp_path / "runs" / "run-0001"])
    assert not (tmp_path / "none.csv").exists()


@pytest.mark.parametrize(
    "key",
    ["model", "quantization", "workload_sha256", "machine", "device", "engine", "hardware"],
)
def test_runs_of_two_series_are_refused(key: str, tmp_path: Path) -> None:
    other = {"other": "0x2"} if key in ("hardware", "engine") else "other"
    changed = result_of(2, 2.0, identity={**IDENTITY, key: other})
    with pytest.raises(BadInput, match=rf"run-0000 and .*run-0001 differ in {key}: export each"):
        rows_of(tmp_path, result_of(1, 2.0), changed)


def test_new_weights_a_new_server_and_another_folder_are_the_same_series(tmp_path: Path) -> None:
    same = {**IDENTITY, "model_hash": "sha256:2", "server": {"version": "0.30"}}
    moved = {**IDENTITY, "model": "/a/checkout/stories3M"}
    results = (result_of(1, 2.0), result_of(2, 2.0, identity=same))
    rows, _ = rows_of(tmp_path, *results, result_of(3, 2.0, identity=moved))
    assert len(rows) == 3


def test_a_result_without_a_date_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"base\.jsonl does not say when it was measured"):
        write_otava(tmp_path / "runs.csv", [RESULTS / "sglang/base.jsonl"])
    assert write_otava(tmp_path / "runs.csv", [RESULTS / "llama-bench/base.json"]) == []
    assert (tmp_path / "runs.csv").read_text().splitlines()[1].startswith("2025-04-24T11:58:50,")


def test_the_command_writes_the_table_and_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = write_results(tmp_path / "runs", [result_of(1, 2.0), result_of(2, 2.0, failed=1)])
    with pytest.raises(SystemExit) as stop:
        main(["report", *map(str, runs), "--otava", "runs.csv"])
    assert stop.value.code == 0
    assert "run-0001 was left out" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "runs.csv"}
