"""Kernels that a machine without a GPU compiles into Triton's cache: a contact that has one compiles nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ...support.pretended_cuda.command import COMPILES
from ...support.pretended_cuda.runtime import load_guard

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.whole
@pytest.mark.timeout(900)
def test_a_second_contact_on_another_machine_compiles_nothing(tmp_path: Path) -> None:
    """Triton's key holds its package, the source, signature, options, target and assembler, and no machine.

    A cache does hold its own path, which therefore is a relative one.
    """
    pytest.importorskip("triton", reason="Triton is for Linux alone")
    load_guard()  # here, as a skip within the processes below would be their failure
    environment = {name: value for name, value in os.environ.items() if "TRITON" not in name}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment |= {"PYTHONPATH": path, "TRITON_CACHE_DIR": "kernels", COMPILES: "9.0"}

    def compiled(machine: str) -> set[str]:
        (tmp_path / machine).mkdir(exist_ok=True)
        words = ["--small", "--again", "--stages", "llama-8b-int4", "--output", "compiled.json"]
        command = [sys.executable, "-m", "tests.support.pretended_cuda.command", *words]
        done = subprocess.run(
            command, cwd=tmp_path / machine, env=environment, capture_output=True, text=True
        )
        record = json.loads((tmp_path / machine / "compiled.json").read_text())
        assert [stage["ended"] for stage in record["stages"]] == ["whole"] * 2, done.stderr
        return {f"{file.parent.name}/{file.name}" for file in tmp_path.glob("*/kernels/*/*.cubin")}

    first = compiled("here")
    assert any("attend" in name for name in first) and any("gemm" in name for name in first), first
    (tmp_path / "here").rename(tmp_path / "there")
    assert compiled("there") == first
