"""Transformers' modules with the engine's projections in place of `nn.Linear`: loading and LoRA."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.utils import logging as transformers_logging

from ....base.errors import BadInput, reported_as
from ....quant.convert.plain import refuse_unplaced
from ....quant.families.registry import type_of
from ....quant.formats.registry import quantized_modules, read_quantized, tensor_names
from ....quant.kinds.base.format import CACHE_SCALES
from ....quant.kinds.base.tensor import QuantizedTensor
from ....quant.model.auto import auto_class, read_config
from ....quant.model.checkpoint import Checkpoint
from ....quant.model.experts import LEAVES, experts_of, fused
from ....quant.model.parameters import ModelParameters, model_parameters
from ...base.device import placed_on
from ..layers.projection import NO_ADAPTERS, AdapterRows, LinearSite, Projection, SlotMask
from ..layers.spec import LoadingOptions
from .packed import latent_projections


class CurrentAdapters:
    """Rows of the present step by LoRA adapter; set by the forward pass, read by every linear."""

    def __init__(self) -> None:
        self.rows: AdapterRows = NO_ADAPTERS

    def take_sequence(self, rows: AdapterRows, begin: int) -> None:
        assert not isinstance(rows, SlotMask), "of captured steps, which these modules have none of"
        self.rows = {
            name: None for name, of in rows.items() if of is None or bool((of == begin).any())
        }


class ProjectedLinear(nn.Module):
    """A projection in the place of an `nn.Linear`, at `site`, of its input's channels `inputs` (None: all).
    `read` gives the whole weight as the checkpoint has it."""

    def __init__(
        self,
        site: LinearSite,
        adapters: CurrentAdapters,
        inputs: slice | None = None,
        read: Callable[[], QuantizedTensor] | None = None,
        bias: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.site, self.bias = site, bias
        self.in_features, self.out_features = site.in_features, site.out_features
        self._adapters, self._inputs, self._read = adapters, inputs, read

    def read(self) -> QuantizedTensor:
        assert self._read is not None
        return self._read()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._inputs is not None:
            x = x[..., self._inputs]
        y = self.site.projection(x.reshape(-1, x.shape[-1]), self._adapters.rows)
        return y.view(*x.shape[:-1], y.shape[-1])


def _whole(linear: nn.Linear, projection: Projection) -> LinearSite:
    width = linear.out_features
    return LinearSite(projection, slice(0, width), width, linear.in_features)


class QuantizedWeights:
    """The quantized linears of a checkpoint, for a model that loads the rest itself; BadInput as
    `read_quantized`.

    transformers renames and merges tensors as it loads. So a quantized linear is loaded as a placeholder of
    one element, expanded to the weight's shape: the `nn.Linear` that then holds it is the weight's.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint, self._dtype = checkpoint, dtype
        self._placed = placed_on(device, checkpoint)
        self._placeholders = {
            module: torch.zeros((), dtype=dtype).expand(read_quantized(self._placed, module).shape)
            for module in sorted(quantized_modules(checkpoint))
        }
        packed = {
            name for module in self._placeholders for name in tensor_names(checkpoint, module)
        }
        left = (name for name in checkpoint.names if name not in packed)
        plain = [name for name in left if not name.endswith((*CACHE_SCALES, ".g_idx"))]
        self._apart = self._experts_apart(plain)
        self._of_experts = tuple(f"{disk}." for _, disk in self._apart.values())
        self.plain = [name for name in plain if not name.startswith(self._of_experts)]
        """The tensors of no quantized linear and no fused expert: parameters of the model."""

    def state_dict(self, dense: frozenset[str] = frozenset()) -> dict[str, torch.Tensor]:
        """The checkpoint's tensors with placeholders for the quantized ones; `dense` are dequantized."""
        tensors = {name: self._checkpoint.tensor(name) for name in self.plain}
        for module, placeholder in self._placeholders.items():
            tensors[f"{module}.weight"] = self._dense(module) if module in dense else placeholder
        for path, (fused_module, disk) in self._apart.items():
            below = f"{disk}."
            of_experts = [name for name in tensors if name.startswith(below)]
            experts = [
                {leaf: self._dense(f"{below}{number}.{leaf}") for leaf in LEAVES}
                for number in range(len(fused_module.down_proj))
            ]
            for name in of_experts:
                del tensors[name]
            tensors |= {f"{path}.{n}": t for n, t in fused(fused_module, experts).items()}
        return tensors

    def _dense(self, module: str) -> torch.Tensor:
        if module in self._placeholders:
            return read_quantized(self._placed, module).dequantize(self._dtype).cpu()
        return self._checkpoint.tensor(f"{module}.weight").to(self._dtype)

    def _experts_apart(self, plain: Sequence[str]) -> dict[str, tuple[Any, str]]:
        """Fused modules whose experts the checkpoint has apart: module and name on disk, by path."""
        names = [*plain, *(f"{module}.weight" for module in self._placeholders)]
        if not experts_of(names):
            return {}
        checkpoint = self._checkpoint
        parameters = ModelParameters(
            checkpoint.config, checkpoint.folder, trust_remote_code=checkpoint.trust_remote_code
        )
        return {
            path: (parameters.module(path), disk)
            for path, disk in parameters.experts_apart(names).items()
        }

    def sites(self, model: nn.Module) -> dict[str, str]:
        """Name in the model by name in the checkpoint, of the linears that hold a placeholder."""
        modules = {tensor.data_ptr(): name for name, tensor in self._placeholders.items()}
        return {
            modules[linear.weight.data_ptr()]: name
            for name, linear in _linears(model)
            if linear.weight.data_ptr() in modules
        }

    def not_placed(self, model: nn.Module) -> frozenset[str]:
        """Quantized linears that cannot stay so: merged experts, and projections that are absorbed."""
        absorbed, sites = latent_projections(model), self.sites(model)
        placed = {m for m, name in sites.items() if model.get_submodule(name) not in absorbed}
        left = self._placeholders.keys() - placed
        return frozenset(module for module in left if not module.startswith(self._of_experts))

    def place(
        self, model: nn.Module, device: torch.device, input_bits: int, adapters: CurrentAdapters
    ) -> None:
        for module, name in self.sites(model).items():
            linear = model.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            read = partial(read_quantized, self._placed, module)
            bias = None if linear.bias is None else linear.bias.detach().to(device, self._dtype)
            projection = Projection([read().to(device)], bias, self._dtype, input_bits)
            site = _whole(linear, projection)
            model.set_submodule(name, ProjectedLinear(site, adapters, read=read, bias=bias))
            self._checkpoint.release()


