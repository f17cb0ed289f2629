"""The first run on a GPU machine, rehearsed on a CPU with the CUDA builds of torch.

    python -m tools.gpu_rehearsal [--build 2.11.0] [--short] [--only quantizers]

Each build has an environment below build/gpu-rehearsal, which is made once (9 GB for all three). In it run
the steps of a first user, with the sources uninstalled and offline. --short runs two of them in this Python:
the collection of `make gpu-check`, and the tests of Triton's kernels under CUDA's division. Exit code 1 if a
step fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from .image import BUILDS, Image

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "gpu-rehearsal"
LINKS = ROOT / "build" / "links"
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
TRITON_TESTS = tuple(
    str(path.relative_to(ROOT))
    for path in sorted(ROOT.glob("tests/engine/kernels/test_triton_*.py"))
)
BIT_EXACT = tuple(
    f"tests/engine/kernels/test_triton_{name}.py"
    for name in ("latent", "layer", "linear", "routing", "sampling")
)
"""Tests with claims of equality to the bit, which a division may break."""
DIVISION = (*PYTEST, "-p", "tests.support.cuda_division", "-m", "not whole")
NO_CARD = """
import torch
assert torch.version.cuda and not torch.cuda.is_available()
print(torch.__version__)
"""
STAND_IN = "tests/engine/kernels/test_flashinfer.py::test_the_stand_in_has_the_library_s"
QUANTIZERS = """
import tempfile, pathlib
from llmopt.bench.gpu_check.stages import quantizers
for case in quantizers(pathlib.Path(tempfile.mkdtemp()), "cpu"):
    for finding in case.run():
        print(finding.what, finding.seen, flush=True)
        assert finding.met, finding
"""


@dataclass(frozen=True, slots=True)
class Step:
    """A command for the environment's Python, with the exit code and the text that it must end with."""

    name: str
    arguments: Sequence[str]
    code: int = 0
    text: str = ""
    is_short: bool = False


STEPS = (
    Step("a CUDA build without a usable card", ("-c", NO_CARD)),
    Step(
        "gpu-check collects its tests",
        (*PYTEST, "--collect-only", "tests/gpu", *TRITON_TESTS),
        is_short=True,
    ),
    Step("the version", ("-m", "llmopt", "--version"), text="llmopt "),
    Step("doctor", ("-m", "llmopt", "doctor"), text="torch"),
    Step(
        "README: quantize",
        (
            "-m",
            "llmopt",
            "quantize",
            "--method",
            "awq",
            "--device",
            "cpu",
            "--output",
            "{folder}/awq",
        ),
    ),
    Step(
        "README: bench names what to install",
        ("-m", "llmopt", "bench", "--dataset", "sharegpt", "--device", "cpu"),
        code=2,
        text="pip install pydantic",
    ),
    Step("README: kv-plan", ("-m", "llmopt", "kv-plan", "--model", "llama-70b", "--ctx", "128k")),
    Step(
        "README: serve-local names what to install",
        ("-m", "llmopt", "serve-local", "--device", "cpu", "--port", "0"),
        code=2,
        text="pip install",
    ),
    Step("quantizers, uninstalled", ("-c", QUANTIZERS)),
    Step(
        "libraries up to their launches",
        (*PYTEST, "-rs", "tests/engine/kernels/test_real_libraries.py", f"{STAND_IN}_parameters"),
    ),
    Step("doctor --gpu on the pretended card", (*PYTEST, "tests/bench/gpu_check")),
    Step(
        "Triton's bit-exact kernels under CUDA's division",
        (*DIVISION, *BIT_EXACT),
        is_short=True,
    ),
    Step(
        "Triton's other kernels under CUDA's division",
        (*DIVISION, *sorted({*TRITON_TESTS} - {*BIT_EXACT})),
    ),
    Step("compile matrix", ("-m", "tools.gpu_matrix", "--out", "{folder}/matrix.json")),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    known = [build.torch for build in BUILDS]
    parser.add_argument("--build", choices=known, action="append")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--only", default="", help="steps with this text in their names")
    arguments = parser.parse_args()
    steps = [step for step in STEPS if arguments.only in step.name]
    if arguments.short:
        own = os.environ | {"PYTHONPATH": str(LINKS), "HF_HUB_OFFLINE": "1"}
        sys.exit(failures([step for step in steps if step.is_short], Path(sys.executable), own) > 0)
    failed = 0
    for build in BUILDS:
        if build.torch in (arguments.build or known):
            image = Image(FOLDER / build.torch, build)
            print(
                f"torch {build.torch}, triton {build.triton}, transformers {build.transformers}",
                flush=True,
            )
            image.make()
            failed += failures(steps, image.python, image.environment(LINKS))
    sys.exit(failed > 0)


def failures(steps: Sequence[Step], python: Path, environment: Mapping[str, str]) -> int:
    """Run the steps and print a line for each; returns the number of those that failed."""
    failed = 0
    for step in steps:
        begin = time.monotonic()
        with TemporaryDirectory() as folder:
            words = [word.replace("{folder}", folder) for word in step.arguments]
            run = subprocess.run(
                [python, *words],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        met = run.returncode == step.code and step.text in run.stdout
        failed += not met
        last = run.stdout.strip().splitlines()[-1:] or [""]
        result, seconds = "ok    " if met else "FAILED", time.monotonic() - begin
        print(f"  {result} {step.name}: {last[0][:100]} ({seconds:.0f} s)", flush=True)
        if not met:
            print("    " + "\n    ".join(run.stdout.strip().splitlines()[-30:]), flush=True)
    return failed


if __name__ == "__main__":
    main()
