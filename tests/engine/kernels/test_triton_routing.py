"""Triton kernels of routing and of expert rows, against torch."""

from __future__ import annotations

import pytest
import torch
from llmopt.engine.kernels.elementwise.reference import torch_clamped_swiglu
from llmopt.engine.kernels.moe.dispatch import RoutingRule, route_torch, router_logits_torch

from ...support.triton_world import DEVICE

RULES = [
    (RoutingRule(2), 5),
    (RoutingRule(1, softmax=False, normalize=False), 4),
    (RoutingRule(3, normalize=False, num_groups=4, topk_groups=1), 24),
    (RoutingRule(4, False, True, 1e-20, 2.5, 4, 2, 2, 1), 16),
]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize(("rule", "count"), RULES, ids=str)
def test_routing(rule: RoutingRule, count: int, corrected: bool) -> None:
    from llmopt.engine.kernels.moe.triton_routing import route_triton

    correction = random(count, seed=1) * 0.1 if corrected else None
    scale = random(count, seed=2).abs() if corrected else None
    for tokens in (0, 1, 7):
        given = random(tokens, count, seed=tokens), rule, correction, scale
        (weights, experts), (expected, ids) = route_triton(*given), route_torch(*given)
        assert torch.equal(experts, ids)
        torch.testing.assert_close(weights, expected)


def test_of_equal_scores_no_expert_is_taken_twice() -> None:
    from llmopt.engine.kernels.moe.triton_routing import route_triton

    rule = RoutingRule(4, num_groups=2, topk_groups=1, group_top_k=2)
    weights, experts = route_triton(torch.zeros(1, 8, device=DEVICE), rule)
    assert experts.tolist() == [[0, 1, 2, 3]]
    torch.testing.assert_close(weights, torch.full((1, 4), 0.25, device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_router_logits(dtype: torch.dtype) -> None:
    from llmopt.engine.kernels.moe.triton_routing import FEW_TOKENS, router_logits

    weight, bias = random(20, 200, seed=3), random(20, seed=4)
    for tokens in (0, 1, 17, FEW_TOKENS + 1):
        x = random(tokens, 200, seed=5).to(dtype)
        for added in (None, bias):
            expected = router_logits_torch(x, weight, added)
            torch.testing.assert_close(
                router_logits(x, weight, added), expected, atol=1e-4, rtol=1e-4
            )


def test_expert_rows() -> None:
    from llmopt.engine.kernels.moe.triton_token_permutation import biased_gate, weighted_sum

    tokens, top_k, count, size = 3, 2, 4, 70
    experts = torch.tensor([3, 0, 1, 1, 0, 2], device=DEVICE)
    rows, bias = random(tokens * top_k, 2 * size), random(count, 2 * size, seed=1)
    gate, up = (rows * 4 + bias[experts]).chunk(2, dim=1)
    expected = torch_clamped_swiglu(gate, up)
    torch.testing.assert_close(biased_gate(rows * 4, bias, experts, "clamped_swiglu"), expected)

    weights, added = random(tokens, top_k, seed=2), random(tokens, 2 * size, seed=3)
    by_token = (rows + bias[experts]).view(tokens, top_k, -1)
    expected = (by_token * weights[:, :, None]).sum(1) + added
    got = weighted_sum(rows, weights, bias, experts, top_k, added)
    torch.testing.assert_close(got, expected)
    plain = weighted_sum(rows, None, None, experts, top_k)
    torch.testing.assert_close(plain, rows.view(tokens, top_k, -1).sum(1))
