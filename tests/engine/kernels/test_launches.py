"""Launches of a decode step, a layer, with Triton's kernels: what no later change may raise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from llmopt.engine.kernels.common.devices import VARIABLE

from tools.launches import launches_per_layer

from ...support.model_families import FAMILIES
from ...support.triton_world import DEVICE

MOST = {"llama-3.1": 10, "gemma-3": 12, "qwen3-moe": 14, "gpt-oss": 15, "deepseek-v3": 20}


@pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter's launches are counted")
@pytest.mark.parametrize("family", MOST)
def test_launches_a_layer(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "interpret")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    counts = launches_per_layer(*FAMILIES[family], tmp_path)
    assert 0 < counts.total() <= MOST[family], counts
