"""Launches of the kernels of model families: routing, experts, latent attention, wide norms, block copies."""

from __future__ import annotations

from collections.abc import Callable

import torch
from llmopt.engine.kernels.attention.paged_tensor import PagedTensor
from llmopt.engine.kernels.elementwise.reference import HeadNorms, RopeCall
from llmopt.engine.kernels.moe.experts import RoutingRule

from tools.triton_launches import E4M3, has_fp8

BF16, CPU = torch.bfloat16, torch.device("cpu")


def routing() -> None:
    """Launch the routing of gpt-oss, Qwen3-MoE and DeepSeek-V3, of few and of many tokens."""
    from llmopt.engine.kernels.moe.triton_routing import route_triton, router_logits
    from llmopt.engine.kernels.moe.triton_token_permutation import permute_tokens

    deepseek = RoutingRule(8, False, True, 1e-20, 2.5, 8, 4, 2, 1)
    for rule, count in ((RoutingRule(4), 32), (RoutingRule(8), 128), (deepseek, 256)):
        bias = torch.zeros(count)
        router_logits(torch.zeros(4, 2880, dtype=BF16), torch.zeros(count, 2880), bias)
        route_triton(torch.zeros(4, count), rule, bias if rule.num_groups > 1 else None)
        for tokens in (4, 2048):
            permute_tokens(torch.zeros(tokens * rule.top_k, dtype=torch.int64), count, rule.top_k)


def experts() -> None:
    """Launch what surrounds the grouped GEMMs: biases, gates, the weighted sum."""
    from llmopt.engine.kernels.moe.triton_token_permutation import biased_gate, weighted_sum

    rows, bias = torch.zeros(16, 5760, dtype=BF16), torch.zeros(32, 5760, dtype=BF16)
    ids = torch.zeros(16, dtype=torch.int64)
    biased_gate(rows, bias, ids, "clamped_swiglu")
    weighted_sum(rows, torch.zeros(4, 4), bias, ids, 4, torch.zeros(4, 5760, dtype=BF16))
    weighted_sum(rows, None, None, ids, 4)


def latent() -> None:
    """Launch DeepSeek-V3's latent attention, up to paged attention, for every stored type of a GPU."""
    from llmopt.engine.kernels.elementwise.triton_cache_write import TritonLatent

    kernel, angles = TritonLatent(), torch.zeros(4, 1, 64, dtype=BF16)
    turn = angles, angles
    both = torch.zeros(4, 1536 + 576, dtype=BF16)
    queries, row = both.split([1536, 576], dim=1)
    norms = (torch.zeros(512, dtype=BF16), 1e-6), (torch.zeros(1536, dtype=BF16), 1e-6)
    slots = torch.arange(4)
    for stored in (BF16, torch.int8, *([E4M3] if has_fp8() else [])):
        cache = PagedTensor.zeros(4, 16, 1, 576, CPU, stored)
        kernel.write(row, norms[0], queries, norms[1], turn, True, cache, slots)
    heads = torch.zeros(4, 128, 192, dtype=BF16)
    kernel.queries(torch.zeros(128, 4, 512, dtype=BF16), heads[..., 128:], turn, True)


def wide_norms() -> None:
    """Launch norms with float32 weights beside 16-bit rows."""
    from llmopt.engine.kernels.elementwise.triton_cache_write import TritonRopeAndCache
    from llmopt.engine.kernels.elementwise.triton_rows import TritonNorm

    x, weight = torch.zeros(4, 3840, dtype=BF16), torch.zeros(3840)
    TritonNorm(weight, 1e-6)(x, x)
    turn = torch.zeros(4, 1, 256, dtype=BF16)
    cache = PagedTensor.zeros(4, 16, 8, 256, CPU, BF16)
    norms = HeadNorms(torch.zeros(256), torch.zeros(256), 1e-6)
    stacked = torch.zeros(4, 32, 256, dtype=BF16)
    TritonRopeAndCache()(RopeCall(stacked, 16, turn, turn, cache, cache, torch.arange(4), norms))


def block_copies() -> None:
    """Launch copies of blocks within the cache, to the host and back."""
    from llmopt.engine.kernels.attention.triton_block_copies import TritonBlockCopies

    parts = [torch.zeros(4, 16, 8, 128, dtype=BF16) for _ in range(2)]
    copies = TritonBlockCopies(parts, parts)
    copies.within([(0, 1)])
    copies.to_host([(0, 1)])
    copies.from_host([(0, 1)])


FAMILY_LAUNCHES: dict[str, Callable[[], None]] = {
    "block copies": block_copies,
    "wide norms": wide_norms,
    "around experts": experts,
    "routing": routing,
    "latent attention, before it": latent,
}
