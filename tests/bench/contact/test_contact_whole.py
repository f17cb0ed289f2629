"""The whole contact in one go, each stage a process, on the pretended card; and its record in a plan."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from llmopt.bench.contact.record import STAGES, WHOLE
from llmopt.engine.planner.own_runs import read_run

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.whole
@pytest.mark.timeout(900)
def test_a_contact_ends_in_one_go_with_a_record_and_a_page(tmp_path: Path) -> None:
    """Kernels of the pretended card compute nothing: that is told, and everything else goes on."""
    out = tmp_path / "contact.json"
    words = ["-m", "tests.support.pretended_cuda.command", "--small", "--output", str(out)]
    run = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1, run.stderr
    record = json.loads(out.read_text())
    assert [(stage["name"], stage["ended"]) for stage in record["stages"]] == [
        (stage.name, WHOLE) for stage in STAGES
    ]
    wrong = {
        stage["name"] for stage in record["stages"] for f in stage["findings"] if f["met"] is False
    }
    assert wrong <= {"kernels", "quantizers"}, "of the second, what takes a GPU's time on a CPU"
    assert record["roofs"] == {"bandwidth": 3e12, "flops": 8e14}
    assert {"bf16", "int4 g128 sym", "fp8 channel a-fp8-token"} <= record["shares"].keys()
    real = tmp_path / "real.json"
    real.write_text(json.dumps(record | {"small": False}))
    assert read_run(real, "int4 g128").gpu == "H100 SXM"
    text = out.with_suffix(".md").read_text()
    assert text.startswith("# First contact: NVIDIA H100") and "triton-paged" in text
