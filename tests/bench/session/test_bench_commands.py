"""`bench`, `compare` and `run` on the bundled model, with the files they leave opened and checked."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import typer
from llmopt.base.processor import computes_in_bf16
from llmopt.bench.load.inprocess import InProcessTarget
from llmopt.bench.load.load import Chunk
from llmopt.cli.bench import bench
from llmopt.cli.compare import compare
from llmopt.cli.main import run_guarded
from llmopt.cli.run import run

from ...support.simulated_clock import simulated_clock

FAST = ["--num-prompts", "16", "--output-len", "12", "--num-threads", "1", "--num-runs", "6"]


def llmopt(*words: str | Path) -> int:
    """The exit code of a command."""
    app = typer.Typer(pretty_exceptions_enable=False)
    for command in (bench, compare, run):
        app.command()(command)
    return run_guarded(lambda: app(list(map(str, words)), standalone_mode=False), debug=False)


def only_folder(root: Path) -> Path:
    (folder,) = root.iterdir()
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plain")
    words = ["--quality-tokens", "400", "--reference", "stories3M", "--save-detailed"]
    with simulated_clock(0):
        assert llmopt("bench", *FAST, *words, "--name", "plain", "--result-dir", root) == 0
    return only_folder(root)


def test_bench_leaves_a_whole_run_folder(plain: Path) -> None:
    names = {path.name for path in plain.iterdir()}
    assert names == {
        "result.json",
        "requests.parquet",
        "quality.parquet",
        "environment.json",
        "report.html",
        "report.md",
        "distributions.svg",
        "timeline.svg",
        "steps.parquet",
        "steps.svg",
        "roofline.svg",
    }
    result = json.loads((plain / "result.json").read_text(), parse_constant=pytest.fail)
    ours = result["llmopt"]
    assert result["completed"] == 96 and result["failed"] == 0
    assert result["total_output_tokens"] == 96 * 12  # lengths are pinned
    assert ours["peaks"]["requests_in_flight"] == 8
    assert ours["workload"]["is_stand_in"]
    assert 0 < result["median_ttft_ms"] < result["median_e2el_ms"]
    assert (ours["quality"]["kl_nats"], ours["quality"]["max_kl_nats"]) == (0, 0)
    assert ours["quality"]["top1_agreement"] == 1.0
    rounding = ours["quality"]["kv_cache"]
    if computes_in_bf16():
        assert rounding is None
    else:
        assert (rounding["dtype"], rounding["computed_in"]) == ("bfloat16", "float32")
        assert 0 < rounding["kl_nats"] < 1e-3
    assert 2 < ours["quality"]["perplexity"] < 6
    assert ours["prefix_cache_hit_rate"] < 0.2
    # A decode may be above 1: this model is in the cache, and the ceiling is that of memory.
    for point in ours["roofline"]["points"]:
        assert 0 < point["of_roof"] < (1 if point["phase"] == "prefill" else np.inf)
    assert ours["environment"]["libraries"]["torch"]
    assert len(result["generated_texts"]) == 96 and all(result["generated_texts"])
    table = pq.read_table(plain / "requests.parquet").to_pydict()
    assert len(table["run"]) == 96 and set(table["output_len"]) == {12}
    series = pq.read_table(plain / "quality.parquet").to_pydict()
    assert len(series["nll"]) == ours["quality"]["num_tokens"] and not any(series["kl"])
    # A greedy run gives the same text in every pass.
    assert table["text"][:16] == table["text"][16:32]
    report = (plain / "report.html").read_text()
    assert "stand-in" in report and "first chunk − sent" in report and report.count("<svg ") == 4
    assert "Quality by position" in report and "Perplexity ratio to the reference" in report


def test_compare_with_itself_passes(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert llmopt("compare", plain, plain, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["outcome"] == "pass" and all(d["change"] == 0 for d in found["deltas"])


def test_compare_catches_a_slowdown(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`make bench-check` measures the same on this machine."""
    verdicts = []
    for name, factor in (("same", 1), ("slow", 2)):
        words = ("--no-quality", "--slowdown", str(factor), "--name", name)
        with simulated_clock(factor):
            assert llmopt("bench", *FAST, *words, "--result-dir", tmp_path / name) == 0
        new, html = only_folder(tmp_path / name) / "result.json", tmp_path / f"{name}.html"
        capsys.readouterr()
        code = llmopt("compare", plain, new, "--json", "--html", html)
        verdicts.append(json.loads(capsys.readouterr().out))
        assert code == verdicts[-1]["exit_code"]
        assert ("slowed 2 times on purpose" in html.read_text()) == (name == "slow")
        assert "<svg " in html.read_text()
    same, slow = verdicts
    assert (same["outcome"], slow["outcome"]) == ("pass", "regression")
    changes = {delta["key"]: delta["change"] for delta in slow["deltas"]}
    assert changes["median_tpot_ms"] == pytest.approx(1, abs=0.02)
    assert changes["output_throughput"] == pytest.approx(-0.5, abs=0.02)


