"""A GGUF file is a model for every command that takes one, and a wrong one is a line before torch is imported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llmopt.cli.main import main
from llmopt.quant.gguf.container import GgufFile, TensorToWrite, write_gguf
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.recipes import MODELS
from transformers import AutoModelForCausalLM

from ..support.cli_process import LlmoptProcess
from ..support.gguf_support import write_model
from ..support.lora_world import write_adapter

TINY = MODELS / "stories260K"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """stories260K as Q4_0, alone in a folder with a space in its name."""
    written = write_model(TINY, tmp_path_factory.mktemp("written"), "Q4_0")
    return Path(shutil.copy(written, tmp_path_factory.mktemp("a folder") / "tiny.gguf"))


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def batch_file(folder: Path) -> Path:
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    path = folder / "batch.jsonl"
    path.write_text(json.dumps(line) + "\n")
    return path


def adapter(folder: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(TINY)
    return write_adapter(folder / "adapter", model, ("q_proj",))


COMMANDS: dict[str, Callable[[Path, Path], list[str | Path]]] = {
    "kv-plan": lambda model, out: ["kv-plan", "--model", model, "--json"],
    "quantize": lambda model, out: [
        *("quantize", model, "--method", "rtn", "--format", "compressed-tensors"),
        *("--group-size", "4", "--no-errors", "-o", out),
    ],
    "quantize to gguf": lambda model, out: [
        *("quantize", model, "--method", "rtn", "--format", "gguf", "--gguf-type", "Q8_0"),
        *("--no-errors", "-o", out),
    ],
    "quantize by type": lambda model, out: [
        *("quantize", model, "--method", "q8_0", "--no-errors", "-o", out)
    ],
    "verify": lambda model, out: ["verify", model],
    "convert to hf": lambda model, out: ["convert", model, "--format", "hf", "-o", out],
    "convert": lambda model, out: ["convert", model, "--format", "compressed-tensors", "-o", out],
    "merge": lambda model, out: ["merge", model, adapter(out.parent), "-o", out],
    "batch": lambda model, out: ["batch", batch_file(out.parent), "--model", model],
    "freeze": lambda model, out: [
        *("freeze", "--model", model, "--num-prompts", "4", "-o", out.with_suffix(".jsonl"))
    ],
    "deploy": lambda model, out: ["deploy", model, "--gpu", "h100", "-o", out],
    "serve-local --engine": lambda model, out: [
        *("serve-local", model, "--engine", "vllm", "--print-command")
    ],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_a_file(
    command: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *COMMANDS[command](model, tmp_path / "out"))
    assert code == 0, err
    if command == "verify":
        assert "llama, 0.26M parameters, GGUF Q4_0, " in out and "context 512" in out
    if command == "quantize by type":
        assert (tmp_path / "out" / "tiny-Q8_0.gguf").is_file()
    if command == "kv-plan":
        tensors = GgufFile(model).tensors.values()
        weights = json.loads(out)["weight_bytes"]
        assert weights == sum(tensor.nbytes for tensor in tensors)


def test_serve_local_is_ready_with_a_file(model: Path) -> None:
    words = ["--port", "0", "--json", "--max-model-len", "64"]
    with LlmoptProcess("serve-local", model, *words) as process:
        ready = json.loads(process.stdout.readline())
        assert ready["model"] == "tiny"


def truncated(model: Path, folder: Path) -> Path:
    path = folder / "cut.gguf"
    path.write_bytes(model.read_bytes()[:-1000])
    return path


def of_bytes(data: bytes) -> Callable[[Path, Path], Path]:
    def write(_: Path, folder: Path) -> Path:
        (folder / "odd.gguf").write_bytes(data)
        return folder / "odd.gguf"

    return write


def with_keys(**changes: Any) -> Callable[[Path, Path], Path]:
    def write(model: Path, folder: Path) -> Path:
        path = folder / "odd.gguf"
        keys = {name.replace("__", "."): value for name, value in changes.items()}
        write_gguf(path, GgufFile(model).metadata | keys, [TensorToWrite("x", (32,), "F32", zeros)])
        return path

    return write


def zeros() -> list[bytes]:
    return [bytes(128)]


def two_files(model: Path, folder: Path) -> Path:
    for name in ("one.gguf", "two.gguf"):
        (folder / name).symlink_to(model)
    return folder


WRONG: dict[str, tuple[Callable[[Path, Path], Path], str]] = {
    "truncated": (truncated, "cut.gguf is cut off"),
    "empty": (of_bytes(b""), "odd.gguf has only 0 bytes"),
    "text": (of_bytes(b"no model at all, only words\n"), "odd.gguf is no GGUF file"),
    "unknown": (with_keys(general__architecture="warp"), "architecture 'warp' is not read here"),
    "mmproj": (with_keys(general__architecture="clip"), "the vision side of a model (mmproj)"),
    "part": (with_keys(split__count=2), "merge them with llama-gguf-split"),
    "missing": (lambda model, folder: folder / "none.gguf", "none.gguf"),
    "two files": (two_files, "one.gguf, two.gguf"),
    "no model": (lambda model, folder: folder, "neither a config.json nor a .gguf file"),
}
READERS = {
    "kv-plan": ["kv-plan", "--model"],
    "deploy": ["deploy"],
    "serve-local": ["serve-local", "--port", "0"],
    "quantize": ["quantize"],
    "convert": ["convert", "--format", "awq"],
    "bench": ["bench"],
    "freeze": ["freeze", "--model"],
    "merge": ["merge"],
    "verify": ["verify"],
}
NO_TORCH = """
import json, sys
from llmopt.cli.main import main
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as stop:
        print(stop.code, "torch" in sys.modules)
