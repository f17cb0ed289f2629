"""transformers' key renamings and weight conversions, from a checkpoint's tensors to a model's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch


class WeightMap:
    """Where each tensor on disk goes.

    Most keys are renamed at most. Some tensors go through a `WeightConverter`, which merges, splits or
    transposes: no single tensor on disk is the module's.

    Attributes:
        targets: the module tensor of each tensor on disk; of a converter's several the first.

    Args:
        names: tensors on disk.
        model: the model with its output projection, on any device.
    """

    def __init__(self, names: Iterable[str], model: Any):
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
        held = set(model.state_dict())
        self.targets: dict[str, str] = {}
        self._renamed: dict[str, str] = {}
        self._patterns: dict[str, str] = {}
        for disk in sorted(names, key=dot_natural_key):  # some renamings depend on earlier keys
            renamed, _ = rename_source_key(disk, renamings, [])
            target, pattern = rename_source_key(renamed, [], converters)
            renamed, target = self._in_model(renamed), self._in_model(target)
            if target not in held and self._in_model(disk) in held:
                target, pattern = self._in_model(disk), None
            self._renamed[disk] = renamed
            self.targets[disk] = target
            if pattern is not None:
                self._patterns[disk] = pattern

    def _in_model(self, name: str) -> str:
        """A name with the base model's prefix, which some checkpoints leave out."""
        prefix = self._model.base_model_prefix
        if not prefix or name.partition(".")[0] in self._model._modules:
            return name
        return f"{prefix}.{name}"

    def renamed(self, path: str) -> set[str]:
        """Names below a module's path of its tensors on disk, if keys were renamed and nothing converted."""
        return {name for name in self._renamed.values() if name.startswith(path + ".")}

    def take_apart(self, path: str) -> None:
        """Convert nothing below a module: each tensor on disk has a module tensor of its own."""
        for disk, name in self._renamed.items():
            if name.startswith(path + "."):
                self.targets[disk] = name
                self._patterns.pop(disk, None)

    def all_targets(self, disk: str) -> list[str]:
        """Every module tensor that a tensor on disk goes into."""
        target, pattern = self.targets[disk], self._patterns.get(disk)
        if pattern is None:
            return [target]
        patterns = self._converter_of[pattern].target_patterns
        return [target.replace(patterns[0], other) for other in patterns]

    def is_direct(self, disk: str) -> bool:
        """Whether the tensor on disk is the module's, under whatever name."""
        return disk not in self._patterns

    def converted(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Module tensors from tensors on disk.

        Args:
            tensors: by name on disk; all that a converter merges must be there.
        """
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
