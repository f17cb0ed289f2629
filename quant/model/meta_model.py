"""Meta-device transformers model of a checkpoint, whose decoder layers are loaded one at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..base.errors import BadInput
from .checkpoint import Checkpoint
from .experts import LEAVES, SplitExperts, fused_experts

_FINAL_NORMS = ("norm", "ln_f", "norm_f", "final_layernorm", "final_layer_norm")


class MetaModel:
    """A causal language model on the meta device, with the mapping to tensor names on disk.

    Fused experts that the checkpoint stores separately are split, so that each tensor has a module.

    Attributes:
        decoder: the base model, without the output projection.
        layers: its decoder layers.
        disk_prefix: common prefix of the layers' tensor names, such as `model.layers`.

    Raises:
        BadInput: transformers rejects the config, or the checkpoint holds none of its layers.
    """

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        try:
            model = _meta_model(checkpoint)
            self.decoder: Any = model.base_model
            self._base_prefix: str = model.base_model_prefix
            self._prefix, self.layers = _decoder_layers(self.decoder)
            self.module_names = _module_names(checkpoint, model)
        except Exception as error:  # a wrong config fails in many places in transformers
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise BadInput(f"{checkpoint.folder}/config.json is not usable: {reason}") from error
        self.config: Any = self.decoder.config
        patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        self._ignored = [re.compile(pattern) for pattern in patterns]
        first = f"{self._prefix}.0."
        inside = [disk for disk, name in self.module_names.items() if name.startswith(first)]
        if not inside:
            raise BadInput(f"{checkpoint.folder} holds no tensors of decoder layer 0")
        self.disk_prefix = inside[0][: inside[0].index(".0.")]
        self._by_layer = self._sorted_into_layers()
        self._empty: dict[int, dict[str, Any]] = {}  # meta tensors of the loaded layers
        for index, layer in enumerate(self.layers):
            _split(layer, set(self._by_layer[index].values()))

    def _sorted_into_layers(self) -> list[dict[str, str]]:
        """For each layer the relative names of its tensors: on disk, and in its module."""
        by_layer: list[dict[str, str]] = [{} for _ in self.layers]
        start, disk_start = self._prefix + ".", self.disk_prefix + "."
        for disk, name in self.module_names.items():
            if disk.startswith(disk_start) and name.startswith(start):
                number, _, inner = name.removeprefix(start).partition(".")
                if number.isdigit() and int(number) < len(by_layer):
                    relative = disk.removeprefix(f"{disk_start}{number}.")
                    by_layer[int(number)][relative] = inner
        return by_layer

    def names_in_layer(self, index: int) -> dict[str, str]:
        """Names of a layer's tensors relative to it: on disk to those of its module."""
        return self._by_layer[index]

    def fill(self, index: int, tensors: dict[str, torch.Tensor]) -> None:
        """Load a layer's weights in float32; `empty` frees them.

        Args:
            tensors: by their relative names on disk.

        Raises:
            BadInput: they are not those of this architecture.
        """
        prefix, layer = f"{self.disk_prefix}.{index}", self.layers[index]
        held = layer.state_dict(keep_vars=True)
        state = {}
        for disk, tensor in tensors.items():
            name = self._by_layer[index].get(disk, disk)
            ignored = any(pattern.search(f"{prefix}.{disk}") for pattern in self._ignored)
            if name in held or not ignored:
                state[name] = tensor.to(torch.float32)
        self._load(layer, state, prefix)
        self._empty.setdefault(index, held)

    def _load(self, module: nn.Module, state: dict[str, torch.Tensor], what: str) -> None:
        try:
            module.load_state_dict(state, strict=True, assign=True)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise BadInput(
                f"{self.checkpoint.folder}: {what} does not fit its config: {reason}"
            ) from error

    def empty(self, index: int) -> None:
        """Free the weights of a layer."""
        # Restore the original meta tensors: new ones would fragment the heap between the layer's weights and
        # keep it from shrinking.
        if index in self._empty:
            self.layers[index].load_state_dict(self._empty.pop(index), assign=True)

    @contextmanager
    def non_layer_weights(self, token_ids: torch.Tensor) -> Iterator[torch.Tensor]:
        """Load the weights outside the layers while the model is run on `token_ids`.

        The embedding holds only the rows of these tokens, in float32, so that a large vocabulary needs no
        memory; the model must be run on the remapped ids that this yields.

        Raises:
            BadInput: some weights are missing, or have other shapes.
        """
        start = f"{self._base_prefix}."
        disk_names = {name.removeprefix(start): disk for disk, name in self.module_names.items()}
        whole = self.decoder.state_dict()
        around = [name for name in whole if not (start + name).startswith(self._prefix + ".")]
        embedding: Any = self.decoder.get_input_embeddings()
        table_name = next(
            f"{path}.weight" for path, module in self.decoder.named_modules() if module is embedding
        )
        tokens, input_ids = token_ids.unique(return_inverse=True)
        state: dict[str, torch.Tensor] = {}
        for name in around:
            if name not in disk_names:
                raise BadInput(f"{self.checkpoint.folder} has no tensor '{start}{name}'")
            tensor = self.checkpoint.tensor(disk_names[name])
            if tensor.shape != whole[name].shape:
                raise BadInput(
                    f"{self.checkpoint.folder}: {disk_names[name]} has shape {list(tensor.shape)}, "
                    f"but its config says {list(whole[name].shape)}"
                )
            state[name] = (tensor[tokens] if name == table_name else tensor).to(torch.float32)
        table = state.pop(table_name)
        full, embedding.padding_idx = embedding.weight, None
        try:
            embedding.weight = nn.Parameter(table, requires_grad=False)
            whole[table_name] = table
            self._load(self.decoder, whole | state, "what surrounds the layers")
            yield input_ids
        finally:
            embedding.weight = full
            meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
            self.decoder.load_state_dict(meta, strict=False, assign=True)

    def final_norm(self) -> nn.Module:
        """The final norm, with its weights.

        Raises:
            BadInput: no final norm under a known name.
        """
        parent, _, _ = self._prefix.removeprefix(f"{self._base_prefix}.").rpartition(".")
        home = self.decoder.get_submodule(parent)
        for name in _FINAL_NORMS:
            norm = getattr(home, name, None)
            if isinstance(norm, nn.Module):
                path = ".".join(part for part in (self._base_prefix, parent, name) if part)
                state = {
                    name.removeprefix(path + "."): self.checkpoint.tensor(disk).to(torch.float32)
                    for disk, name in self.module_names.items()
                    if name.startswith(path + ".")
                }
                self._load(norm, state, "the norm behind the layers")
                return norm
        raise BadInput(f"{self.checkpoint.folder}: no norm is known behind the decoder layers")


