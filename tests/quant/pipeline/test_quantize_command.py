"""`llmopt quantize` as a process: output, exit codes and files."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.cli.main import main
from llmopt.quant.convert.verify import PROVEN, verify
from llmopt.quant.methods.options import MethodOptions
from llmopt.quant.pipeline.pipeline import QuantizeResult, quantize
from llmopt.quant.plan.journal import Journal
from llmopt.quant.plan.plan import make_plan
from llmopt.quant.plan.request import QuantizeRequest
from safetensors.torch import load_file, save_file

from ...support.cli_process import ForkedProcess, llmopt
from ...support.quant_support import (
    LENGTH,
    SAMPLES,
    STORIES,
    TINY,
    llmopt_environment,
)

Command = Callable[..., subprocess.CompletedProcess[str]]
SMALL = ("--num-samples", str(SAMPLES), "--seq-len", str(LENGTH))


def finished_layers(output: Path) -> int:
    journal = output.with_name(output.name + ".partial") / "journal.jsonl"
    return max(0, journal.read_bytes().count(b"\n") - 1) if journal.exists() else -1


def wait_for(condition: Callable[[], bool], process: ForkedProcess) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)


def unpublished(*words: str) -> None:
    """The command, which waits before it publishes, so that it cannot end before it is killed."""
    Journal.publish = lambda *_: time.sleep(3600)  # type: ignore[method-assign]
    sys.argv = ["llmopt", *words]
    main()


def start(
    output: Path, method: str = "awq", run: Callable[..., None] = unpublished
) -> ForkedProcess:
    words = ("quantize", "--method", method, *SMALL, "-o", str(output))
    return ForkedProcess(run, *words, cwd=output.parent, env=llmopt_environment())


@pytest.mark.whole
def test_killed_three_times_it_ends_with_the_same_bytes(
    quantized: Callable[..., QuantizeResult], tmp_path: Path
) -> None:
    output = tmp_path / "out"
    kill, interrupt = signal.SIGKILL, signal.SIGINT
    for layers, stop in ((0, kill), (1, interrupt), (2, kill), (3, kill)):
        process = start(output)
        wait_for(lambda layers=layers: finished_layers(output) >= layers, process)
        time.sleep(random.uniform(0, 0.1))
        process.send_signal(stop)
        _, errors = process.communicate(timeout=120)
        if stop == kill:
            assert process.returncode == -kill
        else:
            assert process.returncode == 130
            assert f"in {output}.partial; the same command resumes" in errors
            assert "Traceback" not in errors
        assert not output.exists()
    process = start(output, run=llmopt)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert "going on after layer" in errors
    options = MethodOptions(asymmetric=None)  # as the command leaves them
    expected = quantized(method="awq", rotations=None, options=options).output
    names = {path.name for path in expected.iterdir()}
    assert {path.name for path in output.iterdir()} == names
    for name in sorted(names):
        assert (output / name).read_bytes() == (expected / name).read_bytes(), name
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("method", ["gptq", "smoothquant"])
def test_killed_and_taken_up_again_by_another_process(
    quantized: Callable[..., QuantizeResult], tmp_path: Path, method: str
) -> None:
    output = tmp_path / "out"
    process = start(output, method)
    wait_for(lambda: finished_layers(output) >= 1, process)
    process.kill()
    process.communicate(timeout=120)
    request = QuantizeRequest(
        STORIES,
        output,
        method=method,
        num_samples=SAMPLES,
        seq_len=LENGTH,
        model_name="stories3M",
    )
    assert quantize(request).resumed_layers >= 1
    expected = quantized(method=method).output
    assert {path.name for path in output.iterdir()} == {path.name for path in expected.iterdir()}
    for path in expected.iterdir():
        assert (output / path.name).read_bytes() == path.read_bytes(), path.name


def test_quantize_and_verify_with_json(command: Command, tmp_path: Path) -> None:
    done = command("quantize", "--method", "rtn", "--num-samples", "2", "--seq-len", "32", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["output"] == "stories3M-rtn-4bit"
    assert result["manifest"]["scheme"] == "int4 g128 sym"
    assert (
        "loads in: llmopt; transformers (needs compressed-tensors); vLLM (Marlin; tried on a CPU)"
        in done.stderr
    )
    assert done.stderr.count("loads in") == 2  # said before and after, and alike

    folder = tmp_path / result["output"]
    assert verify(folder).status == PROVEN
    shard = folder / "model-layer-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    failed = command("verify", str(folder), "--json")
    assert failed.returncode == 1
    assert shard.name in json.loads(failed.stdout)["failures"][0]


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere/model"], ["nowhere/model"]),
        (["stories260K"], ["model.layers.0.mlp.gate_proj", "172"]),
        (["--calibration", "empty.txt"], ["empty.txt", "is empty"]),
    ],
    ids=["missing-model", "260K-awq", "empty-calibration"],
)
def test_bad_options_are_one_line(
    command: Command, tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    (tmp_path / "empty.txt").write_text("\n\n")
    assert_refused(command("quantize", *arguments), *words)
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bits": 3, "format": "awq"}, "3-bit"),
        ({"method": "magic"}, "unknown method 'magic': choose one of"),
        ({"format": "zip"}, "unknown format 'zip'"),
        ({"format": "awq", "bits": 8}, "4-bit weights only"),
        ({"format": "awq", "symmetric": True}, "no symmetric form"),
        (
            {"group_size": 96},
            "96 does not divide the 256 inputs of model.layers.0.self_attn.q_proj",
        ),
        ({"seq_len": 1024}, "context of 512"),
        ({"ignore": ("(",)}, "no regular expression"),
        ({"ignore": ("c_proj",)}, "matches no linear"),
        ({"ignore": (".",)}, "nothing is left"),
        ({"model": TINY, "method": "rtn"}, "no usual group size divides the 172"),
        ({"model": TINY, "method": "rtn", "bits": 8}, "no usual group size divides the 172"),
    ],
)
def test_bad_requests_are_refused_before_any_work(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    settings: dict[str, Any] = {"model": STORIES, "output": tmp_path / "out"} | options
    with pytest.raises(BadInput) as caught:
        quantize(QuantizeRequest(**settings))
    assert words in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_default_group_size_falls_and_says_so(tmp_path: Path) -> None:
    request = QuantizeRequest(
        TINY, tmp_path / "out", ignore=("down_proj",), format="compressed-tensors"
    )
    plan = make_plan(request)
    assert plan.label == "int4 g64 sym"
    (note,) = plan.notes
    assert "group size 64" in note and "model.layers.0.self_attn.q_proj has 64 inputs" in note


def edit_config(model: Path, **changes: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut_shard(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def half_a_config(model: Path) -> None:
    path = model / "config.json"
    path.write_text(path.read_text()[:200])


def unknown_type(model: Path) -> None:
    edit_config(model, model_type="retnet")


def wrong_width(model: Path) -> None:
    edit_config(model, intermediate_size=640)


def norm_of_integers(model: Path) -> None:
    path = model / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.2.input_layernorm.weight"
    save_file(tensors | {name: tensors[name].to(torch.int32)}, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut_shard, ["model.safetensors", "cut off"]),
        (half_a_config, ["config.json", "half-written"]),
        (unknown_type, ["retnet", "installed transformers"]),
        (norm_of_integers, ["model.layers.2.input_layernorm.weight is I32"]),
        (wrong_width, ["model.layers.0", "does not fit its config"]),
    ],
)
def test_damaged_models_are_refused(
    tmp_path: Path, model_copy: Path, damage: Callable[[Path], None], words: list[str]
) -> None:
    damage(model_copy)
    with pytest.raises(BadInput) as caught:
        quantize(QuantizeRequest(model_copy, tmp_path / "out"))
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_folders_that_cannot_be_made_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    small = ["--method", "rtn", *SMALL]
    for arguments, option in (
        (["-o", str(file / "out")], "--output"),
        (["-o", str(tmp_path / "out"), "--stats", str(file)], "--stats"),
        (["-o", str(tmp_path / "out"), "--stats", str(file / "stats")], "--stats"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["quantize", *small, *arguments])
        errors = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
        assert stop.value.code == 2
        assert len(errors) == 1 and str(file) in errors[0] and option in errors[0]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert file.read_text() == "mine"


def test_a_cut_shard_is_one_line_on_the_command_line(command: Command, model_copy: Path) -> None:
    cut_shard(model_copy)
    assert_refused(command("quantize", str(model_copy), "-o", "out"), "cut off")


def test_an_output_that_exists_is_not_touched(command: Command, tmp_path: Path) -> None:
    output = tmp_path / "stories3M-awq-4bit"
    output.mkdir()
    (output / "mine.txt").write_text("keep")
    assert_refused(command("quantize", "--method", "awq"), "stories3M-awq-4bit exists", "--output")
    assert (output / "mine.txt").read_text() == "keep"
    assert len(list(tmp_path.rglob("*"))) == 2


def test_a_quantized_model_is_not_quantized_again(
    quantized: Callable[..., QuantizeResult], tmp_path: Path
) -> None:
    request = QuantizeRequest(quantized(method="awq").output, tmp_path / "out")
    with pytest.raises(BadInput, match="is quantized already"):
        quantize(request)
