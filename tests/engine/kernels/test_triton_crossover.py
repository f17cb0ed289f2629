"""Crossover between fused GEMM and dequantize + cuBLAS: the sizes tried, and that the result is cached."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.engine.kernels.common.verdicts import Quartiles, VerdictTable
from llmopt.engine.kernels.linear import triton_linear
from llmopt.engine.kernels.linear.triton_linear import (
    DEFAULT_CROSSOVER,
    TOKENS,
    crossover_tokens,
    last_faster_size,
)


def test_the_crossover_is_the_last_before_the_first_that_is_slower() -> None:
    assert last_faster_size(lambda tokens: True) == TOKENS[-1]
    assert last_faster_size(lambda tokens: tokens < 64) == 32
    assert last_faster_size(lambda tokens: tokens != 32) == 16
    assert last_faster_size(lambda tokens: False) == 1


def test_nothing_is_measured_without_a_gpu() -> None:
    def gemm(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("it was tried")

    assert crossover_tokens("any", torch.ones(256, 8), gemm, gemm) == DEFAULT_CROSSOVER


def test_it_is_measured_once_on_a_device_and_kept_in_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Activations:
        device = torch.device("cuda")

        def __getitem__(self, rows: slice) -> int:
            return rows.stop

    def seconds(call: Callable[[], Any]) -> Quartiles:
        timed.append(call())
        return Quartiles(timed[-1], timed[-1], timed[-1])

    def measured() -> int:
        table = VerdictTable(tmp_path / "card.json", seconds)
        monkeypatch.setattr(triton_linear, "current_verdicts", lambda: table)
        inputs: Any = Activations()
        # The fused GEMM takes a second a token, the other a hundred for any number.
        return crossover_tokens("int4", inputs, lambda x: x, lambda x: 100)  # type: ignore

    timed: list[float] = []
    monkeypatch.setattr(triton_linear, "seconds_of", seconds)
    assert measured() == 64
    assert timed == [16, 100, 32, 100, 64, 100, 128, 100]
    assert measured() == 64 and len(timed) == 8  # another process
