"""Mixture of experts: top-k router, routed experts, shared expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from ...kernels.activations.quantized_activations import ActivationQuant, Rows
from ...kernels.moe.experts import ExpertsKernel
from ..spec.spec import RouterSpec
from .mlp import Block
from .norm import Norm
from .projection import NO_ADAPTERS, AdapterRows, Projection


@dataclass(frozen=True, slots=True)
class Router:
    """Top-k router: selects `per_token` experts for each token, with top-k weights.

    `weight` [experts, hidden], `bias` and `correction` [experts] are float32, and so is the computation:
    in lower precision other experts could be selected. `expert_scale` [experts] is a factor on the weights.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    correction: torch.Tensor | None
    per_token: int
    spec: RouterSpec
    input_norm: Norm | None = None
    expert_scale: torch.Tensor | None = None

    @property
    def weight_bytes(self) -> int:
        parts = (self.weight, self.bias, self.correction, self.expert_scale)
        return sum(part.nbytes for part in parts if part is not None)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Top-k weights, float32, and expert ids, int64, [tokens, per_token] each."""
        x = x.float() if self.input_norm is None else self.input_norm(x.float())
        logits = functional.linear(x, self.weight, self.bias)
        softmax = self.spec.scoring == "softmax"
        scores = logits.softmax(dim=-1) if softmax else logits.sigmoid()
        selection_scores = scores if self.correction is None else scores + self.correction
        if self.spec.num_groups > 1:
            selection_scores = self._limit_to_top_groups(selection_scores)
        experts = selection_scores.topk(self.per_token, dim=-1).indices
        weights = scores.gather(1, experts)
        if self.spec.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + self.spec.least_sum)
        if self.expert_scale is not None:
            weights = weights * self.expert_scale[experts]
        return weights * self.spec.scale, experts

    def _limit_to_top_groups(self, selection_scores: torch.Tensor) -> torch.Tensor:
        grouped = selection_scores.unflatten(1, (self.spec.num_groups, -1))
        best = grouped.topk(self.spec.group_top_k, dim=-1).values.sum(dim=-1)
        in_top_groups = torch.zeros_like(best, dtype=torch.bool)
        in_top_groups.scatter_(1, best.topk(self.spec.topk_groups, dim=-1).indices, True)
        return grouped.masked_fill(~in_top_groups[..., None], float("-inf")).flatten(1)


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """Weighted sum of the routed experts' outputs, plus the shared expert's output.

    Attributes:
        experts: kernel of this rank's experts.
        shared_gate: [1, hidden]; the sigmoid of its product with the input weighs the shared expert's output.
        total: all-reduce over the tensor-parallel ranks; None without.
        latent: projections into and out of the width that the routed experts work in; None: the model's.
    """

    router: Router
    experts: ExpertsKernel
    shared: Block | None
    shared_gate: torch.Tensor | None = None
    total: Callable[[torch.Tensor], torch.Tensor] | None = None
    latent: tuple[Projection, Projection] | None = None

    @property
    def weight_bytes(self) -> int:
        shared = 0 if self.shared is None else self.shared.weight_bytes
        shared += sum(projection.weight_bytes for projection in self.latent or ())
        shared += 0 if self.shared_gate is None else self.shared_gate.nbytes
        return self.router.weight_bytes + self.experts.weight_bytes + shared

    @property
    def is_capturable(self) -> bool:
        shared = self.shared is None or self.shared.is_capturable
        return self.experts.is_capturable and shared

    @property
    def activation_quant(self) -> ActivationQuant | None:
        """None: the router needs the unquantized input."""
        return None

    def __call__(self, x: Rows, adapters: AdapterRows = NO_ADAPTERS) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        if self.latent is None:
            out = self.experts(x, *self.router(x))
        else:
            into, out_of = self.latent
            out = out_of(self.experts(into(x, adapters), *self.router(x)), adapters)
        if self.total is not None:
            out = self.total(out)
        if self.shared is None:
            return out
        shared = self.shared(x, adapters)
        if self.shared_gate is not None:
            shared = functional.linear(x, self.shared_gate).sigmoid() * shared
        return out + shared


@dataclass(frozen=True, slots=True)
class MlpBesideExperts:
    """A dense MLP and routed experts that read the same residual, each between norms of its own (Gemma 4)."""

    mlp_norm: Norm
    mlp: Block
    mlp_output_norm: Norm
    experts_norm: Norm
    mixture: MixtureOfExperts
    experts_output_norm: Norm

    @property
    def weight_bytes(self) -> int:
        norms = (self.mlp_norm, self.mlp_output_norm, self.experts_norm, self.experts_output_norm)
        total = self.mlp.weight_bytes + self.mixture.weight_bytes
        return total + sum(norm.weight_bytes for norm in norms)

    @property
    def is_capturable(self) -> bool:
        return self.mlp.is_capturable and self.mixture.is_capturable

    @property
    def activation_quant(self) -> ActivationQuant | None:
        """None: it norms its input itself."""
        return None

    def __call__(self, x: Rows, adapters: AdapterRows = NO_ADAPTERS) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        dense = self.mlp_output_norm(self.mlp(self.mlp_norm(x), adapters))
        routed = self.mixture.experts(self.experts_norm(x), *self.mixture.router(x))
        return dense + self.experts_output_norm(routed)
