"""Loading of PEFT LoRA checkpoints: each A and B for the linear of the model that it targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ....quant.adapters.weights import AdapterWeights, LoraPair
from ....quant.base.errors import BadInput
from ...config.adapters import servable_settings


class LinearShape(Protocol):
    """Shape of a linear that an adapter targets."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...


def read_adapter(
    folder: Path, linears: Mapping[str, LinearShape], bases: Sequence[str]
) -> dict[str, LoraPair]:
    """An adapter's LoRA pairs by target linear, a key of `linears`.

    `bases` are prefixes that a checkpoint may put before those names.

    Raises:
        BadInput: naming the file, and the field or tensor that is missing, misshapen or not supported.
    """
    weights = AdapterWeights(folder, servable_settings(folder))
    pairs: dict[str, LoraPair] = {}
    for module in weights.modules:
        candidates = [module.removeprefix(base) for base in bases if module.startswith(base)]
        linear = next((name for name in candidates if name in linears), None)
        if linear is None:
            raise BadInput(
                f"{weights.path}: {module} is no linear of this model that can take an adapter"
            )
        shape = linears[linear]
        pairs[linear] = weights.pair(module, shape.out_features, shape.in_features)
    return pairs