def _meta_model(checkpoint: Checkpoint) -> Any:
    """The meta-device model; buffers that no checkpoint holds, such as RoPE frequencies, are real."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=False
        )
    for module in model.modules():
        computed = [name for name in module._non_persistent_buffers_set if _is_meta(module, name)]
        for name in computed:
            buffer = module._buffers[name]
            empty = float("nan") if buffer.is_floating_point() else 0
            module._buffers[name] = torch.full_like(buffer, empty, device="cpu")
        if computed:
            model._init_weights(module)
        for name in computed:
            if bool(module._buffers[name].isnan().any()):
                raise ValueError(f"{type(module).__name__} does not say how to compute its {name}")
    return model.eval().requires_grad_(False)


def _is_meta(module: nn.Module, buffer_name: str) -> bool:
    buffer = module._buffers.get(buffer_name)
    return buffer is not None and buffer.is_meta


def _decoder_layers(decoder: Any) -> tuple[str, nn.ModuleList]:
    """The list of decoder layers, and its path in the whole model."""
    num_layers = int(decoder.config.num_hidden_layers)
    lists = [
        (path, module)
        for path, module in decoder.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    if not lists:
        raise ValueError(f"{type(decoder).__name__} has no list of {num_layers} decoder layers")
    path, layers = min(lists, key=lambda entry: entry[0].count("."))
    return f"{decoder.base_model_prefix}.{path}", layers


def _module_names(checkpoint: Checkpoint, model: Any) -> dict[str, str]:
    """Module tensor name for each tensor on disk, by transformers' key renaming."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    own = {name for name, _ in model.named_children()}
    names = {}
    for disk in checkpoint.names:
        name = disk
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        names[disk] = name if name.split(".")[0] in own else f"{model.base_model_prefix}.{name}"
    return names


def _split(layer: nn.Module, names: set[str]) -> None:
    """Split the fused experts of a layer that are stored separately on disk."""
    for path, fused in list(fused_experts(layer)):
        for leaves in LEAVES:
            if f"{path}.0.{leaves[0]}.weight" in names:
                with torch.device("meta"):
                    layer.set_submodule(path, SplitExperts(fused, leaves).requires_grad_(False))
