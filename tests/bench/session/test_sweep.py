"""Load sweeps, the knee and the search for the highest load within an SLO, on curves that are known and on the bundled model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.bench.metrics.metrics import slo_share
from llmopt.bench.metrics.trace import RequestTrace
from llmopt.bench.options.options import BenchOptions
from llmopt.bench.options.values import parse_loads
from llmopt.bench.report.run_report import sweep_page
from llmopt.bench.session import sweep as sweeps
from llmopt.bench.session.sweep import (
    PRECISION,
    SloResult,
    SweepTarget,
    double_until_flat,
    find_knee,
    highest,
    sweep_loads,
)
from llmopt.cli.main import main

FAST = ["--num-prompts", "8", "--output-len", "6", "--num-threads", "1"]


@pytest.mark.parametrize("limit", [1.0, 1.3, 2.0, 7.77, 63.9])
def test_rate_search_comes_within_its_precision(limit: float) -> None:
    tried: list[float] = []

    def keeps(rate: float) -> bool:
        tried.append(rate)
        return rate <= limit

    result = highest(keeps, 1.0, 1024.0, whole=False)
    assert result.best is not None and result.failed is not None
    assert result.best <= limit < result.failed <= result.best * (1 + PRECISION)
    assert len(tried) < 20


def test_rate_search_at_its_ends() -> None:
    assert highest(lambda _: False, 2.0, 2048.0, whole=False) == SloResult(None, 2.0)
    assert highest(lambda _: True, 2.0, 2048.0, whole=False) == SloResult(2048.0, None)


@pytest.mark.parametrize("most", [1, 2, 5, 48, 64])
def test_count_search_is_exact(most: int) -> None:
    for limit in range(most + 3):
        result = highest(lambda count, limit=limit: count <= limit, 1, most, whole=True)
        assert result.best == (min(limit, most) or None)
        assert result.failed == (limit + 1 if limit < most else None)


def point(load: float, throughput: float, latency: float, kept_up: bool = True) -> dict[str, Any]:
    counts = {"completed": 80, "failed": 0}
    return {"load": load, "power": throughput / latency, "kept_up": kept_up, **counts}


def test_knee_is_where_power_peaks() -> None:
    # A server with four slots: beyond them only the queueing time grows.
    curve = [point(n, min(n, 4) * 100, max(n, 4) / 4) for n in (1, 2, 3, 4, 5, 8)]
    assert find_knee(curve)["load"] == 4
    assert find_knee([*curve, point(9, 1e6, 0.1, kept_up=False)])["load"] == 4
    assert find_knee([{"load": 1, "power": None, "kept_up": True}]) is None
    # Beyond its slots a server that refuses is as fast for the others.
    refusing = point(64, 410, 1) | {"completed": 80, "failed": 900}
    assert find_knee([*curve, refusing])["load"] == 4
    assert find_knee([*curve, refusing | {"failed": 0}])["load"] == 64


def test_doubling_stops_when_it_brings_little() -> None:
    tried: list[float] = []

    def measure(load: float) -> dict[str, Any]:
        tried.append(load)
        return {"output_throughput": min(load, 6.0), "kept_up": load < 20}

    double_until_flat(measure, 1.0, 100.0)
    assert tried == [1, 2, 4, 8, 16]
    tried.clear()
    double_until_flat(measure, 1.0, 5.0)
    assert tried == [1, 2, 4, 5]
    tried.clear()
    double_until_flat(lambda load: measure(load) | {"kept_up": load < 2}, 1.0, 100.0)
    assert tried == [1, 2]


def request(sent: float, first: float, last: float, due: float | None = None) -> RequestTrace:
    scheduled = sent if due is None else due
    return RequestTrace("r", 5, 2, scheduled, sent, [first, last], [1, 1], success=True)


def test_slo_share_counts_failures_and_the_wait_of_the_schedule() -> None:
    late = request(sent=1.0, first=1.1, last=1.2, due=0.5)
    traces = [request(0.0, 0.1, 0.2), late, RequestTrace("bad", 5, 2, 0.0, 0.0)]
    assert slo_share(traces, {"ttft": 150}) == pytest.approx(2 / 3)
    assert slo_share(traces, {"ttft": 150}, from_schedule=True) == pytest.approx(1 / 3)
    assert slo_share(traces, {"ttft": 150, "tpot": 50}) == 0
    assert slo_share(traces, {}, from_schedule=True) is None


def test_parse_loads() -> None:
    assert parse_loads("8,1, 2,2", "concurrency") == [1, 2, 8]
    assert parse_loads("0.5,2", "rate") == [0.5, 2]
    assert parse_loads("auto", "rate") is None
    for text in ("1,x", "", "0", "1.5", "inf", "-1"):
        with pytest.raises(BadInput, match="--sweep-concurrency"):
            parse_loads(text, "concurrency")


def test_sweep_target_refuses_a_rate_and_a_workload_with_its_own_times() -> None:
    with pytest.raises(BadInput, match="leave --request-rate"):
        SweepTarget(BenchOptions(request_rate=2.0), "rate")
    sweep_target = SweepTarget(
        BenchOptions(dataset="azure", num_prompts=4, num_threads=1), "concurrency"
    )
    with pytest.raises(BadInput, match="--trace-speed"):
        sweep_target.measure("concurrency", 1)


def test_sweep_over_rates_begins_at_the_serial_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "MAX_STEPS", 3)
    options = BenchOptions(num_prompts=8, output_len=6, num_threads=1, num_runs=2)
    record = sweep_loads(SweepTarget(options, "rate"), None)
    assert (serial_rate := record["serial_request_rate"]) is not None
    rates = [point["rate"] for point in record["points"]]
    assert rates == pytest.approx([serial_rate * 0.5 * 2**n for n in range(len(rates))])
    assert "concurrency" not in record["points"][0]
    assert record["points"][0]["completed"] == 16 and record["points"][0]["num_runs"] == 2
    hashes = {one["workload_sha256"] for one in record["points"]}
    assert len(hashes) == len(rates)


def test_prefix_cache_hits_are_those_of_the_prefixes() -> None:
    options = BenchOptions(
        dataset="prefix_repetition",
        prefix_repetition_prefix_len=160,
        prefix_repetition_suffix_len=32,
        prefix_repetition_num_prefixes=2,
        prefix_repetition_output_len=4,
        num_prompts=10,
        num_threads=1,
        block_size=16,
    )
    found = SweepTarget(options, "concurrency").measure("concurrency", 1)
    # One after the other, all but the first of each prefix find its 160 tokens.
    assert found["prefix_cache_hit_rate"] == pytest.approx(8 * 160 / (10 * 192), abs=0.01)


def only(root: Path) -> Path:
    (folder,) = root.iterdir()
    return folder


def run(*words: str) -> Any:
    with pytest.raises(SystemExit) as stop:
        main(["bench", *words])
    return stop.value.code


def test_sweep_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*FAST, "--sweep-concurrency", "1,4", "--result-dir", str(tmp_path), "--json") == 0
    record = json.loads(capsys.readouterr().out)
    folder = only(tmp_path)
    assert json.loads((folder / "sweep.json").read_text()) == record
    assert [one["concurrency"] for one in record["points"]] == [1, 4]
    assert record["knee"] in (1, 4)
    assert record["points"][1]["steady_state"]["windows"][0]["threshold_abs"] == 4
    assert (folder / "throughput-latency.svg").is_file()
    page = (folder / "report.html").read_text()
    assert "knee" in page and "Kleinrock" in page


def test_slo_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*FAST, "--slo-by", "concurrency", "--result-dir", str(tmp_path / "good"), "--json"]
    assert run(*words, "--slo", "ttft:100000 e2el:100000") == 0
    said = json.loads(capsys.readouterr().out)["slo"]
    assert (said["best"], said["lowest_failed"]) == (8, None)
    words[words.index("--result-dir") + 1] = str(tmp_path / "bad")
    assert run(*words, "--slo", "ttft:0") == 1
    record = json.loads(capsys.readouterr().out)
    assert record["slo"]["best"] is None and record["points"][0]["good_share"] == 0
    assert "Not even 1 user" in (only(tmp_path / "bad") / "report.md").read_text()


@pytest.mark.parametrize(
    "words",
    [
        ["--slo", "itl:5"],
        ["--slo", ""],
        ["--slo", "ttft:5", "--sweep-rate", "auto"],
        ["--slo", "ttft:5", "--slo-by", "colour"],
        ["--slo", "ttft:5", "--slo-share", "0"],
        ["--sweep-rate", "fast"],
        ["--sweep-concurrency", "auto", "--request-rate", "3"],
        ["--sweep-concurrency", "auto", "--baseline", "x"],
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], tmp_path: Path) -> None:
    assert run(*FAST, *words, "--result-dir", str(tmp_path / "runs")) == 2
    assert not (tmp_path / "runs").exists()


def test_an_interrupted_sweep_keeps_its_whole_points(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = SweepTarget.measure

    def measure(self: SweepTarget, kind: sweeps.Kind, value: float) -> dict[str, Any]:
        if value == 2:
            raise KeyboardInterrupt
        return whole(self, kind, value)

    monkeypatch.setattr(SweepTarget, "measure", measure)
    options = BenchOptions(num_prompts=4, output_len=4, num_threads=1)
    found = sweep_loads(SweepTarget(options, "concurrency"), [1, 2, 4])
    assert found["interrupted"] and [point["concurrency"] for point in found["points"]] == [1]
    page = sweep_page(found)
    assert any("interrupted" in note for note in page.warnings)
