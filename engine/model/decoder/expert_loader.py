"""Loading of mixtures of experts: router, per-expert or fused weights, shared expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
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
from ..layers.parallel import Shard
from ..layers.projection import Projection
from ..layers.spec import ModelSpec
from .reader import CheckpointReader

LoadsMlp = Callable[..., GatedMlp | PlainMlp]
"""Loads an MLP: `LayerLoader.mlp`."""


def load_mixture(
    reader: CheckpointReader,
    spec: ModelSpec,
    layer: str,
    load: LoadsMlp,
    shard: Shard | None = None,
) -> MixtureOfExperts:
    """Load the mixture of experts of the layer with prefix `layer`; with `shard`, that rank's experts."""
    names, hidden, experts = spec.names, spec.shape.hidden_size, spec.shape.experts
    assert experts is not None
    *into, down = names.expert
    prefix, fused = f"{layer}{names.experts}.", names.fused_experts is not None
    if fused and reader.has_weight(f"{layer}{names.experts_apart}.0.{into[-1]}"):
        prefix, fused = f"{layer}{names.experts_apart}.", False
    local_ids = range(experts.count) if shard is None else shard.experts(experts.count)
    routed: Sequence[GatedMlp | PlainMlp]
    if fused:
        routed = _fused(reader, spec, prefix, experts, local_ids)
    else:
        linears = tuple(into if spec.shape.gated_mlp else into[-1:]), down, experts.width
        width = spec.expert_latent or None
        routed = [load(f"{prefix}{i}.", *linears, whole=True, hidden=width) for i in local_ids]
    shared, shared_gate = None, None
    if experts.shared_width:
        if names.shared_gate:
            shared_gate = reader.tensor(f"{layer}{names.shared_gate}.weight", 1, hidden)
        shared = load(f"{layer}{names.shared_expert}.", *names.shared, experts.shared_width)
    joined = None
    if shard is None and shared_gate is None and isinstance(shared, GatedMlp):
        joined = _joined(reader, spec, routed, shared)
    if joined is None:
        kernel = _choice(reader, spec, routed).run(
            routed, local_ids, experts.count, spec.router.on_inputs
        )
    else:
        kernel, shared = joined, None
        reader.drop_linears(f"{layer}{names.shared_expert}.")
    # So a kernel that repacks the weights holds the only copy.
    reader.drop_linears(prefix)
    return MixtureOfExperts(
        _router(reader, spec, layer, experts, num_shared=int(joined is not None)),
        kernel,
        shared,
        shared_gate,
        None if shard is None else shard.group.all_reduce,
        _latent(reader, spec, layer) if spec.expert_latent else None,
    )


def _choice(
    reader: CheckpointReader, spec: ModelSpec, routed: Sequence[GatedMlp | PlainMlp]
) -> Candidate[Any, Callable[[Sequence[RoutedExpert], range, int, bool], ExpertsKernel]]:
    experts = spec.shape.experts
    assert experts is not None
    rows = reader.rows(experts.width)
    kind = spec.shape.gated_mlp, _is_block_fp8(routed)
    query = ExpertsKernelQuery(rows.device, rows.dtype, *kind)
    inputs = spec.expert_latent or spec.shape.hidden_size
    trial = partial(
        experts_trial, routed, inputs, experts.per_token, torch.device(query.device), query.dtype
    )
    return EXPERTS.select(query, partial(trial, on_inputs=spec.router.on_inputs))


def _is_block_fp8(routed: Sequence[GatedMlp | PlainMlp]) -> bool:
    """True if every linear is DeepGEMM's: its grouped GEMM takes their codes and scales as they are."""
    return all(
        isinstance(expert, GatedMlp)
        and isinstance(expert.gate_up.kernel, DeepGemmLinear)
        and isinstance(expert.down.kernel, DeepGemmLinear)
        for expert in routed
    )


def _joined(
    reader: CheckpointReader,
    spec: ModelSpec,
    routed: Sequence[GatedMlp | PlainMlp],
    shared: GatedMlp,
) -> ExpertsKernel | None:
    """One kernel of routed and shared experts, to save launches; None: they differ, LoRA or no kernel."""
    experts, kind = spec.shape.experts, spec.router
    assert experts is not None
    differ = experts.shared_width != experts.width or spec.expert_latent or kind.on_inputs
    choice = _choice(reader, spec, routed)
    if differ or reader.takes_adapters or choice.name == LOOP:
        return None
    count = len(routed) + 1
    kernel = choice.run([*routed, shared], range(count), count, kind.on_inputs)
    return kernel if kernel.is_capturable else None


def _router(
    reader: CheckpointReader, spec: ModelSpec, layer: str, experts: Experts, *, num_shared: int
) -> Router:
    """The router of a mixture, which gives every token `num_shared` more experts."""
    names, hidden = spec.names, spec.shape.hidden_size
    kind, read, exact = spec.router, reader.tensor, torch.float32
    name = layer + names.router
    weight = read(f"{name}.weight", experts.count, hidden, dtype=exact)
    input_norm = expert_scale = None
    if names.router_scale:
        input_norm = Norm(hidden, spec.norm_eps)
        weight = weight * read(layer + names.router_scale, hidden, dtype=exact) * hidden**-0.5
        expert_scale = read(layer + names.expert_scale, experts.count, dtype=exact)
    return Router(
        weight,
        read(f"{name}.bias", experts.count, dtype=exact) if kind.bias else None,
        reader.vector(layer + names.correction, experts.count, exact) if kind.correction else None,
        experts.per_token,
        kind,
        input_norm,
        expert_scale,
        num_shared,
    )


def _latent(reader: CheckpointReader, spec: ModelSpec, layer: str) -> tuple[Projection, Projection]:
    hidden, width, bias = spec.shape.hidden_size, spec.expert_latent, spec.shape.mlp_bias
    into, out_of = (layer + name for name in spec.names.expert_latent)
    return (
        reader.projection([into], hidden, [width], bias=bias),
        reader.projection([out_of], width, [hidden], bias=bias),
    )


def _fused(
    reader: CheckpointReader, spec: ModelSpec, prefix: str, experts: Experts, local_ids: range
) -> list[GatedMlp]:
    """Experts `local_ids` of fused weights: two tensors that hold all experts."""
    count, inner, hidden = experts.count, experts.width, spec.shape.hidden_size
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


def _halves(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows[0::2], rows[1::2]])


def _gate_before_up(weight: torch.Tensor | QuantizedTensor) -> torch.Tensor | QuantizedTensor:
    """Deinterleave a stacked gate/up weight: gate rows first, up rows second."""
    if isinstance(weight, torch.Tensor):
        return _halves(weight)
    assert isinstance(weight, Fp4Tensor)
    return replace(weight, codes=_halves(weight.codes), scales=_halves(weight.scales))
