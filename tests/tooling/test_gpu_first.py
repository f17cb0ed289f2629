"""First contact with a GPU: its stages on a pretended card, its file, and the page that says what failed."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from llmopt.bench.machine.roofline import copy_bandwidth
from llmopt.engine.doctor.self_test import KernelFinding as SelfTested
from llmopt.engine.kernels.common.verdicts import VARIABLE

from tools import gpu_first
from tools.gpu import machine, sections, stages
from tools.gpu.expectation import Expectation, Facts, Finding, page, share
from tools.gpu.machine import MODELS, largest
from tools.gpu.ours import Ours
from tools.gpu.parts import LINES, WHOLE, Parts, _ended, device_of, read
from tools.gpu.sections import World
from tools.gpu.shapes import FULL, SMALL
from tools.gpu.tiles import _changed, tiles

from ..support.pretended_cuda.card import Card
from ..support.pretended_cuda.runtime import pretended_cuda

ROOT = Path(__file__).resolve().parents[2]


def found(stage: str, card: Card, folder: Path) -> list[Finding]:
    """What a stage finds on the card, which computes nothing."""
    named = next(each for each in stages.STAGES if each.name == stage)
    with pretended_cuda(card):
        return list(named.run(World("cuda", SMALL, folder)))


def options(out: Path, **given: Any) -> argparse.Namespace:
    """The command line of a small run."""
    usual = {"stages": None, "commit": "abc", "small": True, "interpret": False, "resume": False}
    return argparse.Namespace(out=out, seconds=100.0, **(usual | given))


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
    monkeypatch.setattr("llmopt.engine.execution.graph_setting.CudaGraph", refuse)
    told = expectations(found("graphs", Card(), tmp_path))
    assert [each.met for each in told] == [True, False] * 2
    assert told[1].seen == "0"


def test_the_8b_model_is_held_against_the_planner_with_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    # torch's profiler wants CUPTI.
    monkeypatch.setattr("tools.gpu.ours._busy_seconds", lambda step: 0.0)
    monkeypatch.setattr(stages, "profile", lambda *_: [("_attend", "1.0", "1.0")])
    shares = iter((0.0, 1e9))
    monkeypatch.setattr(stages, "expected_share", lambda *_: next(shares))
    findings = found("llama-8b", Card(), tmp_path)
    assert [each.met for each in expectations(findings)] == [True, False]
    tables = [each for each in findings if isinstance(each, Facts)]
    assert len(tables) == 2 and all(each.head[0] == "kernel" for each in tables)


def test_the_planner_expects_less_than_the_roof_and_less_of_short_steps() -> None:
    long, short = (stages.expected_share(read, 2e12, 32) for read in (16e9, 1e9))
    assert 0.1 < short < long < 1


def test_a_share_is_met_from_what_is_expected_on() -> None:
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
    record = gpu_first.stages().run(options(out, stages="kernels,graphs"))
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


def test_an_unknown_stage_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no stage 'all': choose machine, kernels, graphs, tiles"):
        gpu_first.stages().run(options(tmp_path / "a.json", stages="all"))


def test_a_stage_writes_its_findings_as_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def two(world: World) -> Any:
        assert 90 < world.seconds_left <= 100
        yield Expectation("a", "b", "c", True)
        yield Facts("profile", ("kernel",), [("_attend",)])
        raise RuntimeError("CUDA error\nof a kernel")

    monkeypatch.setattr(stages, "STAGES", (stages.Stage("kernels", 1, two),))
    with pytest.raises(RuntimeError):
        gpu_first.run_stage("kernels", tmp_path, options(tmp_path / "out"))
    with (tmp_path / LINES).open("a") as file:
        file.write('{"expectation": {"wha')  # killed while it wrote
    lines = read(tmp_path)
    assert [next(iter(line)) for line in lines] == [
        "environment", "expectation", "done", "facts", "failed",
    ]  # fmt: skip
    assert _ended(1, 9, lines) == "failed: RuntimeError: CUDA error, after a"
    assert _ended(-11, 9, lines[:-1]) == "killed by SIGSEGV, after a"
    assert _ended(None, 9, lines[:1]) == "cut off after 9 s"
    assert _ended(0, 9, lines) == WHOLE


def test_all_stages_end_within_ten_minutes() -> None:
    assert sum(stage.seconds for stage in stages.STAGES) <= 590


def test_a_run_goes_on_where_an_earlier_one_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    ends = {"machine": WHOLE, "kernels": "cut off after 9 s"}

    def in_a_process(_: Parts, name: str, *__: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        ran.append(name)
        nothing: dict[str, Any] = {"expectations": [], "facts": []}
        return {"name": name, "ended": ends[name], "seconds": 1.0} | nothing, {"device": "L4"}

    monkeypatch.setattr(Parts, "in_a_process", in_a_process)
    out, two = tmp_path / "first.json", "machine,kernels"
    gpu_first.stages().run(options(out, stages=two, resume=True))
    ends["kernels"] = WHOLE
    record = gpu_first.stages().run(options(out, stages=two, resume=True))
    assert ran == ["machine", "kernels", "kernels"]
    assert [stage["ended"] for stage in record["stages"]] == [WHOLE] * 2
    assert record["environment"] == {"device": "L4"}
    with pytest.raises(SystemExit, match="is of commit abc, and this is def: leave --resume out"):
        gpu_first.stages().run(options(out, resume=True, commit="def"))
    with pytest.raises(SystemExit, match="is another kind of run"):
        gpu_first.stages().run(options(out, resume=True, small=False))


def test_why_torch_sees_no_device_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_old() -> None:
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 11040).\nUpdate"
        )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", too_old)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(
        SystemExit, match=r"no CUDA device \(torch .* is built without CUDA\): --small"
    ):
        device_of(small=False, interpret=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(
        SystemExit, match=r"\(The NVIDIA driver on your system is too old .*11040\)"
    ):
        device_of(small=False, interpret=False)


def test_the_machine_is_told_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def met(card: Card) -> dict[str, bool | None]:
        return {each.what: each.met for each in expectations(found("machine", card, tmp_path))}

    whats = ("compute capability", "free memory", "torch adds eight ones", "a Triton kernel")
    assert met(Card()) == dict.fromkeys(whats, True)
    old = Card(name="Tesla T4", capability=(7, 5))
    old.held[0] = old.memory_bytes // 2  # of another process
    assert met(old) == dict.fromkeys(whats[:2], False) | dict.fromkeys(whats[2:], True)

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    broken = machine._told
    monkeypatch.setattr(machine, "refuses_triton", lambda _: "Triton is not installed")
    assert met(Card())["a Triton kernel"] is False
    monkeypatch.undo()
    monkeypatch.setattr(torch, "ones", refuse)
    told = expectations(list(machine.machine(World("cpu", SMALL, tmp_path))))
    assert [each.seen for each in told if not each.met][:1] == [
        broken(RuntimeError("Failed to find C compiler."))
    ]


def test_the_model_is_the_largest_that_the_card_has_room_for() -> None:
    cases = ((1, 128, 32), (32, 4096, 32))
    chosen = {gib: largest(FULL, cases, gib << 30) for gib in (79, 24, 16, 8, 2)}
    assert chosen[79] == ("llama-3.1-8b", [*cases])
    assert chosen[24] == ("llama-3.1-8b", [cases[0], (8, 4096, 32)])
    assert chosen[16] is not None and chosen[16][0] == "llama-3.2-3b"
    assert chosen[8] is not None and chosen[8][0] in ("llama-3.2-3b", "llama-3.2-1b")
    assert chosen[2] is None


def test_on_a_small_card_fewer_sequences_decode_and_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    monkeypatch.setattr(stages, "profile", lambda _: [])
    asked: list[Any] = []

    def smaller(scale: Any, cases: Any, free: int) -> Any:
        asked.append(cases)
        return MODELS[1], [(1, context, steps) for _, context, steps in cases]

    monkeypatch.setattr(stages, "largest", smaller)
    told = expectations(found("llama-8b", Card(), tmp_path))
    assert told[0].expected == f"{MODELS[0]}, {max(batch for batch, _, _ in asked[0])} sequences"
    assert told[0].seen.startswith(f"{MODELS[1]}, 1 sequences, in 8")
    assert len(told) == 3 and told[0].met is None
    monkeypatch.setattr(stages, "largest", lambda *_: None)
    (none,) = found("llama-8b", Card(), tmp_path)
    assert isinstance(none, Expectation) and none.seen.endswith("GiB are free")


def test_a_batch_that_the_cache_does_not_hold_is_no_measurement() -> None:
    """It would be preempted, and its steps would be those of fewer sequences."""

    class Full:
        vocab_size = 16

        def __init__(self) -> None:
            self.names: list[str] = []

        def add_request(self, name: str, *_: Any) -> None:
            self.names.append(name)

        @property
        def stats(self) -> Any:
            return SimpleNamespace(num_waiting=max(0, len(self.names) - 2))

        def step(self) -> list[Any]:
            return [SimpleNamespace(request_id=name) for name in self.names]

        def abort(self, name: str) -> None:
            self.names.remove(name)

    ours = Ours.__new__(Ours)
    ours.engine, ours._longest = cast(Any, Full()), 64
    with (
        pytest.raises(RuntimeError, match="1 of 3 sequences do not fit into the KV cache"),
        ours.decoding(3, 8, 2),
    ):
        pass
    with ours.decoding(2, 8, 2) as step:
        assert step() >= 0


def test_copying_is_measured_on_a_card_of_any_size() -> None:
    with pretended_cuda(Card(memory_bytes=32 << 20)):
        assert copy_bandwidth(torch.device("cuda")) > 0


def test_a_search_of_tiles_ends_in_its_time_and_says_how_far_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "off")

    def second(call: Callable[[], object]) -> float:
        call()
        return 1.0

    @contextmanager
    def launches(_: Any = None) -> Iterator[list[dict[str, Any]]]:
        yield [{"num_stages": 3}]

    monkeypatch.setattr("tools.gpu.tiles.seconds_of", second)
    monkeypatch.setattr("tools.gpu.tiles.launches", launches)
    with pretended_cuda(Card()):
        late = list(tiles(World("cuda", SMALL, tmp_path, ends=0.0)))
        whole = list(tiles(World("cuda", SMALL, tmp_path)))
    assert [each.met for each in expectations(late)] == [None] * len(late)
    assert "none is, of 0 of" in expectations(late)[0].seen
    assert all(each.met for each in expectations(whole))
    assert sum(isinstance(each, Facts) for each in whole) == len(expectations(whole)) > 0
    monkeypatch.setattr("tools.gpu.tiles.refuses_triton", lambda _: "it is not installed")
    (lacking,) = tiles(World("cuda", SMALL, tmp_path))
    assert isinstance(lacking, Expectation) and lacking.seen == "it is not installed"


def test_kernels_are_told_one_by_one_until_the_card_is_unusable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a kernel did before the card was lost is told, and not that all behind it failed too."""

    def two(*_: Any) -> Any:
        yield SelfTested("norm", "rows of 64", "triton", 1e-3, 2e-2)
        yield SelfTested("gate", "rows of 64", "triton", None, 2e-2, "CUDA error: illegal access")
        raise AssertionError("no kernel is tried on a card that is lost")

    def lost(*_: Any) -> None:
        raise RuntimeError("CUDA error: illegal access")

    told: list[Any] = []
    with pretended_cuda(Card()):
        monkeypatch.setattr(stages, "tested", two)
        monkeypatch.setattr(torch.cuda, "synchronize", lost)
        with pytest.raises(RuntimeError, match="illegal access"):
            told += stages.kernels(World("cuda", SMALL, tmp_path))
    assert [each.met for each in expectations(told)] == [True, False]


@pytest.mark.whole
def test_a_run_with_triton_interpreted_leaves_a_file_and_a_page(tmp_path: Path) -> None:
    out = tmp_path / "first.json"
    words = [*gpu_first.COMMAND[:-1], "--small", "--interpret", "--out", out, "--commit", "abc"]
    words += ["--stages", "machine"]
    run = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    record = json.loads(out.read_text())
    assert [stage["ended"] for stage in record["stages"]] == [WHOLE]
    assert "machine: a Triton kernel: it does" in run.stderr
    assert (
        "| machine | a Triton kernel | compiles and runs | it does |"
        in out.with_suffix(".md").read_text()
    )
