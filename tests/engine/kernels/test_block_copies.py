"""Copies of KV blocks in one launch, against torch's."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from llmopt.engine.cache.kv_cache import KvCache
from llmopt.engine.kernels.attention.paged_tensor import (
    BLOCK_COPIES,
    BlockCopiesKernelQuery,
    TorchBlockCopies,
)
from llmopt.engine.kernels.common.devices import VARIABLE
from llmopt.engine.model.layers.spec import KvLayout
from llmopt.engine.scheduling.step_plan import BlockCopies

from ...support.launches import counting
from ...support.triton_world import DEVICE

STEPS = (
    BlockCopies(within=((1, 2), (1, 3), (4, 5)), to_host=((2, 0), (4, 2))),
    BlockCopies(to_host=((5, 1),), from_host=((2, 1), (0, 4))),
    # A block that is both read and written: what was there before is copied.
    BlockCopies(within=((1, 2), (2, 3))),
)


def caches(stored: torch.dtype) -> list[KvCache]:
    layouts = [KvLayout(2, 16, 16), KvLayout(1, 24, 8)]
    made = [KvCache(layouts, 6, 4, torch.device(DEVICE), stored, 3) for _ in "ab"]
    g = torch.Generator().manual_seed(0)
    for first, second in zip(made[0]._parts, made[1]._parts, strict=True):
        values = torch.randint(0, 100, first.shape, generator=g).to(DEVICE)
        first.copy_(values)
        second.copy_(values)
    return made


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.int8], ids=str)
def test_they_are_torchs_copies(stored: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "interpret" if DEVICE == "cpu" else "auto")
    ours, theirs = caches(stored)
    assert type(ours._copies).__name__ == "TritonBlockCopies"
    theirs._copies = TorchBlockCopies(theirs._parts, theirs._on_host)
    for copies in STEPS:
        ours.copy(copies)
        theirs.copy(copies)
    both = zip([*ours._parts, *ours._on_host], [*theirs._parts, *theirs._on_host], strict=True)
    for got, expected in both:
        assert torch.equal(got, expected)


@pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter's launches are counted")
def test_a_swap_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "interpret")
    cache = caches(torch.bfloat16)[0]
    with counting() as counts:
        cache.copy(BlockCopies(to_host=((1, 0), (2, 1), (3, 2)), from_host=((1, 5),)))
    assert counts == Counter({"_copy_blocks": 2})


def test_blocks_of_odd_bytes_are_torchs() -> None:
    assert BLOCK_COPIES.select(BlockCopiesKernelQuery("cuda", 6)).name == "torch"
    assert BLOCK_COPIES.select(BlockCopiesKernelQuery("cuda", 0)).name == "torch"
    assert BLOCK_COPIES.select(BlockCopiesKernelQuery("cuda", 64)).name == "triton"


def test_a_cache_may_have_no_blocks_yet() -> None:
    cache = KvCache([KvLayout(2, 16, 16)], 0, 1, torch.device(DEVICE), torch.float32)
    assert cache.num_bytes == 0
