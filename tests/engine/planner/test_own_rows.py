"""Rows of one's own machine: what they do to a plan and its error band, from numbers and from runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.cli.main import main
from llmopt.engine.planner.own_runs import read_runs
from llmopt.engine.planner.step_parameters import OwnRows, level, narrowed

FACTORS = (0.5, 2.0)
BENCH = ["bench", "--dataset", "random", "--random-input-len", "16", "--random-output-len", "8"]
BENCH += ["--num-prompts", "6", "--num-runs", "1", "--num-warmups", "1", "--no-quality"]
BENCH += ["--num-threads", "1", "--max-redone-passes", "0"]
PLAN = ["kv-plan", "--model", "stories3M", "--ctx", "24", "--output-len", "8", "--concurrency", "2"]


def width(factors: tuple[float, float]) -> float:
    return log(factors[1] / factors[0])


def test_without_a_row_the_band_is_the_prior() -> None:
    assert narrowed(FACTORS, (), 0.0) == pytest.approx(FACTORS)
    assert level(()) == 0


def test_rows_that_agree_narrow_the_band_and_rows_that_do_not_widen_it() -> None:
    shift = log(1.4)
    bands = [narrowed(FACTORS, (shift,) * n, level((shift,) * n)) for n in (1, 2, 5, 20)]
    widths = [width(FACTORS), *map(width, bands)]
    assert widths == sorted(widths, reverse=True)
    assert width(bands[0]) == pytest.approx(width(FACTORS) * 0.75**0.5)
    assert width(bands[-1]) < 0.2 * width(FACTORS)
    wild = (log(4), log(0.25))
    assert width(narrowed(FACTORS, wild, level(wild))) > width(FACTORS)


def test_the_level_is_shrunk_by_one_row_and_the_band_follows_what_was_applied() -> None:
    logs = (log(1.5),) * 3
    applied = level(logs)
    assert exp(applied) == pytest.approx(1.5**0.75)
    low, high = narrowed((0.8, 1.8), logs, applied)
    # Corrected, the band's centre is what is left of the prior's.
    assert low * high == pytest.approx((0.8 * 1.8) ** 0.25)


def test_the_rows_are_named_in_the_band() -> None:
    rows = OwnRows("cpu", "llmopt", (0.1,), (0.2,), (0.0,), of_model=True)
    assert rows.text == "1 row of this machine"
    others = OwnRows("cpu", "llmopt", (0.1, 0.2), (0.2, 0.2), (0.0, 0.0), of_model=False)
    assert others.text == "2 rows of this machine, of other models"


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return stop.value.code  # type: ignore[return-value]


Asking = Callable[..., dict[str, Any]]


@pytest.fixture
def planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Asking:
    """A plan of the bundled model in JSON, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def plan(*options: str) -> dict[str, Any]:
        capsys.readouterr()
        assert call(*PLAN, *options, "--json") == 0
        return json.loads(capsys.readouterr().out)

    return plan


def test_a_bench_against_a_plan_is_a_row_that_narrows_the_next(
    planned: Asking, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*PLAN, "--gpu", "cpu", "--out", "plan.json") == 0
    assert call(*BENCH, "--max-concurrency", "2", "--plan", "plan.json", "-o", "runs/two") == 0
    assert "a row of this machine" in capsys.readouterr().err
    (row,) = read_runs(Path("runs"), ("stories3M", "bf16"), on_cpu=True)
    assert row.row and row.row.loop == (16, 8, 2)

    one = planned("--measured", "runs/two")
    loaded = one["loaded"]
    assert (loaded["error"]["rows"], loaded["error"]["note"]) == (1, "1 row of this machine")
    result = json.loads(Path("runs/two/result.json").read_text())
    # One row moves the plan half of the way.
    bare = json.loads(json.dumps(result))
    del bare["llmopt"]["plan"]
    Path("bare.json").write_text(json.dumps(bare))
    base = planned("--measured", "bare.json")["loaded"]
    moved = (base["tpot_ms"] * result["mean_tpot_ms"]) ** 0.5
    assert loaded["tpot_ms"] == pytest.approx(moved, rel=2e-3)

    assert call(*BENCH, "--max-concurrency", "4", "--plan", "plan.json", "-o", "runs/four") == 0
    both = planned("--measured", "runs")
    assert both["loaded"]["error"]["note"] == "2 rows of this machine"
    assert both["efficiency"]["source"] == "measured in 2 runs"
    capsys.readouterr()
    assert call(*PLAN, "--measured", "runs", "--explain", "--html", "plan.html") == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "2 rows of this machine moved TPOT and TTFT" in words
    assert "moved and narrowed by this machine's own rows" in words


