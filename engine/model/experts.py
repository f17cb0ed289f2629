"""A mixture of experts: a router, experts of which each token visits a few, and one that all visit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from ..kernels.rounded_rows import Rounding, Rows
from .mlp import Block
from .spec import RouterSpec


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses `per_token` experts for each token and weighs them.

    `weight` [experts, hidden], `bias` and `correction` [experts] are float32, and so is the computation:
    a rounded score would send tokens elsewhere.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    correction: torch.Tensor | None
    per_token: int
    spec: RouterSpec

    @property
    def weight_bytes(self) -> int:
        parts = (self.weight, self.bias, self.correction)
        return sum(part.nbytes for part in parts if part is not None)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights, float32, and experts, int64, [tokens, per_token] each."""
        logits = functional.linear(x.float(), self.weight, self.bias)
        softmax = self.spec.scoring == "softmax"
        scores = logits.softmax(dim=-1) if softmax else logits.sigmoid()
        votes = scores if self.correction is None else scores + self.correction
        if self.spec.num_groups > 1:
            votes = self._in_best_groups(votes)
        experts = votes.topk(self.per_token, dim=-1).indices
        weights = scores.gather(1, experts)
        if self.spec.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * self.spec.scale, experts

    def _in_best_groups(self, votes: torch.Tensor) -> torch.Tensor:
        grouped = votes.unflatten(1, (self.spec.num_groups, -1))
        best = grouped.topk(self.spec.group_votes, dim=-1).values.sum(dim=-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(1, best.topk(self.spec.kept_groups, dim=-1).indices, True)
        return grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """The sum of the chosen experts' outputs, weighted, and of the shared expert's.

    Attributes:
        numbers: of the `experts` that are here, all or a run of them.
        total: adds up what the processes with the others have; None where all are here.
    """

    router: Router
    experts: Sequence[Block]
    shared: Block | None
    numbers: range
    total: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def weight_bytes(self) -> int:
        """Of all experts here: a full batch may visit each."""
        blocks = [*self.experts, *([] if self.shared is None else [self.shared])]
        return self.router.weight_bytes + sum(block.weight_bytes for block in blocks)

    @property
    def rounding(self) -> Rounding | None:
        """The router reads the input as it is."""
        return None

    def __call__(self, x: Rows) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        weights, experts = self.router(x)
        weights = weights.to(x.dtype).flatten()
        # Visits in the order of the experts: each expert's tokens then form a run.
        visits = experts.flatten().argsort(stable=True)
        tokens = visits // experts.shape[1]
        num_experts = self.router.weight.shape[0]
        counts = torch.bincount(experts.flatten(), minlength=num_experts).tolist()
        out = torch.zeros_like(x)
        begin = sum(counts[: self.numbers.start])
        for number, expert in zip(self.numbers, self.experts, strict=True):
            count = counts[number]
            if count == 0:
                continue
            run = slice(begin, begin + count)
            inputs, share = x.index_select(0, tokens[run]), weights[visits[run], None]
            if self.router.spec.on_inputs:
                out.index_add_(0, tokens[run], expert(inputs * share))
            else:
                out.index_add_(0, tokens[run], expert(inputs) * share)
            begin += count
        if self.total is not None:
            out = self.total(out)
        return out if self.shared is None else out + self.shared(x)
