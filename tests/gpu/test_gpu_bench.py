"""The GPU benchmark on tiny shapes: its sections, its file, its table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from llmopt.bench.machine.roofline import copy_bandwidth

from tools import gpu_bench
from tools.gpu import peers
from tools.gpu.figure import Figure, compared, markdown
from tools.gpu.peers import Theirs
from tools.gpu.sections import SECTIONS, World
from tools.gpu.shapes import SMALL

ROOT = Path(__file__).resolve().parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LACKING = ("pydantic", "fastapi", "uvicorn", "llguidance", "gguf", "compressed_tensors")
ONE = Figure("m", "bf16", "llmopt", "decode", 1, 8, "ms", 2.0, 1.9, 2.5, 3, 0.5, "copy bandwidth")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(DEVICE, SMALL, tmp_path_factory.mktemp("home"))


def broken(*_: Any) -> float:
    raise RuntimeError("its thread ended\nand more")


def test_what_the_rival_lacks_is_said() -> None:
    theirs = Theirs.__new__(Theirs)
    config, manager = (
        SimpleNamespace(),
        SimpleNamespace(continuous_batching_config=SimpleNamespace()),
    )
    theirs._model = SimpleNamespace(config=config)
    for attention, asynchronous, lacks in (
        ("paged|flash_attention_3", True, []),
        ("paged|sdpa", None, ["flash attention (it took paged|sdpa)", "async batching"]),
    ):
        config._attn_implementation = attention
        manager.continuous_batching_config.use_async_batching = asynchronous
        theirs._note_shortcomings(manager)
        assert theirs.shortcomings == lacks


def test_servers_are_given_requests_of_the_same_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_is_installed", lambda name: name == "vllm")
    assert peers.installed() == {"llmopt server": "llmopt", "vLLM": "vllm"}
    assert peers.missing() == ["SGLang"]
    words = peers.words("vllm", Path("folder"), 256, 100, 1024)
    options = dict(zip(words[5:-2:2], words[6:-2:2], strict=True))
    middle, ratio = int(options["--random-input-len"]), float(options["--random-range-ratio"])
    assert round(middle * (1 - ratio)) == 100 and round(middle * (1 + ratio)) == 1024
    typer = pytest.importorskip("typer")
    from llmopt.cli.main import application

    options_of_bench = typer.main.get_command(application("bench")).commands["bench"].params
    known = {name for option in options_of_bench for name in option.opts}
    assert {*options, "--ignore-eos", "--json"} <= known


@pytest.mark.sweep(3)
@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_every_section_measures(section, world, tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "_is_installed", lambda name: False)
    monkeypatch.setattr(Theirs, "continuous", broken)  # on a CPU it takes all memory for its cache
    own = replace(world, home=tmp_path, left_out=[])
    figures = list(section.measure(own))
    assert {figure.phase for figure in figures} >= {"decode"}
    assert len(figures) > 1
    assert all(0 < f.lowest <= f.median <= f.highest for f in figures if f.phase != "host")
    assert all((f.share is None) == (f.phase not in ("decode", "prefill")) for f in figures)
    beside = section.name == "requests"
    left_out = ["transformers continuous batching: RuntimeError: its thread ended"]
    left_out += ["vLLM and SGLang: not installed here"]
    assert own.left_out == left_out * beside
    assert ("transformers generate" in {f.engine for f in figures}) == (
        section.name in ("requests", "llama-8b")
    )


@pytest.mark.whole
def test_a_run_with_triton_interpreted_leaves_a_file_and_a_table(tmp_path):
    """Without what a machine with no more than torch, triton and transformers lacks of our dependencies."""
    (tmp_path / "lacking").mkdir()
    for name in LACKING:
        (tmp_path / "lacking" / f"{name}.py").write_text("raise ImportError('it is not here')")
    words = [
        *gpu_bench.COMMAND[:-1],
        "--small",
        "--out",
        tmp_path / "a.json",
    ]
    words += ["--interpret", "--sections", "llama-70b", "--commit", "abc"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "lacking")}
    found = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert found.returncode == 0, found.stderr
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["commit"] == "abc" and record["small"]
    (section,) = record["sections"]
    assert section["ended"] == "whole" and section["roofs"]["copy_bytes_per_second"] > 0
    chosen = record["environment"]["kernels"]
    assert {name.split(",")[0]: kernel for name, kernel in chosen.items()}["norm"] == "triton"
    assert found.stdout.strip() == markdown(record)
    assert "| llama-3.1-70b, 2 layers | bf16 | llmopt | decode step, batch 1" in found.stdout


def test_a_section_out_of_time_keeps_what_it_found(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time, pathlib\n"
        "home = pathlib.Path(sys.argv[3])\n"
        '(home / \'findings.jsonl\').write_text(\'{"left_out": "a"}\\n{"figure": {}}\\n\')\n'
        "time.sleep(30)\n"
    )
    monkeypatch.setattr(gpu_bench, "COMMAND", (sys.executable, str(script), "--run"))
    given: Any = type("Given", (), {"small": True, "interpret": False})
    section, environment = gpu_bench.sections().in_a_process("x", 1.0, given)
    assert section["ended"] == "cut off after 1 s"
    assert (section["left_out"], section["figures"], environment) == (["a"], [{}], {})


def test_speeds_are_listed_beside_their_baselines():
    quantized = replace(ONE, weights="int4 g128 sym", median=1.0)
    answers = replace(ONE, phase="requests", unit="tokens/s", median=30.0)
    theirs = replace(answers, engine="transformers generate", median=10.0)
    other = replace(quantized, batch=2)
    found = [words for _, words in compared([ONE, quantized, answers, theirs, other])]
    assert found == [[], ["2.00 × bf16"], ["3.00 × transformers generate"], [], []]


def test_the_gpu_page_holds_the_table():
    tool = ROOT / "tools" / "gpu_table.py"
    found = subprocess.run([sys.executable, tool, "--check"], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def test_a_copy_counts_bytes_read_and_written():
    assert copy_bandwidth(torch.device("cpu")) > 1e8
