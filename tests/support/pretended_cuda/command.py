"""`llmopt contact` on the pretended card, each stage in a process of its own.

    python -m tests.support.pretended_cuda.command --small
    TRITON_CACHE_DIR=kernels LLMOPT_COMPILES=9.0 python -m tests.support.pretended_cuda.command -o compiled.json

The second compiles what a GPU of that capability will launch, of one layer of each model, and computes nothing.
Given a stage and a folder it is that stage's process.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from llmopt.bench.contact import run
from llmopt.engine.kernels.common.verdicts import VARIABLE

from .card import Card

COMMAND = (sys.executable, "-m", __spec__.name if __spec__ else __name__)
COMPILES = "LLMOPT_COMPILES"


def main() -> None:
    run.COMMAND = COMMAND
    # Two slow cores are no card: what takes 40 s there may take minutes.
    slower = 60 if COMPILES in os.environ else 6
    run.STAGES = tuple(replace(stage, seconds=slower * stage.seconds) for stage in run.STAGES)
    if sys.argv[1].startswith("-"):
        code = run.main()
        if COMPILES in os.environ:
            count = len([*Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*.cubin")])
            print(f"{count} kernels in {os.environ['TRITON_CACHE_DIR']}")
        sys.exit(code)
    from llmopt.bench.contact import stages

    from .runtime import pretended_cuda

    with ExitStack() as stack:
        card = Card()
        if COMPILES in os.environ:
            card = compiling(sys.argv[1])
            for context in (one_layer(), earning()):
                stack.enter_context(context)
        else:  # no kernel of the pretended card computes anything, so none would earn its place
            os.environ[VARIABLE] = "off"
        stack.enter_context(measuring_nothing())
        stack.enter_context(pretended_cuda(card))
        stages.main()


def compiling(stage: str) -> Card:
    """A card of the capability that is named, whose kernels are compiled into Triton's cache; quantizers alone
    need large tensors' values."""
    from tools.gpu_matrix import ARCHITECTURES

    major, minor = map(int, os.environ[COMPILES].split("."))
    limits = ARCHITECTURES[10 * major + minor].limits
    return Card(
        capability=(major, minor),
        shared_bytes=limits.shared_bytes,
        multiprocessors=limits.multiprocessors,
        compiles=True,
        computed=math.inf if stage == "quantizers" else 1 << 20,
    )


@contextmanager
def one_layer() -> Iterator[None]:
    """One layer of each model, as equal ones take equal kernels, in time for their compilation."""
    from llmopt.bench.contact import models, stages

    config_of, run_cases = models.config_of, stages.run_cases

    def cut(name: str, scale: Any, layers: int | None = None) -> dict[str, Any]:
        return config_of(name, scale, 4 if "3.5" in name else 1)

    def patient(cases: Any, *rest: Any) -> int:
        return run_cases((replace(case, seconds=60 * case.seconds) for case in cases), *rest)

    with ExitStack() as stack:
        stack.enter_context(patch.object(models, "config_of", cut))
        stack.enter_context(patch.object(stages, "config_of", cut))
        stack.enter_context(patch.object(stages, "run_cases", patient))
        yield


@contextmanager
def earning() -> Iterator[None]:
    """Trials in which every kernel earns its place, on a driver that serves what torch does."""
    from llmopt.engine.kernels.common import devices, verdicts

    with TemporaryDirectory() as folder, ExitStack() as stack:
        for target, name, value in (
            (devices, "_cuda_of_driver", lambda: 13000),
            (verdicts, "verdict_file", lambda *_: Path(folder) / "verdicts.json"),
            (verdicts, "relative_error", lambda *_: 0.0),
            (verdicts, "_without_slower", dict),
            (torch, "equal", lambda *_: True),  # as the search of trellis codes asks of its kernel
        ):
            stack.enter_context(patch.object(target, name, value))
        yield


@contextmanager
def measuring_nothing() -> Iterator[None]:
    """Roofs of a card, a checkpoint that the CPU writes, and no profile, which wants CUPTI."""
    from llmopt.bench.contact import models, stages

    write: Any = models.write_checkpoint
    replacements = {
        "copy_bandwidth": lambda device: 3e12,
        "matmul_flops": lambda device, dtype: 8e14,
        "write_checkpoint": lambda *args: write(*args[:3], "cpu"),
        "profiled": lambda step: [("_attend", 1.0, 1.0)],
    }
    with ExitStack() as stack:
        for name, value in replacements.items():
            stack.enter_context(patch.object(models, name, value))
        stack.enter_context(
            patch.object(stages, "write_checkpoint", replacements["write_checkpoint"])
        )
        yield


if __name__ == "__main__":
    main()
