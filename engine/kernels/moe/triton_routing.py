# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false
"""Router logits and top-k routing in Triton.

Logits are 16-bit rows times a float32 weight, without a float32 copy of the rows; scores, groups, selection
and weights of a token take one launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional

from ..common.devices import power_of_two
from .dispatch import RoutingRule

FEW_TOKENS = 64
"""Tokens up to which a program's tile of experts meets all of them; beyond, cuBLAS multiplies."""
TOKENS, EXPERTS, RUN = tl.constexpr(16), tl.constexpr(16), tl.constexpr(128)


@triton.jit(do_not_specialize=["tokens"])
def _router_logits(x_ptr, weight_ptr, bias_ptr, out_ptr, tokens, experts, size, x_row):
    """Grid: tiles of experts, tiles of tokens. Three TF32 products make a float32 one."""
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_token, is_expert = token < tokens, expert < experts
    total = tl.zeros([TOKENS, EXPERTS], tl.float32)
    for begin in range(0, size, RUN):
        lane = begin + tl.arange(0, RUN)
        pointers = x_ptr + token.to(tl.int64)[:, None] * x_row + lane[None, :]
        x = tl.load(pointers, mask=is_token[:, None] & (lane < size)[None, :], other=0.0)
        pointers = weight_ptr + expert[None, :] * size + lane[:, None]
        weight = tl.load(pointers, mask=is_expert[None, :] & (lane < size)[:, None], other=0.0)
        total = tl.dot(x.to(tl.float32), weight, total, input_precision="tf32x3")
    if bias_ptr is not None:
        total += tl.load(bias_ptr + expert, mask=is_expert, other=0.0)[None, :]
    pointers = out_ptr + token[:, None] * experts + expert[None, :]
    tl.store(pointers, total, mask=is_token[:, None] & is_expert[None, :])


def router_logits(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`x [tokens, hidden] @ weight.T + bias` in float32, [tokens, experts]; weight and bias are float32."""
    tokens, experts = x.shape[0], weight.shape[0]
    if tokens > FEW_TOKENS or x.dtype is torch.float32 or x.stride(1) != 1:
        return functional.linear(x.float(), weight, bias)
    out = weight.new_empty(tokens, experts)
    if tokens:
        grid = -(-experts // EXPERTS.value), -(-tokens // TOKENS.value)
        pointers = x, weight, bias, out
        sizes = tokens, experts, weight.shape[1], x.stride(0)
        _router_logits[grid](*pointers, *sizes, num_warps=4)
    return out


@triton.jit
def _limited_to_top_groups(scores, lane, EXPERTS: tl.constexpr, RULE: tl.constexpr):
    """The scores, -inf outside the best groups; of equal groups the first ones are taken."""
    GROUPS: tl.constexpr = RULE.num_groups
    TOPK_GROUPS: tl.constexpr = RULE.topk_groups
    GROUP_TOP_K: tl.constexpr = RULE.group_top_k
    SIZE: tl.constexpr = EXPERTS // GROUPS
    group = lane // SIZE
    best = tl.full(scores.shape, 0.0, tl.float32)
    for number in tl.static_range(GROUPS):
        members = tl.where(group == number, scores, float("-inf"))
        total = tl.max(members, 0)
        for _ in tl.static_range(GROUP_TOP_K - 1):
            members = tl.where(lane == tl.argmax(members, 0), float("-inf"), members)
            total += tl.max(members, 0)
        best = tl.where(group == number, total, best)
    best = tl.where(lane < EXPERTS, best, float("-inf"))
    is_top = lane < 0
    for _ in tl.static_range(TOPK_GROUPS):
        top = tl.argmax(best, 0) // SIZE
        is_top = is_top | (group == top)
        best = tl.where(group == top, float("-inf"), best)
    return tl.where(is_top, scores, float("-inf"))


@triton.jit
def _route(
    logit_ptr,
    correction_ptr,
    expert_scale_ptr,
    weight_ptr,
    expert_ptr,
    logit_row,
    least_sum,
    scale,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    RULE: tl.constexpr,
):
    """Grid: tokens. Of experts with equal scores the first is taken."""
    TOP_K: tl.constexpr = RULE.top_k
    SHARED: tl.constexpr = RULE.num_shared
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    is_expert = lane < EXPERTS
    logit = tl.load(logit_ptr + token * logit_row + lane, mask=is_expert, other=float("-inf"))
    if RULE.softmax:
        score = tl.exp(logit - tl.max(logit, 0))
        score = score / tl.sum(score, 0)
    else:
        score = 1.0 / (1.0 + tl.exp(-logit))
    left = tl.where(is_expert, score, float("-inf"))
    if correction_ptr is not None:
        left += tl.load(correction_ptr + lane, mask=is_expert, other=0.0)
    if RULE.num_groups > 1:
        left = _limited_to_top_groups(left, lane, EXPERTS, RULE)
    slot = tl.arange(0, SLOTS)
    weight = tl.full([SLOTS], 0.0, tl.float32)
    expert = EXPERTS - TOP_K + slot
    for choice in tl.static_range(TOP_K):
        best = tl.argmax(left, 0)
        weight = tl.where(slot == choice, tl.sum(tl.where(lane == best, score, 0.0), 0), weight)
        expert = tl.where(slot == choice, best, expert)
        left = tl.where(lane == best, float("-inf"), left)
    if RULE.normalize:
        weight = weight / (tl.sum(weight, 0) + least_sum)
    is_routed = slot < TOP_K
    if expert_scale_ptr is not None:
        weight *= tl.load(expert_scale_ptr + expert, mask=is_routed, other=0.0)
    weight = tl.where(is_routed, weight * scale, 1.0)
    choice = token * (TOP_K + SHARED) + slot
    tl.store(weight_ptr + choice, weight, mask=slot < TOP_K + SHARED)
    tl.store(expert_ptr + choice, expert.to(tl.int64), mask=slot < TOP_K + SHARED)


def route_triton(
    logits: torch.Tensor,
    rule: RoutingRule,
    correction: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Route` in Triton."""
    tokens, count = logits.shape
    slots = rule.top_k + rule.num_shared
    weights = logits.new_empty(tokens, slots)
    experts = torch.empty(tokens, slots, dtype=torch.int64, device=logits.device)
    if tokens:
        block = power_of_two(count)
        _route[(tokens,)](
            *(logits, correction, expert_scale, weights, experts),
            *(logits.stride(0), float(rule.least_sum), float(rule.scale)),
            EXPERTS=count,
            BLOCK=block,
            SLOTS=power_of_two(slots),
            RULE=rule,
            num_warps=max(1, min(4, block // 64)),
        )
    return weights, experts