def adapter_sites(
    decoder: nn.Module, model: Any, dtype: torch.dtype, adapters: CurrentAdapters
) -> Mapping[str, LinearSite]:
    """Projections by name, in place of plain linears; head, embedding, absorbed ones take no LoRA."""
    within = set(decoder.modules()) - {model.get_output_embeddings(), *latent_projections(model)}
    for name, linear in list(_linears(model)):
        if linear in within:
            bias = None if linear.bias is None else linear.bias.detach()
            projection = Projection([linear.weight.detach()], bias, dtype)
            model.set_submodule(name, ProjectedLinear(_whole(linear, projection), adapters))
    head = model.get_output_embeddings()
    return {
        name: module.site
        for name, module in model.named_modules()
        if isinstance(module, ProjectedLinear) and module is not head
    }


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            yield name, module


_GROWING_ROTATIONS = ("dynamic", "longrope")


def checked_config(checkpoint: Checkpoint) -> Any:
    """The config of a checkpoint; BadInput for unknown types, no decoders, and RoPE that cannot be cached."""
    name, trusted = described(checkpoint), checkpoint.trust_remote_code
    raw = {k: part for k, part in checkpoint.config.items() if k != "quantization_config"}
    try:
        config = read_config(raw, checkpoint.folder, trust_remote_code=trusted)
        model_class(config, trusted)
    except BadInput as error:
        raise BadInput(f"{checkpoint.folder}: {error}") from error
    if config.is_encoder_decoder:
        raise BadInput(f"{name} is an encoder-decoder: only decoders are served")
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    nested = [part for part in rope.values() if isinstance(part, Mapping)]
    for part in nested or [rope]:
        if part.get("rope_type") in _GROWING_ROTATIONS:
            raise BadInput(
                f"{name} has rope_type {part['rope_type']!r}: what is cached would depend on what follows it"
            )
    return config


def load_model(
    checkpoint: Checkpoint, config: Any, options: LoadingOptions, adapters: CurrentAdapters
) -> Any:
    """The model; quantized linears stay so, merged ones do not. BadInput: broken or mismatched weights."""
    kind = model_class(config, checkpoint.trust_remote_code)
    device, dtype = options.device, options.dtype
    load = partial(from_pretrained, kind, checkpoint, config, dtype)
    if checkpoint.quantization_config is None:
        return load().to(device).eval()
    weights = QuantizedWeights(checkpoint, dtype, device)
    refuse_unplaced(checkpoint, weights.plain, model_parameters(checkpoint))
    model = load(weights.state_dict())
    if merged := weights.not_placed(model):
        model = load(weights.state_dict(merged))
    weights.place(model, device, options.input_bits, adapters)
    return model.to(device).eval()


def described(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.folder}: model type {type_of(checkpoint.config)!r}"


def model_class(config: Any, trusted: bool) -> Any:
    auto = auto_class(config, trusted)
    if type(config) not in auto._model_mapping:
        return auto
    kinds = auto._model_mapping[type(config)]
    return kinds[0] if isinstance(kinds, tuple) else kinds


def from_pretrained(
    kind: Any,
    checkpoint: Checkpoint,
    config: Any,
    dtype: torch.dtype,
    state_dict: Mapping[str, torch.Tensor] | None = None,
) -> Any:
    """A model with weights from `state_dict`, or the checkpoint's. BadInput: broken or mismatched."""
    name = described(checkpoint)
    had_bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with reported_as(f"{name} does not load"):
            model, report = kind.from_pretrained(
                checkpoint.folder if state_dict is None else None,
                config=config,
                dtype=dtype,
                state_dict=state_dict,
                output_loading_info=True,
                trust_remote_code=checkpoint.trust_remote_code,
            )
    finally:
        if had_bar:
            transformers_logging.enable_progress_bar()
    wrong = [*report["missing_keys"], *report["mismatched_keys"]]
    if wrong:
        raise BadInput(f"{name} does not load: {wrong[0]} is missing or misshapen")
    return model
