"""The series of paired starts, with starts that only write recorded runs."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from llmopt.base.errors import BadInput
from llmopt.bench.gate.gate_options import LimitOptions
from llmopt.bench.gate.limits import GateOutcome
from llmopt.bench.record.result import has_result
from llmopt.bench.studies.start import Start, has_option
from llmopt.bench.studies.starts_plan import Budget, Build, StartsPlan
from llmopt.bench.studies.starts_series import PairedSeries, write_comparison
from llmopt.cli.compare import compare
from llmopt.cli.main import run_guarded

Behave = Callable[..., Callable[[], list[str]]]
GATE = "duration<=+10% cpu_seconds<=+5%"


def plan_of(
    environments: tuple[Path, Path], *, gate: str = GATE, interleave: bool = False, **budget: Any
) -> StartsPlan:
    base, new = environments
    limits = Budget(**{"max_starts": 20, **budget})
    builds = Build("base", str(base)), Build("new", str(new))
    return StartsPlan(*builds, (), LimitOptions(gate=gate), limits, "none", interleave)


def run(plan: StartsPlan, folder: Path) -> PairedSeries:
    folder.mkdir(exist_ok=True)
    plan.write(folder)
    return PairedSeries(plan, folder).run()


def llmopt_compare(*words: str | Path) -> int:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(compare)
    return run_guarded(lambda: app(list(map(str, words)), standalone_mode=False), debug=False)


def test_starts_alternate_and_end_when_the_verdict_is_settled(
    environments: tuple[Path, Path], behave: Behave, tmp_path: Path
) -> None:
    names = behave()
    finished = run(plan_of(environments), tmp_path / "runs")
    assert finished.comparison.outcome is GateOutcome.PASS, finished.comparison.reasons
    order = names()
    pairs = len(order) // 2
    assert order == (["base", "new", "new", "base"] * pairs)[: 2 * pairs]
    assert finished.comparison.num_pairs == pairs < 10
    assert finished.stopped_because == "the verdict is settled"


def test_a_slower_build_is_a_regression_and_its_files_tell_so(
    environments: tuple[Path, Path], behave: Behave, tmp_path: Path
) -> None:
    behave(factor={"new": 1.3})
    finished = run(plan_of(environments), tmp_path / "runs")
    assert finished.comparison.outcome is GateOutcome.REGRESSION
    write_comparison(finished, tmp_path / "runs")
    record = json.loads((tmp_path / "runs" / "comparison.json").read_text())
    assert record["exit_code"] == 1 and record["plan"]["new"]["name"] == "new"
    assert len(record["starts"]["base"]) == len(record["starts"]["new"]) == record["num_pairs"]
    ratios = [
        after["duration"] / before["duration"]
        for before, after in zip(record["starts"]["base"], record["starts"]["new"], strict=True)
    ]
    assert all(ratio == pytest.approx(1.3) for ratio in ratios)
    text = (tmp_path / "runs" / "comparison.md").read_text()
    assert "Regression: new against base" in text and "## Starts" in text
    assert "<svg" in (tmp_path / "runs" / "comparison.html").read_text()


def test_the_budget_of_starts_ends_it(
    environments: tuple[Path, Path], behave: Behave, tmp_path: Path
) -> None:
    # A change as large as the limit is decided neither way.
    names = behave(factor={"new": 1.05})
    write_comparison(
        run(plan_of(environments, gate="output_throughput>=-5%", max_starts=2), tmp_path / "one"),
        tmp_path,
    )
    assert names() == ["base", "new"]
    names = behave(factor={"new": 1.05})
    plan = plan_of(environments, gate="cpu_seconds<=+5%", max_starts=4)
    finished = run(plan, tmp_path / "runs")
    assert finished.comparison.outcome is GateOutcome.NO_VERDICT
    assert names() == ["base", "new", "new", "base"]


@pytest.mark.whole
def test_the_budget_of_minutes_stops_a_start_that_hangs(
    environments: tuple[Path, Path], behave: Behave, tmp_path: Path
) -> None:
    names = behave(hang={"new": 2})
    finished = run(plan_of(environments, max_minutes=0.05), tmp_path / "runs")
    assert names() == ["base", "new", "new"]
    assert finished.stopped_because == "--max-minutes 0.05"
    assert finished.comparison.num_pairs == 1
    assert finished.comparison.outcome is GateOutcome.NO_VERDICT
    behave(hang={"base": 1})
    with pytest.raises(BadInput, match="no pair of starts was finished within --max-minutes"):
        run(plan_of(environments, max_minutes=0.02), tmp_path / "none")


def test_a_base_that_crashes_is_an_error_with_its_last_words(
    environments: tuple[Path, Path], behave: Behave, tmp_path: Path
) -> None:
    behave(crash={"base": 1})
    with pytest.raises(
        BadInput, match=r"base .* start 001-base ended with exit code 5: ImportError: no module"
    ) as error:
        run(plan_of(environments), tmp_path / "runs")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("number", [1, 2])
def test_a_new_build_that_crashes_alone_is_a_regression(
    number: int, environments: tuple[Path, Path], behave: Behave, tmp_path: Path
) -> None:
    behave(crash={"new": number})
    finished = run(plan_of(environments), tmp_path / "runs")
    assert finished.comparison.outcome is GateOutcome.REGRESSION
    assert finished.comparison.num_pairs == number - 1
    (reason,) = finished.comparison.reasons
    assert "crashes and the base does not" in reason and "ImportError" in reason
    write_comparison(finished, tmp_path / "runs")
    assert "ImportError" in (tmp_path / "runs" / "comparison.md").read_text()


def test_a_start_that_is_stopped_leaves_no_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On an interrupt `llmopt bench` writes what finished, which a resumed series would take for a start."""
    folder = tmp_path / "001-new"

    def interrupted(process: Any) -> None:
        (folder / "result.json").write_text("{}")
        process.kill()
        process.wait()

    monkeypatch.setattr("llmopt.bench.studies.start.stop", interrupted)
    start = Start("new", ["sleep", "60"], folder, True, makes_folder=True)
    start.begin()
    start.stop()
    assert not has_result(folder)


