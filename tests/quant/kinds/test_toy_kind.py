"""A kind is a folder and a line of the registry: nothing else knows the toy kind, and everything takes it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.quant.plan.manifest import MANIFEST_NAME
from llmopt.recipes import MODELS

SOURCE = MODELS / "stories3M"
ROOT = Path(__file__).resolve().parents[3]
# The line that a kind has in `quant/kinds/registry.py`, before anything else is imported; then a command.
REGISTERED = """
import sys
from llmopt.quant.kinds.registry import SCHEMES
from tests.quant.kinds.toy.scheme import ToyScheme
SCHEMES.append(ToyScheme)
"""
COMMAND = f"{REGISTERED}from llmopt.cli.main import main\nmain(sys.argv[1:])\n"
LOGITS = (
    REGISTERED
    + """
import torch
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.engine import Engine
from llmopt.quant.convert.convert import dequantized_model
from pathlib import Path
folder = Path(sys.argv[1])
tokens = torch.randint(3, 512, (1, 60), generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    expected = dequantized_model(folder)(tokens).logits[0]
engine = Engine(EngineConfig(folder, dtype="float32", device="cpu"))
got = engine.prompt_logits(tokens[0].tolist())
torch.save({"expected": expected, "got": got}, sys.argv[2])
"""
)


def run(script: str, *arguments: object) -> str:
    """The output of a script that ends well, in a process of its own."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of toy codes."""
    output = tmp_path_factory.mktemp("toy") / "quantized"
    asked = ("--model", SOURCE, "--output", output, "--method", "rtn", "--format", "toy")
    run(COMMAND, "quantize", *asked, "--num-samples", 4, "--seq-len", 64)
    return output


def test_quantize_records_the_kind(folder: Path) -> None:
    manifest: dict[str, Any] = json.loads((folder / MANIFEST_NAME).read_text())
    assert {m["scheme"]["grid"] for m in manifest["modules"]} == {"toy"}
    assert all(m["error"] < 1 for m in manifest["modules"])


def test_verify_proves_it_with_the_second_reader(folder: Path) -> None:
    assert "proven" in run(COMMAND, "verify", folder)


def test_convert_reads_and_writes_it(folder: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    run(
        COMMAND,
        "convert",
        folder,
        "--format",
        "compressed-tensors",
        "--output",
        there,
        "--allow-loss",
    )
    run(COMMAND, "convert", there, "--format", "toy", "--output", back, "--allow-loss")
    assert "proven" in run(COMMAND, "verify", back)


def test_the_engine_runs_it_on_the_reference_path(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "logits.pt"
    run(LOGITS, folder, file)
    logits = torch.load(file)
    torch.testing.assert_close(logits["got"], logits["expected"], atol=1e-4, rtol=1e-4)


def test_kv_plan_knows_its_bytes(folder: Path) -> None:
    plan = json.loads(run(COMMAND, "kv-plan", "--model", folder, "--ctx", "1k", "--json"))
    assert "toy1" in json.dumps(plan)
