"""The store of a history: writers beside each other, a killed writer, files that are none of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from llmopt.bench.record import result
from llmopt.bench.studies import history_runs
from llmopt.bench.studies.history_runs import HistoryRun
from llmopt.quant.base.errors import BadInput

from tests.support.history_runs import IDENTITY, result_of


def run_of(number: int, tpot: float = 2.0, **options) -> HistoryRun:
    return HistoryRun.of_result(result_of(number, tpot, **options))


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = run_of(3)
    assert history_runs.add_runs(tmp_path / "a" / "history", [run]) == [run]
    assert history_runs.read_runs(tmp_path / "a" / "history") == [run]
    assert run.values["median_tpot_ms"] == pytest.approx(2.0)
    assert (run.values["perplexity"], run.values["weight_bytes"]) == (4.0, 1000.0)
    assert (run.commit, run.set_aside, "kl" in run.values) == ("c003", None, False)


def test_runs_are_in_the_order_of_their_dates(tmp_path: Path) -> None:
    history_runs.add_runs(tmp_path, [run_of(5), run_of(30), run_of(1)])
    history_runs.add_runs(tmp_path, [run_of(3)])
    assert [run.name for run in history_runs.read_runs(tmp_path)] == [
        "run 1",
        "run 3",
        "run 5",
        "run 30",
    ]


def test_a_run_is_added_once(tmp_path: Path) -> None:
    history_runs.add_runs(tmp_path, [run_of(1)])
    assert [
        run.name for run in history_runs.add_runs(tmp_path, [run_of(1), run_of(2), run_of(2)])
    ] == ["run 2"]
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(BadInput, match=r"holds run .* for commit c001: remove it"):
        history_runs.add_runs(tmp_path, [run_of(3), run_of(1, commit="other")])
    assert len(list(tmp_path.iterdir())) == 2, "nothing was half-added"


def add_many(folder: Path, first: int) -> None:
    for number in range(first, first + 25):
        history_runs.add_runs(folder, [run_of(number)])


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=add_many, args=(tmp_path, first)) for first in (0, 15)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert [run.name for run in history_runs.read_runs(tmp_path)] == [f"run {i}" for i in range(40)]


def killed_while_writing(folder: Path) -> None:
    def kill(path: Path) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    result.flush = kill
    history_runs.add_runs(folder, [run_of(2)])


def test_a_killed_writer_leaves_a_history_that_reads(tmp_path: Path) -> None:
    history_runs.add_runs(tmp_path, [run_of(1)])
    writer = multiprocessing.get_context("fork").Process(
        target=killed_while_writing, args=(tmp_path,)
    )
    writer.start()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2, "the partial file was there when it died"
    assert [run.name for run in history_runs.read_runs(tmp_path)] == ["run 1"]
    history_runs.add_runs(tmp_path, [run_of(2)])
    assert [run.name for run in history_runs.read_runs(tmp_path)] == ["run 1", "run 2"]


def test_what_is_no_history_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no folder with a history"):
        history_runs.read_runs(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadInput, match="file is a file"):
        history_runs.add_runs(tmp_path / "file", [run_of(1)])
    (tmp_path / "x.parquet").write_bytes(b"PAR1 cut")
    with pytest.raises(BadInput, match=r"x\.parquet is damaged"):
        history_runs.read_runs(tmp_path)
    pq.write_table(pa.table({"a": [1]}), tmp_path / "x.parquet")
    with pytest.raises(BadInput, match=r"x\.parquet is no run of a history"):
        history_runs.read_runs(tmp_path)


def test_machines_models_and_workloads_are_series_of_their_own() -> None:
    base = run_of(1).series_id
    for key in ("model", "quantization", "workload_sha256", "machine", "device", "engine"):
        assert run_of(1, identity={**IDENTITY, key: "other"}).series_id != base
    other_chip = {**IDENTITY["hardware"], "microcode": "0x2"}
    assert run_of(1, identity={**IDENTITY, "hardware": other_chip}).series_id != base
    same = {**IDENTITY, "model_hash": "sha256:2", "server": {"version": "0.30"}}
    assert run_of(9, identity=same).series_id == base
    paths = [{**IDENTITY, "model": f"/{folder}/checkpoint"} for folder in ("a", "b")]
    assert len({run_of(1, identity=identity).series_id for identity in paths}) == 1


def test_a_disturbed_run_is_set_aside() -> None:
    assert "requests failed" in str(run_of(1, failed=3).set_aside)
    assert "other processes used more than 25%" in str(run_of(1, other_load=0.5).set_aside)
    assert run_of(1, other_load=None).set_aside is None
    shared = HistoryRun.of_result(result_of(1, 2.0, other_load=0.5), max_other_load=0.6)
    assert shared.set_aside is None
    result = result_of(1, 2.0)
    busy = {**result["llmopt"]["runs"][0], "median_tpot_ms": 9.0, "other_load": 0.9}
    result["llmopt"]["runs"] = [*result["llmopt"]["runs"], busy]
    run = HistoryRun.of_result(result)
    assert run.set_aside is None and run.values["median_tpot_ms"] == pytest.approx(2.0)
