"""Meta-device transformers model of a checkpoint, whose decoder layers are loaded one at a time.

Its layers are found from its token embedding; `WeightMap` applies transformers' renamings and conversions of
tensors.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from copy import deepcopy
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from ...base.errors import BadInput, reported_as
from .auto import build_on_meta, read_config
from .checkpoint import Checkpoint
from .experts import NAMES_ON_DISK, fused_experts, split_experts
from .lazy_weights import LazyWeights


def decoder_layers(model: Any, num_layers: int) -> tuple[str, nn.ModuleList]:
    """Path and list of decoder layers, in the nearest module with the token embedding. ValueError: none. Of
    several the outermost, then largest, of `num_layers`; else more (MTP after them) or fewer (one for
    several)."""

    def rank(entry: tuple[str, nn.ModuleList]) -> tuple[int, int]:
        return entry[0].count("."), -sum(weight.numel() for weight in entry[1].parameters())

    embedding = model.get_input_embeddings()
    path = next(path for path, module in model.named_modules() if module is embedding)
    while path:
        path = path.rpartition(".")[0]
        lists = [
            (f"{path}.{inner}".lstrip("."), module)
            for inner, module in model.get_submodule(path).named_modules()
            # Members are modules of modules with matrices: no list of linears or norms.
            if isinstance(module, nn.ModuleList)
            and any(
                "." in name and parameter.dim() > 1
                for layer in module
                for name, parameter in layer.named_parameters()
            )
        ]
        for usable in (
            [entry for entry in lists if len(entry[1]) == num_layers],
            [entry for entry in lists if len(entry[1]) > num_layers],
            lists,
        ):
            if usable:
                return min(usable, key=rank)
    raise ValueError(f"{type(model).__name__} has no list of decoder layers")


class WeightMap:
    """Where each tensor on disk goes.

    Most keys are renamed at most. Some tensors go through a `WeightConverter`, which merges, splits or
    transposes: no single tensor on disk is the module's.

    Attributes:
        targets: the module tensor of each tensor on disk; of a converter's several the first.
        renamed_names: the name of each tensor on disk after renamings alone.
        split_weights: patterns of the weights that become several, in no file either.
    """

    def __init__(self, names: Iterable[str], model: Any):
        """The map of tensors on disk for a model with its output projection, on any device."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        mapping = get_model_conversion_mapping(model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._order = dot_natural_key
        self._model = model
        self._converter_of = {p: entry for entry in converters for p in entry.source_patterns}
        self.split_weights = [
            pattern
            for pattern, entry in self._converter_of.items()
            if pattern.endswith(".weight") and len(entry.target_patterns) > 1
        ]
        prefix = model.base_model_prefix

        def in_model(name: str) -> str:
            is_whole = not prefix or name.partition(".")[0] in model._modules
            return name if is_whole else f"{prefix}.{name}"

        parameter_names = set(model.state_dict())
        self.targets: dict[str, str] = {}
        self.renamed_names: dict[str, str] = {}
        self._patterns: dict[str, str] = {}
        for disk in sorted(names, key=dot_natural_key):  # some renamings depend on earlier keys
            renamed, _ = rename_source_key(disk, renamings, [])
            target, pattern = rename_source_key(renamed, [], converters)
            target = in_model(target)
            if target not in parameter_names and in_model(disk) in parameter_names:
                target, pattern = in_model(disk), None
            self.renamed_names[disk] = in_model(renamed)
            self.targets[disk] = target
            if pattern is not None:
                self._patterns[disk] = pattern

    def take_apart(self, path: str) -> None:
        """Convert nothing below a module: each tensor on disk has a module tensor of its own."""
        for disk, name in self.renamed_names.items():
            if name.startswith(path + "."):
                self.targets[disk] = name
                self._patterns.pop(disk, None)

    def all_targets(self, disk: str) -> list[str]:
        target, pattern = self.targets[disk], self._patterns.get(disk)
        if pattern is None:
            return [target]
        patterns = self._converter_of[pattern].target_patterns
        return [target.replace(patterns[0], other) for other in patterns]

    def is_direct(self, disk: str) -> bool:
        return disk not in self._patterns

    def merged_from(self, disk: str) -> tuple[str, ...]:
        """The patterns of the names that the converter of a tensor on disk reads; none: it is direct."""
        pattern = self._patterns.get(disk)
        if pattern is None:
            return ()
        return tuple(self._converter_of[pattern]._original_source_patterns)

    def converted(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Module tensors from tensors by name on disk, among them all that a converter merges."""
        state: dict[str, torch.Tensor] = {}
        converters: dict[str, Any] = {}
        for disk in sorted(tensors, key=self._order):
            target, pattern = self.targets.get(disk, disk), self._patterns.get(disk)
            if pattern is None:
                state[target] = tensors[disk]
                continue
            if target not in converters:
                converters[target] = deepcopy(self._converter_of[pattern])
            converters[target].add_tensor(target, disk, pattern, tensors[disk])
        for target, converter in converters.items():
            realized = converter.convert(target, model=self._model, config=self._model.config)
            for name, value in realized.items():
                state[name] = value[0] if isinstance(value, list) else value
        return state


class MetaModel:
    """A language model on the meta device, with the mapping to tensor names on disk.

    Fused experts that the checkpoint stores separately are split, so that each tensor has a module. Raises
    BadInput: transformers rejects the config, or the checkpoint holds none of its layers.

    Attributes:
        layers: decoder layers of the model.
        text_path: path of the module that holds the decoder layers.
        disk_prefix: common prefix of the layers' tensor names, such as `model.layers`.
        ends: modules whose call ends a pass: nothing after them is needed.
        tied: other names of each module tensor that is tied.
        names_in_layer: names of a layer's module tensors, by the names of the same tensors on disk.
        replaced: tensors that are read in place of the checkpoint's, by name on disk.
        around: context in which the modules outside the layers load their weights as they are called.
    """

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        path = checkpoint.path
        where = path / "config.json" if path.is_dir() else path
        with reported_as(f"{where} is not usable"):  # a wrong config fails in many places
            trusted = checkpoint.trust_remote_code
            config = read_config(checkpoint.config, checkpoint.folder, trust_remote_code=trusted)
            self.model: Any = build_on_meta(config, trust_remote_code=trusted)
            _compute_buffers(self.model)
            self.model.eval().requires_grad_(False)
            self.config: Any = self.model.config.get_text_config(decoder=True)
            num_layers = int(self.config.num_hidden_layers)
            self._prefix, stack = decoder_layers(self.model, num_layers)
            self.layers: list[Any] = list(stack)[:num_layers]  # after them: MTP layers
            self.weight_map = WeightMap(checkpoint.names, self.model)
        patterns = getattr(self.model, "_keys_to_ignore_on_load_unexpected", None) or ()
        self._ignored = [re.compile(pattern) for pattern in patterns]
        self.paths = [f"{self._prefix}.{index}" for index in range(len(self.layers))]
        for path, layer in zip(self.paths, self.layers, strict=True):
            self._split(path, layer)
        self.sources: dict[str, list[str]] = defaultdict(list)  # by module tensor
        for disk in self.weight_map.targets:
            for name in self.weight_map.all_targets(disk):
                self.sources[name].append(disk)
        self.tied = _tied_names(self.model)
        self.text_path = self._prefix.rpartition(".")[0]
        prefixes = Counter(
            disk[: disk.index(".0.")]
            for name, disks in self.sources.items()
            if name.startswith(f"{self._prefix}.0.")
            for disk in disks
            if ".0." in disk
        )
        if not prefixes:
            raise BadInput(f"{self.checkpoint.path} holds no tensors of decoder layer 0")
        self.disk_prefix = prefixes.most_common(1)[0][0]
        self.disk_paths = [f"{self.disk_prefix}.{index}" for index in range(len(self.layers))]
        self._finish()

    def _finish(self) -> None:
        """Set the attributes that depend on which modules the layers are."""
        self.ends: list[Any] = []
        self.replaced: Mapping[str, torch.Tensor] = {}
        self.names_in_layer = cache(self._names_in_layer)
        self._empty: dict[int, dict[str, Any]] = {}  # meta tensors of the loaded layers
        self.around = LazyWeights(self.model, self.layers, self._read, self.checkpoint.folder)

    def _split(self, path: str, layer: nn.Module) -> None:
        """Split the fused experts of a layer that are stored separately on disk."""
        for inner, fused in list(fused_experts(layer)):
            names = self.weight_map.renamed_names.values()
            for leaves in NAMES_ON_DISK:
                if f"{path}.{inner}.0.{leaves[0]}.weight" in names:
                    with torch.device("meta"):
                        split = split_experts(fused, leaves, self.config).requires_grad_(False)
                    layer.set_submodule(inner, split)
                    self.weight_map.take_apart(f"{path}.{inner}")
                    break

    def _names_in_layer(self, index: int) -> dict[str, str]:
        start, disk_start = f"{self.paths[index]}.", f"{self.disk_paths[index]}."
        return {
            disk.removeprefix(disk_start): name.removeprefix(start)
            for name, disks in self.sources.items()
            if name.startswith(start)
            for disk in disks
            if disk.startswith(disk_start) and self.weight_map.is_direct(disk)
        }

    def fill(self, index: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load a layer's weights by relative names, in float32; `empty` frees them. BadInput: not its own."""
        start, disk_start = f"{self.paths[index]}.", f"{self.disk_paths[index]}."
        layer = self.layers[index]
        stored = self._empty.get(index) or layer.state_dict(keep_vars=True)
        on_disk = {disk_start + name: tensor for name, tensor in tensors.items()}
        elsewhere = {
            disk
            for name in stored
            for disk in self._sources_of(start + name)
            if not disk.startswith(disk_start)
        }
        on_disk |= {disk: self.checkpoint.tensor(disk) for disk in elsewhere}
        state = {
            name: tensor.to(torch.float32) if tensor.is_floating_point() else tensor
            for name, tensor in self.weight_map.converted(on_disk).items()
        }
        mine = {}
        for name in stored:
            alias = next((a for a in self.tied.get(start + name, ()) if a in state), None)
            if start + name in state:
                mine[name] = state[start + name]
            elif alias is not None:
                mine[name] = state[alias]
        for disk in on_disk:  # loading names a tensor that the layer does not hold
            target = self.weight_map.targets.get(disk, disk)
            name = target.removeprefix(start)
            ignored = any(pattern.search(disk) for pattern in self._ignored)
            is_known = ignored or name in stored or target in self.tied
            if disk.startswith(disk_start) and not is_known:
                mine[name.removeprefix(disk_start)] = on_disk[disk]
        try:
            layer.load_state_dict(mine, strict=True, assign=True)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise BadInput(
                f"{self.checkpoint.path}: {self.disk_paths[index]} does not fit its config: {reason}"
            ) from error
        self._empty.setdefault(index, stored)

    def _sources_of(self, name: str) -> list[str]:
        """Tensors on disk that a module tensor, or what it is tied to, is made of."""
        for alias in (name, *self.tied.get(name, ())):
            if alias in self.sources:
                return self.sources[alias]
        return []

    def empty(self, index: int) -> None:
        # Restore the original meta tensors: new ones would fragment the heap between the layer's weights and
        # keep it from shrinking.
        if index in self._empty:
            self.layers[index].load_state_dict(self._empty.pop(index), assign=True)

    def fill_with_zeros(self, index: int) -> None:
        """Zeros as a layer's weights; their pages are never written, and take no memory."""
        layer = self.layers[index]
        tensors = layer.state_dict(keep_vars=True)
        zeros = {
            name: torch.from_numpy(np.zeros(tensor.shape, np.float32)).to(tensor.dtype)
            for name, tensor in tensors.items()
        }
        layer.load_state_dict(zeros, assign=True)
        self._empty[index] = tensors

    def output_projection(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of the output projection, as stored. BadInput: it is missing."""
        head = self.model.get_output_embeddings()
        path = next((name for name, module in self.model.named_modules() if module is head), None)
        if head is None or path is None:
            raise BadInput(f"{self.checkpoint.path}: the model has no output projection")
        bias = getattr(head, "bias", None)
        return self._read(f"{path}.weight"), None if bias is None else self._read(f"{path}.bias")

    def _read(self, name: str) -> torch.Tensor:
        """A tensor of a module outside the layers, as stored. BadInput: the checkpoint lacks it."""
        disks = self._sources_of(name)
        if not disks:
            raise BadInput(f"{self.checkpoint.path} has no tensor '{name}'")
        if len(disks) == 1 and self.weight_map.is_direct(disks[0]):
            return self._stored(disks[0])
        state = self.weight_map.converted({disk: self._stored(disk) for disk in disks})
        return state[next(alias for alias in (name, *self.tied.get(name, ())) if alias in state)]

    def _stored(self, disk: str) -> torch.Tensor:
        return self.replaced[disk] if disk in self.replaced else self.checkpoint.tensor(disk)


def _compute_buffers(model: nn.Module) -> None:
    """Compute buffers that no checkpoint holds (RoPE), by transformers. ValueError: it leaves one out."""
    from transformers import PreTrainedModel

    computed: list[tuple[nn.Module, str]] = []
    initialized: list[tuple[Any, nn.Module]] = []  # children before their parents
    for path, module in model.named_modules():
        names = set()
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.is_meta:
                empty = float("nan") if buffer.is_floating_point() else 0
                module._buffers[name] = torch.full_like(buffer, empty, device="cpu")
                names.add(name)
        computed += [(module, name) for name in names]
        if names or isinstance(module, PreTrainedModel):
            parts = path.split(".") if path else []
            around = (model.get_submodule(".".join(parts[:n])) for n in range(len(parts), -1, -1))
            owner = next(outer for outer in around if isinstance(outer, PreTrainedModel))
            initialized.insert(0, (owner, module))
    for owner, module in initialized:
        owner._init_weights(module)
    for module, name in computed:
        if bool(getattr(module, name).isnan().any()):
            raise ValueError(f"{type(module).__name__} does not say how to compute its {name}")


def _tied_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return {
        name: tuple(other for other in group if other != name)
        for group in names.values()
        if len(group) > 1
        for name in group
    }
