"""`llmopt history add|show|check`: what is printed and written, exit codes, bad input."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from llmopt.cli.main import main

from tests.support.history_runs import IDENTITY, result_of, write_results


def llmopt(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["history", *map(str, words)])
    captured = capsys.readouterr()
    assert isinstance(stop.value.code, int)
    return stop.value.code, captured.out, captured.err


def history_of(tmp_path: Path, capsys, levels: Sequence[float], **options) -> Path:
    """A history of runs at these levels of TPOT, with a noise of 0.8 %."""
    noise = np.random.default_rng(0).normal(0, 0.008, len(levels))
    results = [
        result_of(i, float(level * np.exp(noise[i])), **options) for i, level in enumerate(levels)
    ]
    paths = write_results(tmp_path / "runs", results)
    assert llmopt(capsys, "add", tmp_path / "history", *paths)[0] == 0
    return tmp_path / "history"


STEADY = [2.0] * 30
SIX_LOSSES = [2.0 * 1.04 ** (i // 10) for i in range(70)]


def test_six_small_losses_are_shown_with_their_commits(tmp_path: Path, capsys) -> None:
    folder = history_of(tmp_path, capsys, SIX_LOSSES)
    page, tables = tmp_path / "page.html", tmp_path / "tables.md"
    words = ["--metric", "median_tpot_ms", "-o", page, "--markdown", tables]
    code, out, _ = llmopt(capsys, "show", folder, *words)
    assert code == 0 and out.count(" worse since commit ") == 7  # six, and the largest
    assert "6 change points, 6 for the worse." in out and "70 runs, now 2.5" in out
    html = page.read_text()
    assert html.count("<svg ") == 1 and "How change points are made" in html
    assert html.count('<tr class="bad">') == 6
    assert tables.read_text().count("% worse") >= 6 and "<svg" not in tables.read_text()
    code, out, _ = llmopt(capsys, "show", folder, "--metric", "median_tpot_ms", "--json")
    (series,) = json.loads(out)
    points = series["change_points"]
    assert [abs(int(point["commit"][1:]) - 10 * (i + 1)) <= 1 for i, point in enumerate(points)]
    assert len(points) == 6 and all(0.02 < point["worse"] < 0.06 for point in points)
    assert points[-1]["since_best"] == pytest.approx(1.04**6 - 1, abs=0.03)


def test_small_losses_add_up_to_a_regression(tmp_path: Path, capsys) -> None:
    folder = history_of(tmp_path, capsys, SIX_LOSSES[:30])
    code, out, _ = llmopt(capsys, "check", folder, "--threshold", "6%")
    assert code == 1 and out.startswith("REGRESSION: ")
    assert "worse than its best level" in out and "since commit c0" in out
    words = ["--threshold", "6%", "--since", "c010"]
    assert llmopt(capsys, "check", folder, *words)[0] == 0
    assert llmopt(capsys, "check", folder, "--threshold", "3%", "--since", "c010")[0] == 1


@pytest.mark.parametrize(
    ("levels", "code", "said"),
    [
        (STEADY, 0, "has lost no more than 5.0 % in its newest 20 runs (a change of "),
        (STEADY[:-5] + [2.2] * 5, 1, " worse since commit c025 "),
        (STEADY[:-5] + [1.8] * 5, 0, "PASS"),
        (STEADY[:5] + [2.2] * 25, 0, "PASS"),  # long ago
        (STEADY[:7], 3, "has 7 runs: 8 are needed"),
    ],
)
def test_the_exit_code_is_the_verdict(tmp_path, capsys, levels, code, said) -> None:
    folder = history_of(tmp_path, capsys, levels)
    got, out, _ = llmopt(capsys, "check", folder)
    assert got == code and said in out
    got, out, err = llmopt(capsys, "check", folder, "--json")
    verdict = json.loads(out)
    assert got == verdict["exit_code"] == code and verdict["sentence"] in err.replace("\n", " ")
    assert {each["commit"] for each in verdict["series"]} == {"c025" if code == 1 else None}
    assert {each["metric"] for each in verdict["series"]} == {
        "output_throughput", "median_ttft_ms", "median_tpot_ms", "median_e2el_ms",
    }  # fmt: skip


def test_a_gate_limits_what_it_names(tmp_path: Path, capsys) -> None:
    folder = history_of(tmp_path, capsys, STEADY[:-5] + [2.2] * 5)
    assert llmopt(capsys, "check", folder, "--gate", "median_tpot_ms<=+15%")[0] == 0
    assert llmopt(capsys, "check", folder, "--gate", "output_throughput>=-3%")[0] == 1
    assert llmopt(capsys, "check", folder, "--gate", "perplexity<=+1% weight_bytes<=+0%")[0] == 0


def test_only_the_series_of_the_newest_commit_are_judged(tmp_path: Path, capsys) -> None:
    slower = history_of(tmp_path, capsys, STEADY[:-5] + [2.2] * 5)
    elsewhere = {**IDENTITY, "machine": "another"}
    results = [result_of(100 + i, 2.0, identity=elsewhere) for i in range(9)]
    llmopt(capsys, "add", slower, *write_results(tmp_path / "more", results))
    code, out, _ = llmopt(capsys, "check", slower)
    assert code == 0 and "1 series without a run of commit c108 were not judged" in out


def test_a_newest_run_that_is_set_aside_has_no_verdict(tmp_path: Path, capsys) -> None:
    folder = history_of(tmp_path, capsys, STEADY)
    paths = write_results(tmp_path / "more", [result_of(50, 9.0, failed=3)])
    _, out, _ = llmopt(capsys, "add", folder, *paths)
    assert "set aside: 3 of its requests failed" in out
    code, out, _ = llmopt(capsys, "check", folder)
    assert code == 3 and "was set aside: 3 of its requests failed" in out
    busy = write_results(tmp_path / "busy", [result_of(60, 2.0, other_load=0.5)])
    code, out, _ = llmopt(capsys, "add", folder, *busy, "--max-other-load", "60%")
    assert code == 0 and "set aside" not in out and "1 run added" in out
    assert llmopt(capsys, "check", folder)[0] == 0
    page = tmp_path / "page.html"
    assert llmopt(capsys, "show", folder, "-o", page)[0] == 0
    assert "3 of its requests failed" in page.read_text()


def test_commit_and_date_may_be_given(tmp_path: Path, capsys) -> None:
    folder = history_of(tmp_path, capsys, STEADY[:8])
    paths = write_results(tmp_path / "more", [result_of(90, 2.0)])
    words = ["--commit", "v1.0", "--date", "2025-12-31T10:00:00"]
    _, out, _ = llmopt(capsys, "add", folder, *paths, *words)
    assert "commit v1.0" in out
    assert min(path.name for path in folder.iterdir()).startswith("20251231-100000-")
    _, out, _ = llmopt(capsys, "add", folder, *paths, *words, "--json")
    assert json.loads(out) == {"added": [], "given": 1}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check", "none"], "none is no folder with a history"),
        (["show", "empty"], "empty has no runs"),
        (["add", "new", "none"], "none"),
        (["add", "new", "empty"], "result.json"),
        (["add", "new", "cut"], "cut/result.json has no llmopt.runs: measure it again"),
        (["add", "new", "run", "--date", "yesterday"], "--date 'yesterday'"),
        (["add", "new", "run", "--commit", " "], "--commit is empty"),
        (["add", "new", "run", "--max-other-load", "some"], "'some' is no share"),
        (["check", "history", "--since", "zz"], "--since zz: no run"),
        (["check", "history", "--threshold", "lots"], "'lots' is no share"),
        (["check", "history", "--gate", "kl<=0.02"], "a history limits changes"),
        (["check", "history", "--gate", "median_tpot_ms<=-5%"], "does not limit a loss"),
        (["check", "history", "--gate", "output_throughput<=+5%"], "write output_throughput>=-5%"),
        (["check", "history", "--gate", "kl<=+5%"], "has kl"),
        (["check", "history", "--window", "1"], "--window"),
        (["show", "history", "--metric", "tpot"], "nothing is called 'tpot'"),
        (["show", "history", "--metric", "preemptions"], "preemptions is 0 in some runs"),
        (["drop", "history"], "No such command 'drop'"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, monkeypatch, words, said) -> None:
    history_of(tmp_path, capsys, STEADY[:9])
    (tmp_path / "empty").mkdir()
    (run,) = write_results(tmp_path / "more", [result_of(50, 2.0)])
    run.rename(tmp_path / "run")
    (tmp_path / "cut").mkdir()
    result = result_of(51, 2.0)
    del result["llmopt"]["runs"]
    (tmp_path / "cut" / "result.json").write_text(json.dumps(result))
    monkeypatch.chdir(tmp_path)
    code, out, err = llmopt(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and said in err
    assert not Path("new").exists()
