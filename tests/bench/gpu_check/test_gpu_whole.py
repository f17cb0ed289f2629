"""All of `doctor --gpu`, each stage a process, on the pretended card; and its record in a plan."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from llmopt.bench.gpu_check.run import STAGES, WHOLE
from llmopt.engine.planner.own_runs import read_run

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.whole
@pytest.mark.timeout(900)
def test_every_stage_ends_with_a_record_that_a_plan_takes(tmp_path: Path) -> None:
    """Kernels of the pretended card compute nothing: that is told, and everything else goes on."""
    out = tmp_path / "gpu.json"
    words = ["-m", "tests.support.pretended_cuda.command", str(out)]
    run = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1, run.stderr
    record = json.loads(out.read_text())
    assert [(stage["name"], stage["ended"]) for stage in record["stages"]] == [
        (stage.name, WHOLE) for stage in STAGES
    ]
    wrong = {
        stage["name"] for stage in record["stages"] for f in stage["findings"] if f["met"] is False
    }
    timed = {"llama-bf16", "llama-int4", "llama-fp8", "mixture", "hybrid"}
    assert wrong <= {"kernels", "quantizers"} | timed, "a CPU takes the time"
    assert record["roofs"] == {"bandwidth": 3e12, "flops": 8e14}
    assert [label.split()[0] for label in record["shares"]] == ["bf16", "int4", "fp8"]
    assert read_run(out, "int4 g128").gpu == "H100 SXM"
    assert "triton-paged" in run.stdout
