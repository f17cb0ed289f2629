"""Feed-forward blocks: gated (SwiGLU, GeGLU) and plain MLPs, and mixtures of experts with a top-k router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import NormalDist

import torch
from torch.nn import functional

from ....quant.families.spec_parts import CLAMPED_SWIGLU, RouterSpec
from ...kernels.elementwise.dispatch import CLAMPED_SWIGLU_GATE, GATE, GELU_GATE, RowKernelQuery
from ...kernels.elementwise.reference import ActivationQuant, FusesGateQuant, Rows
from ...kernels.moe.dispatch import (
    ROUTER_LOGITS,
    ROUTING,
    ExpertsKernel,
    Route,
    RouterLogits,
    RoutingKernelQuery,
    RoutingRule,
)
from .norm import Norm
from .projection import NO_ADAPTERS, AdapterRows, Projection, Weights

_gelu_tanh = partial(functional.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}


def gating(
    activation: str, kernel_query: RowKernelQuery
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The activation of a gated MLP, a function of gate and up: SwiGLU, GeGLU or unfused."""
    if activation == "silu":
        return GATE.select(kernel_query).run()
    if activation == CLAMPED_SWIGLU:
        return CLAMPED_SWIGLU_GATE.select(kernel_query).run()
    if activation.startswith("gelu"):
        return GELU_GATE.select(kernel_query).run(activation != "gelu")
    function = ACTIVATIONS[activation]
    return lambda gate, up: function(gate) * up


def sparse_gating(
    activation: str, sparsity: float
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Gating that cuts a share of `sparsity` to 0: up to the mean plus deviations (Gemma 3n)."""
    function, deviations = ACTIVATIONS[activation], NormalDist().inv_cdf(sparsity)

    def combine(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        deviation = gate.std(dim=-1, keepdim=True, correction=0)
        cut = gate.mean(dim=-1, keepdim=True) + deviation * deviations
        return function(functional.relu(gate - cut)) * up

    return combine


@dataclass(frozen=True, slots=True)
class GatedMlp(Weights):
    """`down(activation(gate x) * up x)`, with gate and up stacked; `combine` is from `gating`."""

    gate_up: Projection
    down: Projection
    combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    @property
    def activation_quant(self) -> ActivationQuant | None:
        return self.gate_up.activation_quant

    def __call__(self, x: Rows, adapters: AdapterRows = NO_ADAPTERS) -> torch.Tensor:
        gate, up = self.gate_up(x, adapters).chunk(2, dim=-1)
        activation_quant = self.down.activation_quant
        if activation_quant is not None and isinstance(self.combine, FusesGateQuant):
            return self.down(self.combine.quantized(gate, up, activation_quant), adapters)
        return self.down(self.combine(gate, up), adapters)


@dataclass(frozen=True, slots=True)
class PlainMlp(Weights):
    """`down(activation(up x))`."""

    up: Projection
    down: Projection
    activation: Callable[[torch.Tensor], torch.Tensor]

    @property
    def activation_quant(self) -> ActivationQuant | None:
        return self.up.activation_quant

    def __call__(self, x: Rows, adapters: AdapterRows = NO_ADAPTERS) -> torch.Tensor:
        return self.down(self.activation(self.up(x, adapters)), adapters)


@dataclass(frozen=True, slots=True)
class Router(Weights):
    """Top-k router: selects `per_token` experts for each token, with top-k weights, in float32. In lower
    precision other experts could be selected. `expert_scale` [experts] is a factor on the weights. The last
    `num_shared` ids are given to every token with weight 1."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    correction: torch.Tensor | None
    per_token: int
    spec: RouterSpec
    input_norm: Norm | None = None
    expert_scale: torch.Tensor | None = None
    num_shared: int = 0
    _logits: RouterLogits = field(init=False, repr=False, compare=False)
    _route: Route = field(init=False, repr=False, compare=False)
    _rule: RoutingRule = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        spec, query = self.spec, RoutingKernelQuery(self.weight.device.type, len(self.weight))
        rule = RoutingRule(
            self.per_token,
            spec.scoring == "softmax",
            spec.normalize,
            spec.least_sum,
            spec.scale,
            spec.num_groups,
            spec.topk_groups,
            spec.group_top_k,
            self.num_shared,
        )
        object.__setattr__(self, "_logits", ROUTER_LOGITS.select(query).run)
        object.__setattr__(self, "_route", ROUTING.select(query).run)
        object.__setattr__(self, "_rule", rule)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Top-k weights, float32, and expert ids, int64, [tokens, per_token] each."""
        x = x if self.input_norm is None else self.input_norm(x.float())
        logits = self._logits(x, self.weight, self.bias)
        return self._route(logits, self._rule, self.correction, self.expert_scale)


@dataclass(frozen=True, slots=True)
class MixtureOfExperts(Weights):
    """Weighted sum of the routed experts' outputs, plus the shared expert's; the router reads plain inputs.
    `shared_gate` [1, hidden]: a sigmoid weighs the shared expert. `total` is the ranks' all-reduce, or None.
    `latent` projects into and out of the width of routed experts; None: the model's."""

    router: Router
    experts: ExpertsKernel
    shared: FeedForward | None
    shared_gate: torch.Tensor | None = None
    total: Callable[[torch.Tensor], torch.Tensor] | None = None
    latent: tuple[Projection, Projection] | None = None

    def __call__(self, x: Rows, adapters: AdapterRows = NO_ADAPTERS) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        if self.latent is None and self.total is None:
            return self.experts(x, *self.router(x), self._shared(x, adapters))
        if self.latent is None:
            out = self.experts(x, *self.router(x))
        else:
            into, out_of = self.latent
            out = out_of(self.experts(into(x, adapters), *self.router(x)), adapters)
        if self.total is not None:
            out = self.total(out)
        shared = self._shared(x, adapters)
        return out if shared is None else out + shared

    def _shared(self, x: torch.Tensor, adapters: AdapterRows) -> torch.Tensor | None:
        if self.shared is None:
            return None
        shared = self.shared(x, adapters)
        if self.shared_gate is None:
            return shared
        return functional.linear(x, self.shared_gate).sigmoid() * shared


@dataclass(frozen=True, slots=True)
class MlpBesideExperts(Weights):
    """A dense MLP and routed experts that read the same residual, each between norms of its own (Gemma 4)."""

    mlp_norm: Norm
    mlp: FeedForward
    mlp_output_norm: Norm
    experts_norm: Norm
    mixture: MixtureOfExperts
    experts_output_norm: Norm

    def __call__(self, x: Rows, adapters: AdapterRows = NO_ADAPTERS) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        dense = self.mlp_output_norm(self.mlp(self.mlp_norm(x), adapters))
        routed = self.mixture.experts(self.experts_norm(x), *self.mixture.router(x))
        return dense + self.experts_output_norm(routed)


FeedForward = GatedMlp | PlainMlp | MixtureOfExperts | MlpBesideExperts
"""Feed-forward blocks: [tokens, hidden] to [tokens, hidden]."""
