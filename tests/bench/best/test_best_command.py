"""`llmopt best` on bundled models: an answer whose files are proven, its commands, and a kill at any stage."""

from __future__ import annotations

import itertools
import json
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import typer
from llmopt.base.progress import Silent
from llmopt.bench.best import finalists, first_answer, search
from llmopt.bench.best.finalists import find_best, recipe_of
from llmopt.bench.best.first_answer import BudgetedProgress
from llmopt.bench.best.search import Target
from llmopt.bench.best.target import BestRequest
from llmopt.bench.quality import domains
from llmopt.cli.best import best, show_decision
from llmopt.cli.main import application, run_guarded
from llmopt.engine.planner.catalog import find_model
from llmopt.quant.model.checkpoint import MANIFEST_NAME
from llmopt.recipes import ROOT
from rich.console import Console

from tests.bench.best.decisions import a_decision
from tests.support import cli_process
from tests.support.cli_process import ForkedProcess

FEW = ("--num-samples", "2", "--seq-len", "64", "--quality-tokens", "128")
DATA = (*FEW, "--no-quality-full")
QUESTION = (
    "stories3M",
    "--format",
    "compressed-tensors",
    "--candidates",
    "int4,int8",
    "--num-prompts",
    "2",
    *DATA,
)


def llmopt(*words: str | Path) -> int:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(best)
    return run_guarded(lambda: app(list(map(str, words)), standalone_mode=False), debug=False)


def decision(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "decision.json").read_text())


def test_an_answer_with_its_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(search, "measure_machine", lambda target, *_: target)  # it takes its time
    monkeypatch.setattr(first_answer, "FIRST_TOKENS", 64)
    monkeypatch.setattr(domains, "TOKENS_PER_DOMAIN", 32)
    task = domains.bundled_task(domains.STORY_TASK)
    monkeypatch.setattr(domains, "bundled_task", lambda _: replace(task, items=task.items[:8]))
    folder = Path("out")
    question = (*QUESTION, "--quality-full", "--finalists", "2", "--max-kl", "9", "-o", "out")
    assert llmopt(*question, "--dry-run") == 0
    assert "by load: " in capsys.readouterr().out and not folder.exists()
    assert llmopt(*question) == 0
    screen = capsys.readouterr().out
    answer = decision(folder)
    chosen = {finalist["id"]: finalist for finalist in answer["finalists"]}[answer["recommended"]]
    assert chosen["rebuild"] in screen and chosen["serve"] in screen
    assert chosen["bytes"] == find_model(chosen["folder"]).stored_bytes
    assert chosen["kl"]["low"] <= chosen["kl"]["value"] <= chosen["kl"]["high"] <= 9
    assert chosen["speed"]["source"] == "measured" and chosen["keeps"] is True
    # The answer alone is scored by domain and by answers that change, which decides nothing.
    assert chosen["flips"]["value"] <= 1 and chosen["kl_by_domain"]
    assert "--no-true-sequential" in chosen["rebuild"]  # solved by the statistics of the search
    assert [finalist["id"] for finalist in answer["finalists"] if finalist["flips"]] == [
        chosen["id"]
    ]
    points = {point["id"]: point for point in answer["front"]}
    assert points[chosen["id"]]["finalist"] and points[chosen["id"]]["bytes"] == chosen["bytes"]
    assert {usual["name"] for usual in answer["usual"]} == set(search.USUAL)
    page = unescape((folder / "best.html").read_text())
    assert chosen["rebuild"] in page and answer["sentence"] in page and page.count("<svg ") >= 2
    before = (folder / "decision.json").read_bytes()
    assert llmopt(*question) == 0  # nothing is left to do
    assert (folder / "decision.json").read_bytes() == before
    _rebuilds(chosen, tmp_path)


