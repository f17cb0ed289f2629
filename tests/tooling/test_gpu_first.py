"""First contact with a GPU: its stages on a pretended card, its file, and the page that says what failed."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from llmopt.engine.kernels.common.verdicts import VARIABLE

from tools import gpu_first
from tools.gpu_contact import stages
from tools.gpu_contact.expectation import Expectation, Facts, Finding, page, share
from tools.gpu_contact.tiles import _changed
from tools.gpu_figures import sections
from tools.gpu_figures.sections import World
from tools.gpu_figures.shapes import SMALL
from tools.gpu_parts import LINES, Parts

from ..support.pretended_cuda.card import Card
from ..support.pretended_cuda.runtime import pretended_cuda


def found(stage: str, card: Card, folder: Path) -> list[Finding]:
    """What a stage finds on the card, which computes nothing."""
    named = next(each for each in stages.STAGES if each.name == stage)
    with pretended_cuda(card):
        return list(named.run(World("cuda", SMALL, folder)))


def expectations(findings: list[Finding]) -> list[Expectation]:
    return [each for each in findings if isinstance(each, Expectation)]


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pretended card's roofs, and a checkpoint that the CPU writes."""
    write: Any = sections.write_checkpoint
    monkeypatch.setattr(sections, "copy_bandwidth", lambda device: 1e12)
    monkeypatch.setattr(sections, "matmul_flops", lambda device, dtype: 1e15)
    monkeypatch.setattr(sections, "write_checkpoint", lambda *args: write(*args[:3], "cpu"))


def test_graphs_and_a_second_card_give_the_tokens_of_eager_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    card = Card(count=2)
    told = expectations(found("graphs", card, tmp_path) + found("second-card", card, tmp_path))
    assert [each.met for each in told] == [True] * 5
    assert told[1].seen == told[1].expected.removeprefix("all of ") != "0"
    one = expectations(found("second-card", Card(), tmp_path))
    assert [(each.seen, each.met) for each in one] == [("there is one device", None)]


def test_a_card_on_which_capturing_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setenv(VARIABLE, "off")
    monkeypatch.setattr("llmopt.engine.execution.step_graphs.CudaGraph", refuse)
    told = expectations(found("graphs", Card(), tmp_path))
    assert [each.met for each in told] == [True, False] * 2
    assert told[1].seen == "0"


def test_the_8b_model_is_held_against_the_cost_model_with_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    # torch's profiler wants CUPTI.
    monkeypatch.setattr("tools.gpu_figures.ours._busy_seconds", lambda step: 0.0)
    monkeypatch.setattr(stages, "profile", lambda *_: [("_attend", "1.0", "1.0")])
    monkeypatch.setattr(stages, "_expected", lambda device, batch, context: 1e9 if batch > 1 else 0)
    findings = found("llama-8b", Card(), tmp_path)
    assert [each.met for each in expectations(findings)] == [True, False]
    tables = [each for each in findings if isinstance(each, Facts)]
    assert len(tables) == 2 and all(each.head[0] == "kernel" for each in tables)


def test_the_card_of_the_cost_model_is_known_by_its_number() -> None:
    cards = ("H100 SXM", "A100 80GB SXM", "L4", "RTX 4090")
    names = (
        "NVIDIA H100 80GB HBM3",
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA GeForce RTX 4090",
        "NVIDIA L40S",
    )
    assert [stages.card_of(name, cards) for name in names] == [
        "H100 SXM", "A100 80GB SXM", "RTX 4090", None,
    ]  # fmt: skip


def test_a_share_that_no_model_expects_has_no_verdict() -> None:
    assert share("decode", 0.7, None).met is None
    assert share("decode", 0.7, 0.6).met is True and share("decode", 0.5, 0.6).met is False


def test_a_launch_is_changed_where_it_has_the_parameter() -> None:
    usual = {"TILE": 64, "PART_TILES": 4, "num_stages": 3, "ROWS": 16}
    assert _changed(usual, {"num_stages": 5}) == usual | {"num_stages": 5}
    assert _changed(usual, {"TILE": 32}) == usual | {"TILE": 32, "PART_TILES": 8}
    assert _changed({"ROWS": 16}, {"num_stages": 5}) == {"ROWS": 16}


def test_the_run_writes_a_file_and_a_page_that_says_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stage that fails keeps what it had found, and the next one runs."""
    good = Expectation("norm: triton", "an error of at most 2e-02", "an error of 1.0e-03", True)
    bad = Expectation("gate: triton", "earns its place", "it failed: no | fp8e4nv", False)

    def in_a_process(_: Parts, name: str, *__: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        whole = name == "kernels"
        shown = [asdict(each) for each in ((good, bad) if whole else (good,))]
        stage = {"name": name, "ended": "whole" if whole else "cut off after 60 s", "seconds": 1.0}
        facts = [{"title": "profile", "head": ["kernel", "µs"], "rows": [["_attend", "12.0"]]}]
        return stage | {"expectations": shown, "facts": facts}, {"device": "NVIDIA L4"}

    monkeypatch.setattr(Parts, "in_a_process", in_a_process)
    out = tmp_path / "new" / "first.json"
    given = argparse.Namespace(out=out, stages="kernels,graphs", commit="abc", interpret=False)
    given.small = True
    record = gpu_first.stages().run(given)
    assert gpu_first.failures(record) == 2
    assert json.loads(out.read_text()) == record and record["schema"] == "llmopt-gpu-first/1"
    text = out.with_suffix(".md").read_text()
    assert text == page(record) and text.startswith("# First contact: NVIDIA L4")
    assert "2 of 3 expectations hold, 1 fail." in text
    assert "* graphs: cut off after 60 s" in text
    failed = text[text.index("## What failed") : text.index("## What holds")]
    assert "| kernels | gate: triton | earns its place | it failed: no / fp8e4nv |" in failed
    assert "norm" not in failed and "| _attend | 12.0 |" in text
    assert "graphs: cut off after 60 s in 1 s" in capsys.readouterr().err


def test_an_unknown_stage_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="no stage 'all': choose kernels, graphs, tiles"):
        gpu_first.stages().run(argparse.Namespace(stages="all", commit=None, small=True))


def test_a_stage_writes_its_findings_as_it_goes(tmp_path: Path, monkeypatch) -> None:
    def two(world: World) -> Any:
        yield Expectation("a", "b", "c", True)
        yield Facts("profile", ("kernel",), [("_attend",)])
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(stages, "STAGES", (stages.Stage("kernels", 1, two),))
    with pytest.raises(RuntimeError):
        gpu_first.run_stage("kernels", tmp_path, small=True, interpret=True)
    lines = [json.loads(line) for line in (tmp_path / LINES).read_text().splitlines()]
    assert [next(iter(line)) for line in lines] == ["environment", "expectation", "facts"]
