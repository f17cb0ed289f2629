"""`kill -9` at random points of a run, and the same command again: the bytes of a run that nothing stopped.

`LLMOPT_KILLS=20 python -m pytest tests/quant/pipeline/test_kill_and_resume.py` kills each case as many times,
and takes every GGUF type.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from llmopt.cli.main import main
from llmopt.quant.gguf.mix import GGUF_TYPES
from llmopt.quant.pipeline import pipeline
from llmopt.recipes import MODELS

from ...support.cli_process import LlmoptProcess
from ...support.gguf_support import random_model
from ...support.native_paths import native_paths
from ...support.quant_support import llmopt_environment

KILLS = int(os.environ.get("LLMOPT_KILLS", "0"))
TINY = str(MODELS / "stories260K")
SMALL = ("--num-samples", "4", "--seq-len", "64")
PER_CHANNEL = ("--group-size", "-1", "--format", "compressed-tensors")
FP4 = ("--ignore", "down_proj")  # 172 inputs are no whole blocks
CASES: dict[str, tuple[str, ...]] = {
    "autoround": ("--method", "autoround", "--iters", "8", *PER_CHANNEL),
    "autoround-rotated": (
        *("--method", "autoround", "--iters", "4", *PER_CHANNEL),
        *("--rotate", "R2"),
    ),
    "rotated-gptq": ("--method", "gptq", *PER_CHANNEL, "--rotate", "R2"),
    "gptaq": ("--method", "gptq", *PER_CHANNEL, "--asymmetric-calibration"),
    "nvfp4": ("--method", "nvfp4", *FP4),
    "nvfp4-w4a4": ("--method", "nvfp4", "--activations", "static", "--solver", "gptq", *FP4),
    "mxfp4": ("--method", "mxfp4", *FP4),
    "modelopt-nvfp4": ("--method", "nvfp4", "--format", "modelopt", "--kv-cache", "fp8", *FP4),
    "modelopt-fp8": (
        *("--method", "fp8", "--format", "modelopt"),
        *("--granularity", "tensor", "--activations", "static"),
    ),
    # Two linears a layer, which are quick to search.
    "trellis": ("--method", "trellis", "--finetune-steps", "8", "--ignore", "[qo]_proj|mlp"),
    "quip": ("--method", "quip", "--finetune-steps", "8", "--ignore", "[qo]_proj|mlp"),
}
WHOLE_BLOCKS = ("trellis", "quip")  # which the tiny model's widths do not fit
# Two kinds of blocks that are quick to search; with LLMOPT_KILLS all of them.
TYPES = list(GGUF_TYPES) if KILLS else ["Q2_K", "MXFP4"]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Rows of 256, which every GGUF type and the blocks of trellis codes fit."""
    return str(random_model(tmp_path_factory.mktemp("models") / "wide", "llama"))


def finish(output: Path, model: str, words: tuple[str, ...]) -> dict[str, bytes]:
    """The files of a run to its end, in this process."""
    with pytest.raises(SystemExit) as end:
        main(["quantize", model, *words, *SMALL, "-o", str(output)])
    assert end.value.code in (0, None)
    files = [path for path in output.rglob("*") if path.is_file()] if output.is_dir() else [output]
    return {path.relative_to(output).as_posix(): path.read_bytes() for path in files}


def journalled(output: Path) -> int:
    """Finished layers of an unfinished run; -1 before its journal."""
    journal = output.with_name(output.name + ".partial") / "journal.jsonl"
    return max(0, journal.read_bytes().count(b"\n") - 1) if journal.exists() else -1


def kill_at_random(output: Path, model: str, words: tuple[str, ...], seconds: float) -> None:
    """Kill a run at a random moment behind the next layer that it finishes."""
    words = ("quantize", model, *words, *SMALL, "-o", str(output))
    with LlmoptProcess(*words, cwd=output.parent, env=llmopt_environment()) as process:
        before, deadline = max(0, journalled(output)), time.monotonic() + 100
        while journalled(output) <= before and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(random.uniform(0, seconds))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=120)


@pytest.fixture
def single_thread() -> Iterator[None]:
    """Sums depend on the number of threads in the last bit; the killed process has one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.sweep(4)
@pytest.mark.usefixtures("single_thread")
@pytest.mark.parametrize("name", [*CASES, *TYPES])
def test_killed_runs_end_with_the_same_bytes(
    tmp_path: Path, wide: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if name in WHOLE_BLOCKS and not native_paths():
        pytest.skip("the searches of codes take minutes without a C compiler")
    if name in CASES:
        model, words = wide if name in WHOLE_BLOCKS else TINY, CASES[name]
    else:
        model, words = wide, ("--method", "rtn", "--format", "gguf", "--gguf-type", name)
    (tmp_path / "whole").mkdir()
    expected = finish(tmp_path / "whole" / "out", model, words)  # some formats hold the name
    output, resumed = tmp_path / "out", False
    for number in range(max(1, KILLS)):
        kill_at_random(output, model, words, 0.1)
        if output.exists() and journalled(output) < 0:  # the run was quicker than the kill
            output.rename(tmp_path / f"early-{number}")
        resumed = journalled(output) > 0 and not output.exists()
    capsys.readouterr()
    files = finish(output, model, words)
    assert files == expected
    assert ("going on after layer" in capsys.readouterr().err) == resumed
    assert not output.with_name("out.partial").exists()


def test_a_run_that_ended_behind_its_last_layer_says_that_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, words = tmp_path / "out", ("--method", "mxfp4", *FP4)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "write_final_files", lambda *_: sys.exit(9))
        with pytest.raises(SystemExit, match="9"):
            main(["quantize", TINY, *words, *SMALL, "-o", str(output)])
    assert journalled(output) == 5
    capsys.readouterr()
    finish(output, TINY, words)
    assert "going on after layer 5 of 5" in capsys.readouterr().err
