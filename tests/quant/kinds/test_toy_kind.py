"""A kind is a folder and a line of the registry: nothing else knows the toy kind, and everything takes it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.quant.plan.manifest import MANIFEST_NAME
from llmopt.recipes import MODELS

SOURCE = MODELS / "stories3M"
ROOT = Path(__file__).resolve().parents[3]
# The line that a kind has in `quant/kinds/registry.py`, before anything else is imported; then commands and the
# engine, in one process.
SCRIPT = """
import contextlib, io, json, sys
from llmopt.quant.kinds.registry import KINDS, KindEntry
KINDS["toy"] = KindEntry("tests.quant.kinds.toy.scheme", "ToyScheme", ("toy",))
from llmopt.cli.main import main

printed = {}
for name, words in json.loads(sys.argv[1]).items():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            main(words)
        except SystemExit as stop:
            assert not stop.code, (words, stop.code)
    printed[name] = out.getvalue()

from pathlib import Path
import torch
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from tests.support.dequantized import dequantized_model
folder = Path(sys.argv[2])
tokens = torch.randint(3, 512, (1, 60), generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    expected = dequantized_model(folder)(tokens).logits[0]
got = Engine(EngineConfig(folder, dtype="float32", device="cpu")).prompt_logits(tokens[0].tolist())
torch.save({"printed": printed, "expected": expected, "got": got}, sys.argv[3])
"""


@dataclass
class Toy:
    """A checkpoint of toy codes; what each command printed, and the logits."""

    folder: Path
    printed: dict[str, str]
    expected: torch.Tensor
    got: torch.Tensor


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    root = tmp_path_factory.mktemp("toy")
    folder, there, back = (root / name for name in ("quantized", "there", "back"))
    to_toy = ("--method", "rtn", "--format", "toy", "--num-samples", 4, "--seq-len", 64)
    commands: dict[str, tuple[Any, ...]] = {
        "quantize": ("quantize", "--model", SOURCE, "--output", folder, *to_toy),
        "verify": ("verify", folder),
        "there": ("convert", folder, "--format", "compressed-tensors", "--output", there, "--allow-loss"),
        "back": ("convert", there, "--format", "toy", "--output", back, "--allow-loss"),
        "verify back": ("verify", back),
        "kv-plan": ("kv-plan", "--model", folder, "--ctx", "1k", "--json"),
    }  # fmt: skip
    asked = json.dumps({name: [*map(str, words)] for name, words in commands.items()})
    run = [sys.executable, "-c", SCRIPT, asked, str(folder), str(root / "found.pt")]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return Toy(folder, **torch.load(root / "found.pt"))


def test_quantize_records_the_kind(toy: Toy) -> None:
    manifest: dict[str, Any] = json.loads((toy.folder / MANIFEST_NAME).read_text())
    assert {m["scheme"]["grid"] for m in manifest["modules"]} == {"toy"}
    assert all(m["error"] < 1 for m in manifest["modules"])


def test_no_loader_is_claimed_that_does_not_know_the_format(toy: Toy) -> None:
    (line,) = (line for line in toy.printed["quantize"].splitlines() if "loads in" in line)
    assert "llmopt" in line and "vLLM" not in line and "transformers" not in line


def test_verify_proves_it_with_the_second_reader(toy: Toy) -> None:
    assert "proven" in toy.printed["verify"]


def test_convert_reads_and_writes_it(toy: Toy) -> None:
    assert "proven" in toy.printed["verify back"]


def test_the_engine_runs_it_on_the_reference_path(toy: Toy) -> None:
    torch.testing.assert_close(toy.got, toy.expected, atol=1e-4, rtol=1e-4)


def test_kv_plan_knows_its_bytes(toy: Toy) -> None:
    assert "toy1" in json.dumps(json.loads(toy.printed["kv-plan"]))
