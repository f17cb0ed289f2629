"""Kernels that a machine without a GPU compiles into Triton's cache: a process that has one compiles nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ...support.pretended_cuda.runtime import load_guard

ROOT = Path(__file__).resolve().parents[3]
LAUNCHES = """
import json, torch
from triton import knobs
from llmopt.engine.kernels.elementwise.triton_rows import TritonGate, TritonNorm
from tests.support.pretended_cuda.card import Card
from tests.support.pretended_cuda.runtime import pretended_cuda

found = {}
knobs.compilation.listener = lambda src, cache_hit, **_: found.update({src.name: cache_hit})
with pretended_cuda(Card(compiles=True)):
    x = torch.zeros(4, 64, dtype=torch.bfloat16, device="cuda")
    TritonNorm(x[0], 1e-5)(x, x)
    TritonGate("silu")(x, x)
print(json.dumps(found))
"""


@pytest.mark.whole
@pytest.mark.timeout(900)
def test_a_second_process_on_another_machine_compiles_nothing(tmp_path: Path) -> None:
    """Triton's key holds its package, the source, signature, options, target and assembler, and no machine.

    A cache does hold its own path, which therefore is a relative one.
    """
    pytest.importorskip("triton", reason="Triton is for Linux alone")
    load_guard()  # here, as a skip within the processes below would be their failure
    environment = {name: value for name, value in os.environ.items() if "TRITON" not in name}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment |= {"PYTHONPATH": path, "TRITON_CACHE_DIR": "kernels"}

    def hits(machine: str) -> dict[str, bool]:
        (tmp_path / machine).mkdir(exist_ok=True)
        run = [sys.executable, "-c", LAUNCHES]
        done = subprocess.run(
            run, cwd=tmp_path / machine, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    assert hits("here") == {"_norm": False, "_gate": False}
    (tmp_path / "here").rename(tmp_path / "there")
    assert hits("there") == {"_norm": True, "_gate": True}