def test_compare_refuses_another_workload(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--dataset", "random", "--random-input-len", "20", "--random-output-len", "8"]
    code = llmopt(
        "bench", *words, "--num-prompts", "8", "--num-runs", "1", "--no-quality",
        "--request-rate", "200", "--goodput", "ttft:10000", "--result-dir", tmp_path, "--json",
    )  # fmt: skip
    assert code == 0
    result = json.loads(capsys.readouterr().out)
    assert result["request_rate"] == 200 and result["max_concurrency"] is None
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert llmopt("compare", plain, only_folder(tmp_path)) == 3
    assert "not the same prompts" in capsys.readouterr().out


def test_interrupt_writes_what_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    receive, calls = InProcessTarget.receive, 0

    def interrupted(target: InProcessTarget, until: float | None) -> list[Chunk]:
        nonlocal calls
        calls += 1
        if calls == 20:
            raise KeyboardInterrupt
        return receive(target, until)

    monkeypatch.setattr(InProcessTarget, "receive", interrupted)
    assert llmopt("bench", *FAST, "--num-warmups", "0", "--result-dir", tmp_path) == 130
    folder = only_folder(tmp_path)
    assert str(folder.name) in capsys.readouterr().err.replace("\n", "")
    result = json.loads((folder / "result.json").read_text())
    assert result["llmopt"]["interrupted"] and 0 < result["completed"] < 16
    assert llmopt("compare", folder, folder) == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dataset", "nonsense"], "no dataset 'nonsense'"),
        (["--num-prompts", "0"], "num_prompts"),
        (["--request-rate", "0"], "request_rate"),
        (["--goodput", "itl:3"], "--goodput"),
        (["--metadata", "novalue"], "KEY=VALUE"),
        (["--dataset", "custom"], "--dataset-path"),
        (["--model", "nowhere"], "no model 'nowhere'"),
    ],
)
def test_bench_refuses_in_one_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert llmopt("bench", *words, "--result-dir", tmp_path / "runs") == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line
    assert not (tmp_path / "runs").exists()


RECIPE = """
name: tiny
model: stories3M
interleave: {interleave}
num_threads: 1
bench: {{num_prompts: 8, num_runs: 2, output_len: 8, quality_tokens: 300, max_redone_passes: 0}}
variants:
  - name: awq
    quantize: {{method: awq, num_samples: 4, seq_len: 64}}
compare: {{threshold: 5%, gate: false}}
"""


@pytest.mark.sweep(1)
@pytest.mark.parametrize("interleave", ["true", "false"])
def test_recipe_ends_in_one_report(
    interleave: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(RECIPE.format(interleave=interleave))
    assert llmopt("run", recipe, "--result-dir", tmp_path / "runs", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    folder = only_folder(tmp_path / "runs")
    assert Path(printed["folder"]) == folder
    assert printed["variants"]["awq"]["verified"]["ok"]
    assert (folder / "checkpoints" / "awq" / "config.json").is_file()
    results = {
        name: json.loads((folder / name / "result.json").read_text())["llmopt"]
        for name in ("original", "awq")
    }
    assert results["awq"]["identity"]["quantization"] == "awq"
    ratio = results["awq"]["memory"]["weight_bytes"] / results["original"]["memory"]["weight_bytes"]
    assert ratio < 0.5
    assert 0 < results["awq"]["quality"]["kl_nats"] < 0.5
    assert results["awq"]["quality"]["perplexity"] > results["original"]["quality"]["perplexity"]
    assert (results["awq"]["arms"] is not None) == (interleave == "true")
    html = (folder / "report.html").read_text()
    assert html.count("<svg ") == 4 and "layer error" in html and "does not gate" in html
    assert (folder / "report.md").is_file() and (folder / "side-by-side.svg").is_file()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: x\nvariants: [{name: a}]\nnonsense: 1", "unknown key 'nonsense'"),
        (
            "name: x\nvariants: [{name: a}]\nbench: {num_promts: 1}",
            "unknown key 'bench.num_promts'",
        ),
        ("name: x\nvariants: [{name: a, quantize: {bit: 4}}]", "variants.0.quantize.bit"),
        ("name: x\nvariants: []", "variants"),
        ("name: x\nvariants: [{name: a}, {name: a}]", "same name"),
        ("name: x\nvariants: [{name: original}]", "is taken"),
        ("name: x\nvariants: [{name: a}]\nbench: {model: y}", "set by the recipe"),
        ("name: x\nvariants: [{name: a}]\ncompare: {threshold: much}", "'much'"),
        ("name: [\n", "line 2"),
        ("- a", "mapping"),
    ],
)
def test_recipe_refuses(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "bad.yaml"
    recipe.write_text(text)
    assert llmopt("run", recipe, "--result-dir", tmp_path / "runs") == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line and "bad.yaml" in line
    assert not (tmp_path / "runs").exists()


def test_unknown_recipe_names_the_bundled_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert llmopt("run", "nothing") == 2
    assert "quickstart" in capsys.readouterr().err


@pytest.mark.whole
def test_interrupted_recipe_keeps_checkpoints_and_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    receive, calls = InProcessTarget.receive, 0

    def interrupted(target: InProcessTarget, until: float | None) -> list[Chunk]:
        nonlocal calls
        calls += 1
        # Two warm-ups and a pass of each model take 8 steps apiece; this is in the second round.
        if calls == 36:
            raise KeyboardInterrupt
        return receive(target, until)

    monkeypatch.setattr(InProcessTarget, "receive", interrupted)
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(RECIPE.format(interleave="true"))
    assert llmopt("run", recipe, "--result-dir", tmp_path / "runs") == 130
    folder = only_folder(tmp_path / "runs")
    assert folder.name in capsys.readouterr().err.replace("\n", "")
    assert (folder / "checkpoints" / "awq" / "config.json").is_file()
    for name in ("original", "awq"):
        result = json.loads((folder / name / "result.json").read_text())
        assert result["llmopt"]["interrupted"] and result["completed"] == 8
    assert not (folder / "report.html").exists()
