"""Crossover between fused GEMM and dequantize + cuBLAS: the sizes tried, and that the result is cached."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from llmopt.engine.kernels.linear import triton_crossover as crossover
from llmopt.engine.kernels.linear.triton_crossover import (
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


def test_a_response_is_measured_once(tmp_path: Path) -> None:
    path, asked = tmp_path / "new" / "device.json", []

    def measure() -> int:
        asked.append(1)
        return 32

    for _ in range(2):
        assert crossover.cached_crossover(path, "int4", measure) == 32
    crossover._known.cache_clear()  # another process
    assert crossover.cached_crossover(path, "int4", measure) == 32 and len(asked) == 1
    assert crossover.cached_crossover(path, "fp8", lambda: 128) == 128
    assert json.loads(path.read_text()) == {"int4": 32, "fp8": 128}


@pytest.mark.parametrize("text", ["", "[1]", '{"int4": "many"}', "\x00"])
def test_a_damaged_file_is_measured_anew(text: str, tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    path.write_text(text)
    assert crossover.cached_crossover(path, "int4", lambda: 16) == 16
    assert json.loads(path.read_text()) == {"int4": 16}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert crossover.cached_crossover(tmp_path / "file" / "device.json", "int4", lambda: 16) == 16


def test_the_file_is_of_the_device_and_of_the_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = {crossover._file(name) for name in ("NVIDIA H200", "NVIDIA H100 80GB HBM3")}
    assert len(names) == 2 and all(name.is_relative_to(tmp_path) for name in names)
    crossover._file.cache_clear()
    monkeypatch.setattr(crossover, "SOURCES", ("triton_gemm.py",))
    assert crossover._file("NVIDIA H200") not in names
    crossover._file.cache_clear()
