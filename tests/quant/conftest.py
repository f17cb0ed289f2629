"""Checkpoints that several tests look at, made once."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from llmopt.quant.pipeline.pipeline import QuantizeResult, quantize
from llmopt.quant.plan.request import QuantizeRequest

from ..support.cli_process import run_llmopt
from ..support.quant_support import LENGTH, SAMPLES, STORIES, llmopt_environment


@pytest.fixture(scope="session")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., QuantizeResult]:
    """Quantize stories3M in-process with the given options, once for each set of them."""
    done: dict[tuple[tuple[str, object], ...], QuantizeResult] = {}

    def make(**options: object) -> QuantizeResult:
        key = tuple(sorted(options.items()))
        if key not in done:
            output = tmp_path_factory.mktemp("quantized") / "stories3M"
            settings = {"num_samples": SAMPLES, "seq_len": LENGTH, "model_name": "stories3M"}
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            done[key] = quantize(QuantizeRequest(STORIES, output, **(settings | options)))  # pyright: ignore[reportArgumentType]
            torch.set_num_threads(threads)
        return done[key]

    return make


@pytest.fixture
def model_copy(tmp_path: Path) -> Path:
    """A copy of stories3M that a test may damage."""
    return Path(shutil.copytree(STORIES, tmp_path / "model"))


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the real command line in `tmp_path`."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_llmopt(*arguments, cwd=tmp_path, env=llmopt_environment(), timeout=120)

    return run
