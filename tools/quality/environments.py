"""An environment for each package that is compared, and how its worker is run in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmopt.base.processor import without_openmp_spins

WORKER = Path(__file__).with_name("worker.py")
PACKAGES: dict[str, tuple[str, ...]] = {
    "gptqmodel": ("gptqmodel==7.6.0",),
    "llmcompressor": ("llmcompressor==0.14.1a20261020", "pulp<4"),  # HIGGS is in no release yet
    "autoround": ("auto-round==0.16.1",),
    "llamacpp": ("llama-cpp-python==0.3.36",),
    "torchao": ("torchao==0.18.0", "transformers"),
    "hqq": ("hqq==0.2.8.post1", "transformers", "accelerate"),
}
ENVIRONMENT = {
    "GPTQMODEL_CPU_WORKERS": "2",  # without it, it does not start on two cores
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}


def interpreter(environments: Path | None, package: str) -> Path | None:
    """The Python of a package; None where it is not installed."""
    if package == "llmopt":
        return Path(sys.executable)
    python = environments / package / "bin" / "python" if environments else None
    return python if python and python.exists() else None


def run(python: Path, package: str, task: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of a package's worker to a task, or {"error": the last line of its output}."""
    with tempfile.TemporaryDirectory() as folder:
        given, answered = Path(folder) / "task.json", Path(folder) / "answer.json"
        given.write_text(json.dumps(task), encoding="utf-8")
        environment = without_openmp_spins(os.environ) | ENVIRONMENT
        environment["OMP_NUM_THREADS"] = str(task["threads"])
        if package != "llmopt":
            environment.pop("PYTHONPATH", None)
        command = [str(python), str(WORKER), package, str(given), str(answered)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
        if done.returncode == 0 and answered.exists():
            return json.loads(answered.read_text(encoding="utf-8"))
    lines = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
    return {"error": lines[-1][:300]}
