"""Fused kernels of multi-head latent attention, against what attention composes without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from llmopt.engine.kernels.attention.paged_tensor import PagedTensor
from llmopt.engine.kernels.elementwise.reference import (
    apply_rotary_emb,
    expand_cos_sin,
    interleaved_to_halves,
)
from torch.nn import functional

from ...support.triton_world import DEVICE

TOKENS, HEADS, RANK, ROPE, QUERY_RANK = 5, 6, 24, 8, 40


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def turned(x: torch.Tensor, cos_sin: Any, interleaved: bool) -> torch.Tensor:
    return apply_rotary_emb(interleaved_to_halves(x, ROPE) if interleaved else x, *cos_sin)


@pytest.mark.parametrize("stored", [torch.float32, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_norms_rotation_and_cache_write(interleaved: bool, stored: torch.dtype) -> None:
    from llmopt.engine.kernels.elementwise.triton_cache_write import TritonLatent

    both = random(TOKENS, QUERY_RANK + RANK + ROPE)
    queries, latent = both.split([QUERY_RANK, RANK + ROPE], dim=1)
    weights = random(RANK, seed=1), random(QUERY_RANK, seed=2)
    angle = random(TOKENS, 1, ROPE // 2, seed=3) * 3
    cos_sin = expand_cos_sin(angle.cos(), angle.sin())
    slots = torch.tensor([7, 0, 3, 11, 2], device=DEVICE)
    key = turned(latent[:, None, RANK:], cos_sin, interleaved)
    normed = functional.rms_norm(latent[:, :RANK], (RANK,), weights[0], 1e-6)
    caches = [PagedTensor.zeros(3, 4, 1, RANK + ROPE, torch.device(DEVICE), stored) for _ in "ab"]
    caches[0].write(torch.cat([normed[:, None], key], dim=-1), slots)
    got = TritonLatent().write(
        latent,
        (weights[0], 1e-6),
        queries,
        (weights[1], 1e-5),
        cos_sin,
        interleaved,
        caches[1],
        slots,
    )
    assert got is not None
    torch.testing.assert_close(got, functional.rms_norm(queries, (QUERY_RANK,), weights[1], 1e-5))
    blocks = torch.arange(3, device=DEVICE)
    expected, written = (cache.read(blocks, torch.float32) for cache in caches)
    # The last bit of a sum may decide an 8-bit code.
    bound = {torch.int8: 0.05, torch.float8_e4m3fn: 0.3}.get(stored, 1e-5)
    torch.testing.assert_close(written, expected, atol=bound, rtol=bound)
    assert (written - expected).abs().mean() < 4e-3


@pytest.mark.parametrize("interleaved", [False, True])
def test_queries(interleaved: bool) -> None:
    from llmopt.engine.kernels.elementwise.triton_cache_write import TritonLatent

    heads = random(TOKENS, HEADS, 16 + ROPE)
    absorbed = random(HEADS, TOKENS, RANK, seed=1)
    angle = random(TOKENS, 1, ROPE // 2, seed=2)
    cos_sin = expand_cos_sin(angle.cos(), angle.sin())
    expected = [absorbed.transpose(0, 1), turned(heads[..., 16:], cos_sin, interleaved)]
    got = TritonLatent().queries(absorbed, heads[..., 16:], cos_sin, interleaved)
    torch.testing.assert_close(got, torch.cat(expected, dim=-1))


def test_offsets_of_absorbed_queries_have_64_bits() -> None:
    """Rows of a head lie together, so that a head of a long prompt begins beyond 2^31 elements."""
    from llmopt.engine.kernels.elementwise.triton_cache_write import TritonLatent

    apart = 2**30 + 32
    # An offset of 32 bits would be read 2^32 elements before: there are zeros in the memory, too.
    memory = torch.empty(4 * apart + TOKENS * RANK, dtype=torch.bfloat16, device=DEVICE)
    absorbed = memory.as_strided((3, TOKENS, RANK), (apart, RANK, 1), 2 * apart)
    absorbed.copy_(random(3, TOKENS, RANK))
    memory[128 : 128 + TOKENS * RANK] = 0
    cos_sin = (
        torch.ones(TOKENS, 1, ROPE, device=DEVICE),
        torch.zeros(TOKENS, 1, ROPE, device=DEVICE),
    )
    turned_queries = random(TOKENS, 3, ROPE).to(torch.bfloat16)
    got = TritonLatent().queries(absorbed, turned_queries, cos_sin, False)
    torch.testing.assert_close(got[..., :RANK], absorbed.transpose(0, 1))
