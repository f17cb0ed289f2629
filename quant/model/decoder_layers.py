"""The decoder's list of layers inside a model, found from its token embedding."""

from __future__ import annotations

from typing import Any

from torch import nn


def decoder_layers(model: Any, num_layers: int) -> tuple[str, nn.ModuleList]:
    """Path and list of the decoder layers: the largest list of `num_layers` in the nearest module that holds
    the token embedding too. Layers behind them in the list (MTP) do not count.

    Raises:
        ValueError: there is none.
    """
    embedding = model.get_input_embeddings()
    path = next(path for path, module in model.named_modules() if module is embedding)
    while path:
        path = path.rpartition(".")[0]
        home = model.get_submodule(path)
        lists = [
            (f"{path}.{inner}".lstrip("."), module)
            for inner, module in home.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) >= num_layers
        ]
        exact = [entry for entry in lists if len(entry[1]) == num_layers] or lists
        if exact:
            return max(exact, key=lambda entry: _size(entry[1]))
    raise ValueError(f"{type(model).__name__} has no list of {num_layers} decoder layers")


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
