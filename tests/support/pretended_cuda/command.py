"""`llmopt doctor --gpu` with small shapes on the pretended card, each stage in a process of its own.

    python -m tests.support.pretended_cuda.command record.json

With --count it prints how many kernels each case of the stage of kernels launches first; nothing is compiled.
Given a stage and a file of lines it is that stage's process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from llmopt.bench.gpu_check import run
from llmopt.bench.machine.kernel_table import ONE_LAUNCH, WHOLE, Sizes
from llmopt.engine.kernels.common.verdicts import VARIABLE, current_verdicts

from .card import Card

COMMAND = (sys.executable, "-m", __spec__.name if __spec__ else __name__)
DECODE, PREFILL = ((1, 8), (3, 24)), 24
CONFIG = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 256,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
"""Fields of a small model's config."""


def main() -> None:
    if len(sys.argv) > 2 and sys.argv[2].endswith(".jsonl"):
        run_stage()
        return
    if sys.argv[1] == "--count":
        print(json.dumps(count_kernels()))
        return
    run.COMMAND = COMMAND
    # Two slow cores are no card: what takes 40 s there may take minutes.
    stages = [replace(stage, seconds=6 * stage.seconds) for stage in run.STAGES]
    record = run.check_gpu(Path(sys.argv[1]), print, stages)
    sys.exit(1 if run.failures(record) else 0)


def run_stage() -> None:
    """Run the stage that the command line names on the pretended card."""
    from llmopt.bench.gpu_check import stages

    from .runtime import pretended_cuda

    os.environ[VARIABLE] = "off"  # no kernel of the pretended card computes anything
    with small_shapes(), pretended_cuda(Card()):
        stages.main()


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
def small_shapes(sizes: Sizes = ONE_LAUNCH) -> Iterator[None]:
    """Small models that the CPU writes, launches of one size, and roofs of a card, which are not measured."""
    from llmopt.bench.gpu_check import models, stages

    config_of: Any = models.config_of

    def small(name: str, layers: int | None) -> dict[str, Any]:
        whole = config_of(name, None)
        fields = config_of(name, layers or CONFIG["num_hidden_layers"])
        layered = {"num_hidden_layers": fields["num_hidden_layers"]}
        return fields | {key: value for key, value in CONFIG.items() if key in whole} | layered

    with ExitStack() as stack:
        for target, name, value in (
            (models, "copy_bandwidth", lambda device: 3e12),
            (models, "matmul_flops", lambda device, dtype: 8e14),
            (models, "_random_tensors", partial(models._random_tensors, device="cpu")),
            (models, "config_of", small),
            (models, "DECODE", DECODE),
            (stages, "DECODE", DECODE),
            (models, "PREFILL", PREFILL),
            (stages, "PREFILL", PREFILL),
            (models, "COMPILE_CACHE_BYTES", 1 << 22),
            (models, "STEPS", 2),
            (models, "PROMPTS", 1),
            (stages, "SELF_TESTS", partial(stages.SELF_TESTS, sizes=sizes)),
        ):
            stack.enter_context(patch.object(target, name, value))
        models.roofs.cache_clear()
        yield
        models.roofs.cache_clear()


def count_kernels() -> list[int]:
    """Kernels that each case of the stage of kernels is the first to launch in its process, by Triton's keys."""
    from llmopt.bench.gpu_check import stages
    from triton.runtime import jit

    from tools.gpu_matrix import ARCHITECTURES

    from .runtime import pretended_cuda

    keys: set[tuple[str, str]] = set()
    counts = []

    def note(self: Any, key: str, *_: Any) -> None:
        keys.add((self.fn.__name__, str(key)))

    limits = ARCHITECTURES[90].limits
    card = Card(
        shared_bytes=limits.shared_bytes,
        multiprocessors=limits.multiprocessors,
        compiles=True,
        computed=1 << 20,
    )
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        for context in (earning(), small_shapes(WHOLE), pretended_cuda(card)):
            stack.enter_context(context)
        stack.enter_context(patch.object(jit.JITFunction, "_do_compile", note))
        for case in stages.kernels(Path(folder)):
            keys.clear()
            if (table := current_verdicts()) is not None:  # as in a process of its own
                table.clear()
            list(case.run())
            counts.append(len(keys))
    return counts


if __name__ == "__main__":
    main()
