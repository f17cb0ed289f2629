"""`llmopt contact` on the pretended card, each stage in a process of its own: `python -m ….command --small`.

Given a stage and a folder it is that stage's process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from llmopt.bench.contact import run
from llmopt.engine.kernels.common.verdicts import VARIABLE

from .card import Card

COMMAND = (sys.executable, "-m", __spec__.name if __spec__ else __name__)


def main() -> None:
    run.COMMAND = COMMAND
    # Two slow cores are no card: what takes 40 s there may take minutes.
    run.STAGES = tuple(replace(stage, seconds=6 * stage.seconds) for stage in run.STAGES)
    if sys.argv[1].startswith("-"):
        sys.exit(run.main())
    from llmopt.bench.contact import stages

    from .runtime import pretended_cuda

    # No kernel of the pretended card computes anything, so none would earn its place.
    os.environ[VARIABLE] = "off"
    with measuring_nothing(), pretended_cuda(Card()):
        stages.main()


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
