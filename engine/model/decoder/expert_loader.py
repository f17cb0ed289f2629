"""Loading of mixtures of experts: router, per-expert or fused weights, shared expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ....quant.families.shapes import Experts
from ....quant.kinds.base.tensor import QuantizedTensor
from ....quant.kinds.fp4.kind import Fp4Tensor
from ...kernels.common.dispatch import Candidate
from ...kernels.linear.library_linear import DeepGemmLinear
from ...kernels.moe.dispatch import (
    EXPERTS,
    LOOP,
    ExpertsKernel,
    ExpertsKernelQuery,
    RoutedExpert,
    experts_trial,
)
from ..layers.mlp import GatedMlp, MixtureOfExperts, PlainMlp, Router, gating
from ..layers.norm import Norm
from ..layers.projection import Projection
from .part_loaders import PartLoader


@dataclass(frozen=True, slots=True)
class ExpertLoader(PartLoader):
    """Loads mixtures of experts; of a shard, that rank's experts."""

    @property
    def _experts(self) -> Experts:
        assert self.spec.shape.experts is not None
        return self.spec.shape.experts

    def mixture(self, layer: str) -> MixtureOfExperts:
        """Load the mixture of experts of the layer with prefix `layer`."""
        reader, spec, shard, experts = self.reader, self.spec, self.shard, self._experts
        names, hidden = spec.names, spec.shape.hidden_size
        *into, down = names.expert
        prefix, fused = f"{layer}{names.experts}.", names.fused_experts is not None
        if fused and reader.has_weight(f"{layer}{names.experts_apart}.0.{into[-1]}"):
            prefix, fused = f"{layer}{names.experts_apart}.", False
        local_ids = range(experts.count) if shard is None else shard.experts(experts.count)
        routed: Sequence[GatedMlp | PlainMlp]
        if fused:
            routed = self._fused(prefix, local_ids)
        else:
            linears = tuple(into if spec.shape.gated_mlp else into[-1:]), down, experts.width
            width = spec.expert_latent or None
            routed = [
                self.mlp(f"{prefix}{i}.", *linears, whole=True, hidden=width) for i in local_ids
            ]
        shared, shared_gate = None, None
        if experts.shared_width:
            if names.shared_gate:
                shared_gate = reader.tensor(f"{layer}{names.shared_gate}.weight", 1, hidden)
            shared = self.mlp(f"{layer}{names.shared_expert}.", *names.shared, experts.shared_width)
        joined = None
        if shard is None and shared_gate is None and isinstance(shared, GatedMlp):
            joined = self._joined(routed, shared)
        if joined is None:
            choice = self._choice(routed)
            kernel = choice.run(routed, local_ids, experts.count, spec.router.on_inputs)
        else:
            kernel, shared = joined, None
            reader.drop_linears(f"{layer}{names.shared_expert}.")
        # So a kernel that repacks the weights holds the only copy.
        reader.drop_linears(prefix)
        return MixtureOfExperts(
            self._router(layer, num_shared=int(joined is not None)),
            kernel,
            shared,
            shared_gate,
            None if shard is None else shard.group.all_reduce,
            self._latent(layer) if spec.expert_latent else None,
        )

    def _choice(
        self, routed: Sequence[GatedMlp | PlainMlp]
    ) -> Candidate[Any, Callable[[Sequence[RoutedExpert], range, int, bool], ExpertsKernel]]:
        spec, experts, rows = self.spec, self._experts, self.reader.rows(self._experts.width)
        query = ExpertsKernelQuery(
            rows.device, rows.dtype, spec.shape.gated_mlp, _is_block_fp8(routed)
        )
        inputs, device = spec.expert_latent or spec.shape.hidden_size, torch.device(query.device)
        trial = partial(experts_trial, routed, inputs, experts.per_token, device, query.dtype)
        return EXPERTS.select(query, partial(trial, on_inputs=spec.router.on_inputs))

    def _joined(
        self, routed: Sequence[GatedMlp | PlainMlp], shared: GatedMlp
    ) -> ExpertsKernel | None:
        """One kernel of routed and shared experts, to save launches; None: they differ, LoRA or no kernel."""
        experts, on_inputs = self._experts, self.spec.router.on_inputs
        differ = experts.shared_width != experts.width or self.spec.expert_latent or on_inputs
        choice = self._choice(routed)
        if differ or self.reader.takes_adapters or choice.name == LOOP:
            return None
        count = len(routed) + 1
        kernel = choice.run([*routed, shared], range(count), count, on_inputs)
        return kernel if kernel.is_capturable else None

    def _router(self, layer: str, *, num_shared: int) -> Router:
        """The router of a mixture, which gives every token `num_shared` more experts."""
        spec, experts, read, exact = self.spec, self._experts, self.reader.tensor, torch.float32
        names, hidden, kind = spec.names, spec.shape.hidden_size, spec.router
        name, correction = layer + names.router, None
        weight = read(f"{name}.weight", experts.count, hidden, dtype=exact)
        input_norm = expert_scale = None
        if names.router_scale:
            input_norm = Norm(hidden, spec.norm_eps)
            weight = weight * read(layer + names.router_scale, hidden, dtype=exact) * hidden**-0.5
            expert_scale = read(layer + names.expert_scale, experts.count, dtype=exact)
        if kind.correction:
            correction = self.reader.vector(layer + names.correction, experts.count, exact)
        return Router(
            weight,
            read(f"{name}.bias", experts.count, dtype=exact) if kind.bias else None,
            correction,
            experts.per_token,
            kind,
            input_norm,
            expert_scale,
            num_shared,
        )

    def _latent(self, layer: str) -> tuple[Projection, Projection]:
        hidden, width = self.spec.shape.hidden_size, self.spec.expert_latent
        into, out_of = (layer + name for name in self.spec.names.expert_latent)
        load = partial(self.reader.projection, bias=self.spec.shape.mlp_bias)
        return load([into], hidden, [width]), load([out_of], width, [hidden])

    def _fused(self, prefix: str, local_ids: range) -> list[GatedMlp]:
        """Experts `local_ids` of fused weights: two tensors that hold all experts."""
        reader, spec = self.reader, self.spec
        count, inner, hidden = self._experts.count, self._experts.width, spec.shape.hidden_size
        assert spec.names.fused_experts is not None
        gate_up, down = (prefix + name for name in spec.names.fused_experts)
        # Files of one family differ: those of Qwen3-VL-MoE are [experts, in, out], transformers writes both.
        shape, transposed = reader.shape(down), spec.names.fused_transposed
        if inner != hidden and shape is not None:
            transposed = shape == (count, hidden, inner)
        into = reader.experts(gate_up, count, 2 * inner, hidden, transposed)
        out_of = reader.experts(down, count, hidden, inner, transposed)
        into_bias = out_bias = None
        if spec.shape.expert_bias:
            into_bias = reader.tensor(f"{gate_up}_bias", count, 2 * inner)
            out_bias = reader.tensor(f"{down}_bias", count, hidden)
        if spec.names.gate_up_alternates:
            into = [_gate_before_up(weight) for weight in into]
            into_bias = None if into_bias is None else _halves(into_bias.T).T

        def stacked(weight: Any, biases: torch.Tensor | None, expert: int) -> Projection:
            whole = weight.contiguous() if isinstance(weight, torch.Tensor) else weight
            return reader.stacked([whole], None if biases is None else biases[expert].clone())

        return [
            GatedMlp(
                stacked(into[expert], into_bias, expert),
                stacked(out_of[expert], out_bias, expert),
                gating(spec.activation, reader.rows(inner)),
            )
            for expert in local_ids
        ]


def _is_block_fp8(routed: Sequence[GatedMlp | PlainMlp]) -> bool:
    """True if every linear is DeepGEMM's: its grouped GEMM takes their codes and scales as they are."""
    return all(
        isinstance(expert, GatedMlp)
        and isinstance(expert.gate_up.kernel, DeepGemmLinear)
        and isinstance(expert.down.kernel, DeepGemmLinear)
        for expert in routed
    )


def _halves(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows[0::2], rows[1::2]])


def _gate_before_up(weight: torch.Tensor | QuantizedTensor) -> torch.Tensor | QuantizedTensor:
    """Deinterleave a stacked gate/up weight: gate rows first, up rows second."""
    if isinstance(weight, torch.Tensor):
        return _halves(weight)
    assert isinstance(weight, Fp4Tensor)
    return replace(weight, codes=_halves(weight.codes), scales=_halves(weight.scales))
