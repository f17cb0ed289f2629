"""Tensor-parallel shards of transformers' modules, by transformers' own plan (`base_model_tp_plan`).

It names linears split by outputs (column-parallel) or inputs (row-parallel, with an all-reduce), and experts.
All else is whole on every rank. Attention infers its heads from the width of a projection.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ....base.errors import BadInput
from ..layers.parallel import Shard, take, take_rows
from ..layers.projection import LinearSite, Projection
from ..layers.spec import LoadingOptions
from .linears import CurrentAdapters, ProjectedLinear

_BY_OUTPUTS = ("colwise", "colwise_gather_output", "packed_colwise")
_BY_INPUTS = ("rowwise", "rowwise_split_input")
_WHOLE = (
    *("replicated_with_grad_allreduce", "embedding_rowwise", "embedding_colwise", "local_params"),
)
_EXPERTS = "moe_tp_experts"
_SPLIT = "llmopt_is_split"


class ModelShard:
    """Exchanges the modules of `whole`, on the CPU, for this rank's; its sums are partial until `connect`.
    BadInput: no plan, or one of another kind, or a width or number of heads that the ranks do not divide."""

    def __init__(
        self,
        whole: Any,
        decoder: Any,
        shard: Shard,
        options: LoadingOptions,
        adapters: CurrentAdapters,
    ) -> None:
        self._shard, self._device, self._dtype = shard, options.device, options.dtype
        self._input_bits, self._adapters = options.input_bits, adapters
        self._is_connected = False
        self._what = f"tensor_parallel_size = {shard.size}"
        for name, what in (("num_attention_heads", "heads"), ("num_key_value_heads", "KV heads")):
            count = getattr(decoder.config, name, None)
            if isinstance(count, int) and count % shard.size:
                raise BadInput(f"{self._what}: {count} {what} do not divide into that many")
        plan = getattr(whole, "_tp_plan", None) or {}
        if not any(style in (*_BY_OUTPUTS, *_BY_INPUTS) for style in plan.values()):
            kind = type(whole).__name__
            raise BadInput(f"{self._what}: transformers has no plan to divide a {kind}")
        styles = {re.compile(re.escape(n).replace(r"\*", "[^.]+")): s for n, s in plan.items()}
        table = whole.get_input_embeddings().weight
        reached = {*decoder.modules(), whole.get_output_embeddings()}  # no vision tower
        for name, module in list(whole.named_modules()):
            style = next((s for pattern, s in styles.items() if pattern.fullmatch(name)), None)
            if module not in reached or style is None or style in _WHOLE:
                continue
            if getattr(module, "weight", None) is table:
                continue  # tied
            if style == _EXPERTS:
                self._split_experts(name, module)
            elif isinstance(module, nn.Linear | ProjectedLinear):
                whole.set_submodule(name, self._split_linear(name, module, style))
            else:
                raise self._refusal(name, f"the plan {style!r} for it is not built here")
        self._split_parameters(decoder, whole, styles)

    def connect(self) -> None:
        self._is_connected = True

    def _sum(self, part: torch.Tensor) -> torch.Tensor:
        return self._shard.group.all_reduce(part) if self._is_connected else part

    def _gather(self, width: int, part: torch.Tensor) -> torch.Tensor:
        if self._is_connected:
            return self._shard.group.all_gather_columns(part, width)
        return functional.pad(part, (0, width - part.shape[1]))

    def _split_parameters(
        self, decoder: Any, whole: Any, styles: dict[re.Pattern[str], str]
    ) -> None:
        """Slice what the plan names and no linear or experts hold: vectors by head (attention sinks)."""
        reached = {id(parameter) for parameter in decoder.parameters()}
        for name, parameter in whole.named_parameters():
            style = next((s for pattern, s in styles.items() if pattern.fullmatch(name)), None)
            owner = whole.get_submodule(name.rpartition(".")[0])
            if id(parameter) not in reached or style is None or hasattr(owner, _SPLIT):
                continue
            if style != "colwise" or parameter.dim() != 1:
                raise self._refusal(name, f"the plan {style!r} for it is not built here")
            part = self._part(name, len(parameter), "elements")
            parameter.data = parameter.detach()[part].clone()

    def _split_linear(
        self, name: str, linear: nn.Linear | ProjectedLinear, style: str
    ) -> ProjectedLinear:
        out_features, in_features = linear.out_features, linear.in_features
        rows: tuple[slice, ...] = ()
        columns: slice | None = None
        if style in _BY_INPUTS:
            columns = self._part(name, in_features, "inputs")
        elif style == "packed_colwise":
            half = self._part(name, out_features // 2, "outputs in each half")
            second = slice(half.start + out_features // 2, half.stop + out_features // 2)
            rows = (half, second)
        elif style == "colwise":
            rows = (self._part(name, out_features, "outputs"),)
        elif style == "colwise_gather_output":
            rows = (self._shard.vocabulary(out_features),)
        else:
            raise self._refusal(name, f"the plan {style!r} for it is not built here")
        weight = linear.read() if isinstance(linear, ProjectedLinear) else linear.weight.detach()
        part = take(name, weight, rows, columns).to(self._device)
        bias = None if linear.bias is None else linear.bias.detach()
        if columns is not None and self._shard.rank:
            bias = None  # once in the sum
        if bias is not None:
            bias = take_rows(bias, rows) if rows else bias
            bias = bias.to(self._device, self._dtype)
        projection = Projection([part], bias, self._dtype, self._input_bits)
        if columns is not None:
            projection.then(self._sum)
        elif style == "colwise_gather_output":
            projection.then(partial(self._gather, out_features))
        outputs = slice(0, sum(run.stop - run.start for run in rows) or out_features)
        site = LinearSite(projection, outputs, out_features, in_features, rows, columns)
        read = columns if style == "rowwise_split_input" else None
        return ProjectedLinear(site, self._adapters, inputs=read)

    def _split_experts(self, name: str, experts: Any) -> None:
        """Slice gated experts, [experts, 2 × width, hidden] and [experts, hidden, width], inside."""
        parameters = dict(experts.named_parameters(recurse=False))
        plain = not getattr(experts, "is_transposed", False)
        if set(parameters) != {"gate_up_proj", "down_proj"} or not plain:
            raise self._refusal(name, "such experts are not divided here")
        gate_up, down = parameters["gate_up_proj"], parameters["down_proj"]
        run = self._part(name, down.shape[2], "inner channels")
        halves = gate_up.detach().unflatten(1, (2, -1))[:, :, run]
        gate_up.data = halves.flatten(1, 2).contiguous()
        down.data = down.detach()[:, :, run].contiguous()
        experts.register_forward_hook(lambda _, __, output: self._sum(output))
        setattr(experts, _SPLIT, True)

    def _part(self, name: str, width: int, what: str) -> slice:
        size = self._shard.size
        if width % size:
            raise self._refusal(name, f"{width} {what} do not divide into that many")
        return slice(width // size * self._shard.rank, width // size * (self._shard.rank + 1))

    def _refusal(self, name: str, reason: str) -> BadInput:
        return BadInput(f"{self._what}: {name}: {reason}")