def test_a_folder_without_rows_of_this_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds no run of `llmopt bench --plan` on a CPU"):
        read_runs(tmp_path, ("stories3M", "bf16"), on_cpu=True)


def test_rows_of_other_models_count_once_each_and_only_on_their_device(
    planned: Asking,
) -> None:
    written("runs/a", tpot_ms=3.0)
    written("runs/b", tpot_ms=4.0, clients=4)
    other = planned("--measured", "runs", "--weights", "int4")
    assert other["loaded"]["error"]["note"] == "1 row of this machine, of other models"
    with pytest.raises(SystemExit):
        main([*PLAN, "--measured", "runs/a", "--gpu", "h100"])
    written("runs/c", machine="another")
    with pytest.raises(BadInput, match="has runs of a box and another: name one run"):
        read_runs(Path("runs"), ("stories3M", "bf16"), on_cpu=True)


def test_rows_of_a_model_that_moved_are_named(planned: Asking) -> None:
    written("runs/a")
    file = Path("runs/a/result.json")
    file.write_text(file.read_text().replace('"path": "stories3M"', '"path": "moved/away"'))
    plan = planned("--measured", "runs/a")
    assert "of this machine" not in plan["loaded"]["error"]["note"]
    (warning,) = (text for text in plan["warnings"] if "moved/away" in text)
    assert "are left out: the model is no longer there" in warning


def written(folder: str, machine: str = "a box", tpot_ms: float = 3.0, clients: int = 2) -> None:
    """A run's result with what a plan reads of it."""
    points = [{"phase": "decode", "mbu": 0.03}, {"phase": "prefill", "mfu": 0.1}]
    row = {"model": "stories3M", "path": "stories3M", "weights": "bf16", "gpu": "cpu"}
    row |= {"engine": "llmopt", "kv_bytes_per_element": 2.0, "block_size": 32, "resident": 16}
    row |= {"prompt_tokens": 16, "output_tokens": 8, "clients": clients}
    result = {
        "llmopt": {
            "roofline": {"ceilings": {"bandwidth": 1e11, "flops": 4e11}, "points": points},
            "environment": {"machine": machine},
            "identity": {"device": "cpu"},
            "plan": {"row": row | {"ttft_ms": 9.0, "tpot_ms": tpot_ms}},
        }
    }
    path = Path(folder) / "result.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(result))


RUN = {
    "roofline": {
        "ceilings": {"bandwidth": 1e10, "flops": 1e11},
        "points": [{"phase": "decode", "mbu": 0.5}, {"phase": "prefill", "mfu": 0.4}],
    },
    "environment": {"machine": "here"},
    "identity": {"device": "cpu"},
}
ROW = {"model": "stories3M", "path": "stories3M", "weights": "bf16", "gpu": "cpu"}
ROW |= {"engine": "llmopt", "kv_bytes_per_element": 2.0, "block_size": 16, "prompt_tokens": 8}
ROW |= {"output_tokens": 8, "clients": 1, "resident": 4, "ttft_ms": 5.0, "tpot_ms": 1.0}


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (RUN | {"plan": {"row": ROW | {"tpot_ms": 0}}}, "tpot_ms is 0"),
        (RUN | {"plan": {"row": ROW | {"ttft_ms": "5"}}}, "ttft_ms is '5'"),
        (RUN | {"plan": {"row": ROW | {"clients": None}}}, "clients is None"),
        (
            RUN | {"roofline": {**RUN["roofline"], "ceilings": {"bandwidth": 1.0, "flops": 0}}},
            "flops is 0",
        ),
        ([RUN], "no roofline"),
    ],
)
def test_a_damaged_run_is_one_line(
    run: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"llmopt": run}))
    assert call(*PLAN, "--gpu", "cpu", "--measured", str(file)) == 2
    err = capsys.readouterr().err
    assert words in err and str(file) in err and err.count("\n") == 1


def test_a_run_whose_plan_is_no_object_has_no_row(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"llmopt": RUN | {"plan": "plan.json"}}))
    (run,) = read_runs(file, ("stories3M", "bf16"), on_cpu=True)
    assert run.row is None
