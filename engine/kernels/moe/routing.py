"""Top-k routing of a mixture of experts: from router logits to experts and their weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How experts are selected and weighed.

    Attributes:
        top_k: experts of a token.
        softmax: scores are the softmax over all experts; else the sigmoid of each logit.
        normalize: the weights are divided by their sum plus `least_sum`.
        scale: factor on the weights after that.
        num_groups, topk_groups: experts are selected from the best `topk_groups` of `num_groups` groups; a
            group's score is the sum of its `group_top_k` best.
        num_shared: experts after the routed ones that every token is given too, with weight 1.
    """

    top_k: int
    softmax: bool = True
    normalize: bool = True
    least_sum: float = 0.0
    scale: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    group_top_k: int = 1
    num_shared: int = 0


Route = Callable[
    [torch.Tensor, RoutingRule, torch.Tensor | None, torch.Tensor | None],
    tuple[torch.Tensor, torch.Tensor],
]
"""From float32 logits [tokens, experts], a rule, a correction of the scores for selection, float32 [experts],
and a factor on each expert's weight, float32 [experts], to weights, float32, and expert ids, int64,
[tokens, top_k + num_shared] each."""


RouterLogits = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""From rows [tokens, hidden], a float32 weight [experts, hidden] and bias [experts] to float32 logits."""


def router_logits_torch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`RouterLogits` in torch: the reference."""
    return functional.linear(x.float(), weight, bias)


def route_torch(
    logits: torch.Tensor,
    rule: RoutingRule,
    correction: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Route` in torch: the reference."""
    scores = logits.softmax(dim=-1) if rule.softmax else logits.sigmoid()
    selection_scores = scores if correction is None else scores + correction
    if rule.num_groups > 1:
        selection_scores = _limit_to_top_groups(selection_scores, rule)
    experts = selection_scores.topk(rule.top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    if rule.normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + rule.least_sum)
    if expert_scale is not None:
        weights = weights * expert_scale[experts]
    weights = weights * rule.scale
    if not rule.num_shared:
        return weights, experts
    shared = torch.arange(logits.shape[1], logits.shape[1] + rule.num_shared, device=logits.device)
    shared = shared.expand(len(logits), -1)
    ones = weights.new_ones(shared.shape)
    return torch.cat([weights, ones], dim=1), torch.cat([experts, shared], dim=1)


def _limit_to_top_groups(selection_scores: torch.Tensor, rule: RoutingRule) -> torch.Tensor:
    grouped = selection_scores.unflatten(1, (rule.num_groups, -1))
    best = grouped.topk(rule.group_top_k, dim=-1).values.sum(dim=-1)
    in_top_groups = torch.zeros_like(best, dtype=torch.bool)
    in_top_groups.scatter_(1, best.topk(rule.topk_groups, dim=-1).indices, True)
    return grouped.masked_fill(~in_top_groups[..., None], float("-inf")).flatten(1)
