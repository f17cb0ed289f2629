"""Recipes that go on where they stopped, and the capacity recipe, on the bundled model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import typer
from llmopt.bench.studies import recipe_run
from llmopt.bench.studies.recipe_files import Stages, read_recipe
from llmopt.cli.main import run_guarded
from llmopt.cli.run import run

RECIPE = """name: mine
num_threads: 1
bench: {num_prompts: 8, output_len: 4, max_concurrency: 4, num_runs: 1, quality_tokens: 64}
variants:
  - {name: one, quantize: {method: rtn, num_samples: 2, seq_len: 64}}
  - {name: two, quantize: {method: rtn, bits: 8, num_samples: 2, seq_len: 64}}
compare: {gate: false}
"""
CAPACITY = """name: cap
num_threads: 1
bench: {num_prompts: 6, output_len: 4, quality: false}
capacity: {loads: "1,2", context: 128}
"""


def llmopt(*words: str | Path) -> int:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(run)
    return run_guarded(lambda: app(list(map(str, words)), standalone_mode=False), debug=False)


def run_id(folder: Path) -> str:
    return json.loads((folder / "result.json").read_text())["llmopt"]["run_id"]


def test_a_stopped_recipe_goes_on_stage_by_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(RECIPE)
    real = recipe_run.run_bench

    def stopped_at_two(options, progress):  # as a Ctrl-C while the last model loads
        if options.name == "two":
            raise KeyboardInterrupt
        return real(options, progress)

    monkeypatch.setattr(recipe_run, "run_bench", stopped_at_two)
    assert llmopt(tmp_path / "mine.yaml", "--result-dir", tmp_path / "runs") == 130
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"llmopt run --resume {folder}" in capsys.readouterr().err
    done = json.loads((folder / "journal.json").read_text())["done"]
    assert done == ["quantize one", "quantize two", "bench original", "bench one"]
    assert not (folder / "report.html").exists()
    before = [run_id(folder / name) for name in ("original", "one")]
    made = (folder / "checkpoints" / "one" / "config.json").stat().st_mtime_ns

    monkeypatch.setattr(recipe_run, "run_bench", real)
    # Partial output of a killed process does not block a resume.
    (folder / "two").mkdir()
    assert llmopt("--resume", folder) == 0
    assert [run_id(folder / name) for name in ("original", "one")] == before
    assert (folder / "checkpoints" / "one" / "config.json").stat().st_mtime_ns == made
    assert (folder / "two" / "result.json").is_file()
    report, result = ((folder / n).read_text() for n in ("report.html", "result.json"))

    # With nothing left to do the same report is made again.
    for name in ("report.html", "report.md", "result.json"):
        (folder / name).unlink()
    assert llmopt("--resume", folder) == 0
    assert (folder / "report.html").read_text() == report
    assert (folder / "result.json").read_text() == result
    assert set(json.loads(result)["variants"]) == {"one", "two"}


def test_what_cannot_be_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert llmopt("--resume", tmp_path) == 2
    assert "holds no journal.json" in capsys.readouterr().err
    (tmp_path / "journal.json").write_text('{"recipe": {"name": "x"}, "done": []}')
    assert llmopt("--resume", tmp_path) == 2
    assert "journal.json is damaged" in capsys.readouterr().err
    assert llmopt() == 2 and llmopt("quickstart", "--resume", tmp_path) == 2
    assert "give a recipe to run, such as quickstart" in capsys.readouterr().err


def test_one_process_works_in_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text(RECIPE)
    stages = Stages.begin(tmp_path / "out", read_recipe(str(tmp_path / "mine.yaml")))
    with stages.alone():
        assert llmopt("--resume", stages.folder) == 2
    assert "another process is at work" in capsys.readouterr().err
    assert [path.name for path in stages.folder.iterdir()] == ["journal.json"]


def test_capacity_puts_the_plan_beside_the_knee(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cap.yaml").write_text(CAPACITY)
    assert llmopt(tmp_path / "cap.yaml", "--dry-run") == 0
    assert "with 1, 2 users" in capsys.readouterr().out
    assert llmopt(tmp_path / "cap.yaml", "--result-dir", tmp_path / "runs", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    folder = Path(record["folder"])
    assert record["knee"] in (1, 2) and record["sequence_tokens"] == 128
    plan = json.loads((folder / "plan.json").read_text())
    assert record["predicted_sequences"] == plan["engine_cache"]["kv_tokens"] // 128
    assert [row["users"] for row in record["rows"]] == [1, 2]
    for row in record["rows"]:
        expected = row["measured_tpot_ms"] / row["predicted_tpot_ms"] - 1
        assert row["residual"] == pytest.approx(expected)
    report = (folder / "report.html").read_text()
    assert "Plan beside measurement" in report and "Throughput against latency" in report
    # A sweep that is missing is measured again; the single user and the plan stay.
    alone = run_id(folder / "single")
    shutil.rmtree(folder / "sweep")
    journal = json.loads((folder / "journal.json").read_text())
    assert journal["done"] == ["single", "plan.json", "sweep"]
    (folder / "journal.json").write_text(json.dumps({**journal, "done": journal["done"][:2]}))
    assert llmopt("--resume", folder) == 0
    assert run_id(folder / "single") == alone and (folder / "sweep" / "sweep.json").is_file()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: x\n", "give variants to compare, or a capacity to find"),
        ("name: x\ncapacity: {loads: many}\n", "write auto, or numbers"),
        ("name: x\nvariants: [{name: a}]\nbench: {name: y}\n", "'name' is set by the recipe"),
        ("name: x\ncapacity: {}\nbench: {serve: vllm}\n", "leave servers away"),
    ],
)
def test_recipe_errors_have_messages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    (tmp_path / "x.yaml").write_text(text)
    assert llmopt(tmp_path / "x.yaml", "--dry-run") == 2
    assert said in capsys.readouterr().err