"""


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_file_is_one_line(
    wrong: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, words = WRONG[wrong]
    (tmp_path / "models").mkdir()
    path = make(model, tmp_path / "models")
    for command, start in READERS.items():
        if wrong == "no model" and command in ("kv-plan", "deploy", "verify"):
            continue  # whose folders need no weights, or are quantized ones
        more = [tmp_path] if command == "merge" else []
        code, out, err = run(capsys, *start, path, *more)
        assert (code, out) == (2, ""), command
        assert err.startswith("error: ") and err.count("\n") == 1, err
        assert words in err, (command, err)


def test_a_wrong_file_is_found_before_torch_is_imported(model: Path, tmp_path: Path) -> None:
    path = str(truncated(model, tmp_path))
    quick = [[*READERS[name], path] for name in ("kv-plan", "deploy", "serve-local", "quantize")]
    quick += [["convert", path, "--format", "awq"], ["merge", path, str(tmp_path)]]
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH, json.dumps(quick)], capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["2 False"] * len(quick), done.stderr


@pytest.mark.parametrize("kind", ["relative", "link", "folder", "blob"])
def test_the_ways_to_name_a_file(
    kind: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The hub's cache holds links to blobs without a suffix."""
    blob = Path(shutil.copy(model, tmp_path / "0123abcd"))
    link = tmp_path / "link.gguf"
    link.symlink_to(blob)
    monkeypatch.chdir(model.parent)
    named = {"relative": "tiny.gguf", "link": link, "folder": model.parent, "blob": blob}[kind]
    code, out, err = run(capsys, "kv-plan", "--model", named, "--json")
    assert code == 0, err
    assert json.loads(out)["weights"] == "Q4_0 g32"
    code, _, err = run(capsys, "verify", named)
    assert code == 0, err


def test_a_quantized_file_is_dequantized_and_that_is_recorded(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = [
        "--method",
        "rtn",
        "--format",
        "compressed-tensors",
        "--ignore",
        "down_proj",
        "-o",
        out,
    ]
    code, _, err = run(capsys, "quantize", model, *words, "--no-errors", "-o", out)
    assert code == 0
    assert "tiny.gguf is quantized already (Q4_0)" in err
    manifest = json.loads((out / "llmopt_quantization.json").read_text())
    assert manifest["dequantized_from"] == "GGUF Q4_0"
    assert "dequantized from | GGUF Q4_0" in (out / "README.md").read_text()
    written = Checkpoint(out)
    assert written.dtype_name("model.layers.0.mlp.down_proj.weight") == "BF16"
    assert written.dtype_name("model.embed_tokens.weight") == "BF16"
    assert (out / "tokenizer.json").is_file()