def _rebuilds(chosen: dict[str, Any], folder: Path) -> None:
    """The command makes the finalist's weights again, to the byte."""
    _, *words = shlex.split(chosen["rebuild"])
    assert (
        run_guarded(lambda: application("quantize")(words, standalone_mode=False), debug=False) == 0
    )
    made = {path.name: path for path in (folder / chosen["id"]).glob("*.safetensors")}
    assert made
    for name, path in made.items():
        assert path.read_bytes() == (Path(chosen["folder"]) / name).read_bytes()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpu", "h1000"), "no GPU 'h1000'"),
        (("--format", "ggml"), "--format ggml: choose one of"),
        (("--size", "1KiB"), "its fewest bits are"),
        (("--target-bpw", "2"), "its fewest bits are"),
        (("--size", "huge"), "'huge' is no size"),
        (("--budget", "soon"), "--budget soon"),
        (("--budget", "10"), "--budget 10: give a unit, such as 10m"),
        (("--loads-in", "llama.cpp"), "it reads GGUF files only"),
    ],
)
def test_bad_input_ends_with_two(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(search, "measure_machine", lambda target, *_: target)
    assert llmopt(*QUESTION, *words, "-o", tmp_path / "out") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and said in error


KILLED_AT = (
    "question.json",
    "first.json",
    "statistics/layer-*",
    "statistics/costs-*",
    "search.json",
    "finalists/journal.json",
    "finalists/checkpoints/*.partial",
    "finalists/checkpoints/*/config.json",
    "finalists/original/result.json",
    "decision.json",
)
"""Files, in the order in which they appear."""


@pytest.mark.whole
@pytest.mark.timeout(900)
def test_a_kill_at_any_stage_changes_no_byte(tmp_path: Path) -> None:
    """Quality does not vary between runs, and the speed of other hardware is planned."""
    words = ("best", *QUESTION, "--gpu", "h100", "--finalists", "2", "--size", "2MB", "-o", "out")
    decisions = []
    for name, places in (("whole", ()), ("killed", KILLED_AT)):
        (tmp_path / name).mkdir()
        out = tmp_path / name / "out"
        for place in places:
            with ForkedProcess(cli_process.llmopt, *words, cwd=tmp_path / name) as process:
                is_there = False
                while process.poll() is None and not (is_there := any(out.glob(place))):
                    time.sleep(0.01)
                # A partial checkpoint may come and go between two looks.
                assert is_there or place.endswith(".partial"), place
                process.kill()
                process.wait()
        with ForkedProcess(cli_process.llmopt, *words, cwd=tmp_path / name) as process:
            assert process.wait() == 0
        decisions.append((out / "decision.json").read_bytes())
    assert decisions[0] == decisions[1]
    assert json.loads(decisions[0])["finalists"][0]["speed"]["source"] == "planned"


def test_ctrl_c_gives_the_best_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here there is nothing yet; a promise that is not kept is unsure."""

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(finalists, "search", interrupted)
    assert llmopt(*QUESTION, "-o", tmp_path / "out") == 3
    assert "Interrupted: the same command goes on from here." in capsys.readouterr().out
    answer = decision(tmp_path / "out")
    assert (answer["stopped"], answer["exit_code"], answer["saving"]) == ("interrupted", 3, 1.0)


def test_the_answer_is_one_short_screen(capsys: pytest.CaptureFixture[str]) -> None:
    """It has the recommendation, how sure it is, what to run next, the load, and why not the usual ones."""
    for stopped in (None, "budget"):
        answer = a_decision(stopped=stopped)
        answer["usual"].append({"name": "Q5_K_M", "id": "int-3.75", "breaks": [], "why": ""})
        show_decision(answer, Path("out"), Console(width=400))
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) <= 15
        assert answer["sentence"] in lines[stopped is not None]
        text = "\n".join(lines)
        assert "how sure: 95 % intervals" in text and "may save 1.2% at most" in text
        assert "serve:    vllm serve out/int-3.75" in text and "why not fp8: It decodes" in text
        assert "why not Q5_K_M" not in text
        assert (
            "by load, planned: int-3.75 is the fastest with one client (120 tokens/s); with all places"
            in text
        )


@pytest.mark.whole
def test_a_spent_budget_gives_the_best_so_far_and_changes_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on by a second at each look: the first run ends before its first answer, and each
    later one has twice the time."""
    monkeypatch.setattr(first_answer, "FIRST_TOKENS", 64)
    monkeypatch.setattr(first_answer, "USUAL", {"fp8": search.USUAL["fp8"]})
    data = {"num_samples": 2, "seq_len": 64, "quality_tokens": 128, "quality_full": False}
    kinds = {"formats": ("compressed-tensors",), "candidates": ("int4", "int8"), "gpu": "h100"}
    request = BestRequest(**data, **kinds, finalists=2, max_kl=9.0)
    whole = find_best(request, "stories3M", tmp_path / "whole")
    assert whole["exit_code"] == 0 and whole["stopped"] is None and whole["saving"] < 0.02
    # Statistics of the search serve every solver, and nothing that is rounded.
    usual = json.loads((tmp_path / "whole" / search.SEARCH_NAME).read_text())["usual"]
    made = {point["name"]: point["quantize"] for point in usual if point["refused"] is None}
    solved = {"stats": "statistics", "true_sequential": False, "num_samples": 2}
    assert made["awq int4"].items() >= solved.items() and "stats" not in made["fp8"]
    ticking = partial(itertools.count, step=1)
    notes: list[str] = []
    steps: list[str] = []
    monkeypatch.setattr(Silent, "note", lambda _, text: notes.append(text))
    monkeypatch.setattr(Silent, "start", lambda _, name, *rest: steps.append(name))
    stops: list[dict[str, Any]] = []
    seconds = 2.0
    while True:
        clock = ticking()
        budgeted = partial(BudgetedProgress, clock=lambda clock=clock: float(next(clock)))
        monkeypatch.setattr(finalists, "BudgetedProgress", budgeted)
        limited = replace(request, budget=seconds)
        answer = find_best(limited, "stories3M", tmp_path / "stopped")
        if answer["stopped"] is None:
            break
        stops.append(answer)
        seconds *= 2
    sentences = [stop["sentence"] for stop in stops]
    assert (
        sentences[0] == "So far: no usual quantization is measured." and stops[0]["exit_code"] == 3
    )
    assert any(sentence.startswith("So far: ") for sentence in sentences)
    assert any(notes[0].startswith(sentence) for sentence in sentences) and len(stops) > 3
    assert {stop["stopped"] for stop in stops} == {"budget"}
    begun = [name.split(", ")[:2] for name in steps]
    assert begun[0] == ["step 1 of 4", "first answer"] and ["step 2 of 4", "search"] in begun
    assert ["step 3 of 4", "finalist 1 of at most 2"] in begun
    # Once there is a first answer it has files, until a finalist is made.
    first = [stop for stop in stops if stop["sentence"].startswith("So far: fp8")]
    made = [stop["so_far"] for stop in first]
    listed = [usual for stop in first for usual in stop["usual"] if usual["name"] == "fp8"]
    assert {usual["why"] for usual in listed} == {""}
    assert made and made[-1] == str(tmp_path / "stopped" / "so-far" / "fp8")
    assert answer["so_far"] is None and not (tmp_path / "stopped" / "so-far").exists()
    final = [(tmp_path / name / "decision.json").read_text() for name in ("whole", "stopped")]
    assert final[0].replace("whole", "stopped") == final[1]


@pytest.mark.whole
@pytest.mark.timeout(900)
def test_the_bundled_recipe_mixes_within_its_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On less text: more bits have a smaller KL divergence, by the searches that the manifests hold."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    bounds = {"auto-3.50": 3.5, "auto-4.25": 4.25, "auto-5.00": 5.0}
    few = [f"variants.{place}.quantize.num_samples=4" for place in range(len(bounds) + 1)]
    few += ["bench.num_prompts=2", "bench.num_runs=1", "bench.quality_tokens=512"]
    words = [word for one in few for word in ("--set", one)]
    recipe = str(ROOT / "choose.yaml")
    run = ("run", recipe, *words, "--result-dir", "out")
    with ForkedProcess(cli_process.llmopt, *run, cwd=tmp_path) as process:
        assert process.wait() == 0
    (folder,) = (tmp_path / "out").iterdir()
    losses = []
    for name, bound in bounds.items():
        manifest = json.loads((folder / "checkpoints" / name / MANIFEST_NAME).read_text())
        assert manifest["summary"]["bits_per_weight"] <= bound
        assert manifest["search"]["taken"] == "mixed" and manifest["search"]["gap"] <= 1e-3
        result = json.loads((folder / name / "result.json").read_text())
        losses.append(result["llmopt"]["quality"]["kl_nats"])
    assert losses == sorted(losses, reverse=True)


def test_statistics_are_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search names those of its own folder from there, others in full."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    points = [{"quantize": {"stats": name}} for name in ("statistics", str(tmp_path / "shared"))]
    (tmp_path / "out" / search.SEARCH_NAME).write_text(json.dumps({"front": points, "usual": []}))
    target = Target.of(BestRequest(), "stories3M")
    for here, folder in ((tmp_path, Path("out")), (tmp_path / "elsewhere", Path("../out"))):
        monkeypatch.chdir(here)
        front = search.search(target, folder, Silent())["front"]
        own, other = (Path(one["quantize"]["stats"]) for one in front)
        assert (own.resolve(), other) == (tmp_path / "out" / "statistics", tmp_path / "shared")
        (variant, *_) = recipe_of(target, [{"id": "a", **front[0]}], "bf16").variants
        assert variant.quantize and variant.quantize.stats == tmp_path / "out" / "statistics"


def test_promised_depths_are_scored_with_their_caches() -> None:
    promise = ("kl.depth.256<=0.1", "needles.2k>=-2%", "kl.kv.int8.512<=0.01")
    for promised, depths, needles in (
        (promise, (256, 512, 2048), True),
        (promise[:1], (256,), False),
    ):
        target = Target.of(BestRequest(promise=promised), "stories3M")
        point = {"id": "a", "quantize": {"method": "rtn", "bits": 4}}
        bench = recipe_of(target, [point], "bf16").bench
        assert bench.quality_depth == depths and bench.needles == needles
        assert not bench.quality_full
        assert bench.quality_kv == (("int8",) if needles else ())


def test_promised_domains_are_scored_for_all_finalists() -> None:
    point = {"id": "a", "quantize": {"method": "rtn", "bits": 4}}
    for promise in ("kl.code<=0.1", "flips<=2%"):
        target = Target.of(BestRequest(promise=(promise,)), "stories3M")
        assert recipe_of(target, [point], "bf16").bench.quality_full


def test_finalists_are_scored_on_the_given_text(tmp_path: Path) -> None:
    (text := tmp_path / "text.txt").write_text("Once upon a time.")
    target = Target.of(BestRequest(quality_text=text), "stories3M")
    point = {"id": "a", "quantize": {"method": "rtn", "bits": 4}}
    assert recipe_of(target, [point], "bf16").bench.quality_text == text


def test_promised_tasks_are_scored() -> None:
    target = Target.of(BestRequest(promise=("tools>=-2%", "length<=+5%")), "stories3M")
    point = {"id": "a", "quantize": {"method": "rtn", "bits": 4}}
    assert recipe_of(target, [point], "bf16").bench.tasks == ("tool_calls", "answers")


def test_the_first_line_names_the_model_before_torch_is_imported(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from llmopt.cli.main import main; main()"
    command = [sys.executable, "-c", code, "best", "stories3M", "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    first, _, rest = done.stderr.partition("\n")
    assert first == "stories3M: llama, 3.08M parameters, bfloat16, 5.88 MiB, context 512"
    assert rest == "error: torch is not installed: pip install torch\n"
