"""Caches whose unwritten memory is NaN, so that whatever weighs it, with 0 too, shows in the tokens."""

from __future__ import annotations

import pytest
import torch
from llmopt.engine.kernels.attention.paged_tensor import PagedTensor
from llmopt.engine.model.layers.state import StateLayout


def fill_with_nan(paged: PagedTensor) -> PagedTensor:
    """NaN in every slot, in 8 bits the largest code under a scale of NaN."""
    for part in paged.parts:
        _fill(part)
    return paged


def fill_new_memory_with_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """New KV blocks and state slots hold NaN."""
    blocks, slots = PagedTensor.empty, StateLayout.empty
    monkeypatch.setattr(PagedTensor, "empty", lambda *given: fill_with_nan(blocks(*given)))
    monkeypatch.setattr(StateLayout, "empty", lambda *given: _fill(slots(*given)))


def _fill(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(torch.nan if tensor.is_floating_point() else 127)
