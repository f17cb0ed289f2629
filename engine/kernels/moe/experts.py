"""Mixture of experts: interfaces, top-k routing from router logits, and the reference, a loop over experts.

The kernels are tried on the experts themselves, with random routing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch.nn import functional

from ..common.verdicts import RandomInputs, Trial, tolerance
from ..linear.linear import LinearKernel


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


class ExpertLinear(Protocol):
    """A linear of an expert."""

    @property
    def kernel(self) -> LinearKernel | None:
        """The GEMM kernel, if the linear is a single one; None: there are several."""
        ...

    @property
    def bias(self) -> torch.Tensor | None:
        """`[out]`, or None."""
        ...

    @property
    def weight_bytes(self) -> int: ...


class RoutedExpert(Protocol):
    """An MLP, gated or not."""

    @property
    def weight_bytes(self) -> int: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class PlainExpert(RoutedExpert, Protocol):
    """An MLP without a gate: `down(activation(up))`."""

    @property
    def up(self) -> ExpertLinear: ...

    @property
    def down(self) -> ExpertLinear: ...

    @property
    def activation(self) -> Callable[[torch.Tensor], torch.Tensor]: ...


@runtime_checkable
class Expert(RoutedExpert, Protocol):
    """A gated MLP: `down(combine(gate, up))`, gate and up in one stacked linear."""

    @property
    def gate_up(self) -> ExpertLinear: ...

    @property
    def down(self) -> ExpertLinear: ...

    @property
    def combine(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]: ...


class ExpertsKernel(Protocol):
    """Routed experts: `sum(weight * expert(x))` over the top-k, or `sum(expert(weight * x))` if on inputs."""

    @property
    def weight_bytes(self) -> int:
        """Weight bytes of all experts: a large batch may activate every one."""
        ...

    @property
    def is_capturable(self) -> bool:
        """Whether it can be captured into a graph: its operations do not depend on the routing."""
        ...

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        added: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`x` [tokens, hidden]; top-k `weights` and `experts` (ids, int64) [tokens, top_k]; `added` [tokens,
        hidden] is added to the result."""
        ...


class LoopedExperts:
    """The reference: a loop over experts, each on the tokens routed to it.

    Args:
        numbers: ids of these experts, of `count` in the model.
        on_inputs: whether routing weights multiply the inputs instead of the outputs.
    """

    is_capturable = False

    def __init__(
        self, experts: Sequence[RoutedExpert], numbers: range, count: int, on_inputs: bool
    ) -> None:
        self._experts, self._numbers, self._count = experts, numbers, count
        self._on_inputs = on_inputs
        self.weight_bytes = sum(expert.weight_bytes for expert in experts)

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        added: torch.Tensor | None = None,
    ) -> torch.Tensor:
        weights = weights.to(x.dtype).flatten()
        # Token permutation: sorted by expert, each expert's tokens are contiguous.
        permutation = experts.flatten().argsort(stable=True)
        tokens = permutation // experts.shape[1]
        counts = torch.bincount(experts.flatten(), minlength=self._count).tolist()
        out = torch.zeros_like(x)
        begin = sum(counts[: self._numbers.start])
        for number, expert in zip(self._numbers, self._experts, strict=True):
            count = counts[number]
            if count == 0:
                continue
            run = slice(begin, begin + count)
            inputs, routing_weights = (
                x.index_select(0, tokens[run]),
                weights[permutation[run], None],
            )
            if self._on_inputs:
                out.index_add_(0, tokens[run], expert(inputs * routing_weights))
            else:
                out.index_add_(0, tokens[run], expert(inputs) * routing_weights)
            begin += count
        return out if added is None else out + added


TOKENS = 20
ROUTER_INPUTS = 512


def routing_trial(device: str, count: int) -> Trial[Any]:
    """Expert weights by id, so that the order of equal ones does not matter."""
    random = RandomInputs(device, torch.float32)
    logits, top_k = random(TOKENS, count), min(4, count)

    def compute(route: Route) -> list[torch.Tensor]:
        weights, ids = route(logits, RoutingRule(top_k), None, None)
        return [torch.zeros_like(logits).scatter_(1, ids, weights)]

    return Trial(compute, tolerance(torch.float32))


def router_logits_trial(device: str, count: int) -> Trial[Any]:
    """16-bit rows with a float32 weight and bias."""
    random, rows = RandomInputs(device, torch.float32), RandomInputs(device, torch.bfloat16)
    given = rows(TOKENS, ROUTER_INPUTS), random(count, ROUTER_INPUTS), random(count)
    return Trial(lambda logits_of: [logits_of(*given)], tolerance(torch.float32))


def experts_trial(
    experts: Sequence[RoutedExpert],
    inputs: int,
    top_k: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    on_inputs: bool,
) -> Trial[Any]:
    """All experts of a layer in this process.

    Nothing is timed: what runs one expert after the other waits for the device in every layer.
    """
    random = RandomInputs(device, dtype)
    x = random(TOKENS, inputs)
    scores = torch.rand(TOKENS, len(experts), generator=random.generator)
    weights, ids = scores.softmax(dim=1).topk(top_k, dim=1)
    routing = x, weights.to(device), ids.to(device)

    def compute(make: Any) -> list[torch.Tensor]:
        return [make(experts, range(len(experts)), len(experts), on_inputs)(*routing)]

    return Trial(compute, tolerance(dtype, quantizes_inputs=True))