@pytest.mark.whole
def test_an_interrupted_comparison_goes_on(
    environments: tuple[Path, Path],
    behave: Behave,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "runs"
    base, new = environments
    names = behave(interrupt={"new": 2})
    words = [f"--run=base={base}", f"--run=new={new}", "--gate", GATE, "--pin-cpus", "none"]
    words.append("--no-interleave")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert llmopt_compare(*words, "--max-starts", "20", "-o", folder) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert f"llmopt compare --resume {folder}" in capsys.readouterr().err.replace("\n", "")
    assert names() == ["base", "new", "new"]
    assert sorted(one.name for one in folder.glob("00*") if one.is_dir()) == ["001-base", "001-new"]
    names = behave()
    assert llmopt_compare("--resume", folder, "--json") == 0
    assert names()[:2] == ["new", "base"]
    record = json.loads(capsys.readouterr().out)
    assert record["outcome"] == "pass" and record["num_pairs"] > 2
    assert (folder / "comparison.html").is_file()


@pytest.mark.whole
def test_what_an_older_base_does_not_record_is_left_out_by_name(
    environments: tuple[Path, Path], behave: Behave, tmp_path: Path
) -> None:
    behave(older=["base"])
    finished = run(plan_of(environments), tmp_path / "runs")
    assert finished.comparison.outcome is GateOutcome.PASS
    assert [delta.key for delta in finished.comparison.deltas] == ["duration"]
    assert any(
        "CPU time of a pass is not judged: no value in base" in note
        for note in finished.comparison.notes
    )
    finished = run(plan_of(environments, gate="cpu_seconds<=+5%"), tmp_path / "cpu")
    assert finished.comparison.outcome is GateOutcome.NO_VERDICT
    assert finished.comparison.num_pairs == 1, "more starts would not tell more"


def test_only_the_first_start_has_a_report_and_only_where_it_can_be_left(
    environments: tuple[Path, Path], behave: Behave, tmp_path: Path
) -> None:
    for number, (known, expected) in enumerate(
        (("--no-report", {"002"}), ("no such option", set()))
    ):
        behave(help=known)
        run(plan_of(environments, max_starts=4), tmp_path / f"runs-{number}")
        lines = (tmp_path / "starts.log").read_text().splitlines()
        words = [json.loads(line)["words"] for line in lines]
        without = {w[w.index("--output") + 1][-8:] for w in words if "--no-report" in w}
        assert {name.strip("/").partition("-")[0] for name in without} == expected


@pytest.mark.parametrize(("option", "known"), [("--no-report", True), ("--no-such", False)])
def test_an_option_that_only_the_long_help_shows_is_known(option: str, known: bool) -> None:
    command = [sys.executable, "-m", "llmopt.cli.main", "bench"]
    assert has_option(command, option, inherit_sources=True) is known


def test_the_client_of_servers_is_this_installation(
    environments: tuple[Path, Path], behave: Behave, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behave()
    for folder in environments:  # environments of a server, without an llmopt
        (folder / "bin" / "llmopt").rename(folder / "bin" / "vllm")
    client = (sys.executable, "-S", str(Path(__file__).with_name("fake_start.py")))
    monkeypatch.setattr("llmopt.bench.studies.starts_plan.THIS_INSTALLATION", client)
    monkeypatch.setenv("PYTHONPATH", "sources")
    plan = plan_of(environments, max_starts=4)
    assert (
        run(replace(plan, options=("--serve", "vllm")), tmp_path / "runs").comparison.num_pairs == 2
    )
    lines = [json.loads(line) for line in (tmp_path / "starts.log").read_text().splitlines()]
    for line in lines:
        folder = environments[line["name"] == "new"]
        words = line["words"]
        assert words[words.index("--serve-program") + 1] == str(folder / "bin" / "vllm")
        assert line["sources"] == "sources", "the client is this installation with its sources"
    assert any("--no-report" in line["words"] for line in lines)


def test_starts_that_are_alive_together_take_turns(
    environments: tuple[Path, Path], behave: Behave, tmp_path: Path
) -> None:
    names = behave(turns=3)
    finished = run(plan_of(environments, interleave=True, max_starts=4), tmp_path / "runs")
    assert finished.comparison.num_pairs == 2
    lines = [json.loads(line) for line in (tmp_path / "starts.log").read_text().splitlines()]
    passes = [line["name"] for line in lines if "pass" in line]
    there, back = ["base", "new", "new", "base", "base", "new"], ["new", "base", "base", "new"]
    assert passes == [*there, *back, "new", "base"]
    assert len(names()) == 4 + len(passes)
    pairs = [line["pair"] for line in lines if "pass" in line]
    assert len(set(pairs)) == 2 and len(set(pairs[:6])) == 1, "the passes of a pair share its id"


@pytest.mark.parametrize("name", ["base", "new"])
def test_a_crash_of_a_start_that_takes_turns(
    name: str, environments: tuple[Path, Path], behave: Behave, tmp_path: Path
) -> None:
    behave(turns=3, crash={name: 2})
    plan = plan_of(environments, interleave=True)
    if name == "base":
        with pytest.raises(BadInput, match=r"base .* exit code 5: ImportError"):
            run(plan, tmp_path / "runs")
        return
    finished = run(plan, tmp_path / "runs")
    assert finished.comparison.outcome is GateOutcome.REGRESSION
    assert "002-new ended with exit code 5: ImportError" in finished.comparison.reasons[0]


@pytest.mark.whole
def test_minutes_end_starts_that_take_turns(
    environments: tuple[Path, Path], behave: Behave, tmp_path: Path
) -> None:
    behave(turns=3, hang={"new": 2})
    finished = run(plan_of(environments, interleave=True, max_minutes=0.05), tmp_path / "runs")
    assert finished.stopped_because == "--max-minutes 0.05"
    assert finished.comparison.num_pairs == 1
