"""The decoder's list of layers inside a model, found from its token embedding."""

from __future__ import annotations

from typing import Any

from torch import nn


def decoder_layers(model: Any, num_layers: int) -> tuple[str, nn.ModuleList]:
    """Path and list of the decoder layers, in the nearest module that holds the token embedding too.

    Of several lists the outermost of `num_layers`, and the largest of those; else one with more (MTP layers
    behind the others), or fewer (where a layer counts for several). A tower for images may be inside too.

    Raises:
        ValueError: there is none.
    """
    embedding = model.get_input_embeddings()
    path = next(path for path, module in model.named_modules() if module is embedding)
    while path:
        path = path.rpartition(".")[0]
        lists = [
            (f"{path}.{inner}".lstrip("."), module)
            for inner, module in model.get_submodule(path).named_modules()
            if isinstance(module, nn.ModuleList) and _holds_matrices(module)
        ]
        for usable in (
            [entry for entry in lists if len(entry[1]) == num_layers],
            [entry for entry in lists if len(entry[1]) > num_layers],
            lists,
        ):
            if usable:
                return min(usable, key=lambda entry: (entry[0].count("."), -_size(entry[1])))
    raise ValueError(f"{type(model).__name__} has no list of decoder layers")


def _holds_matrices(layers: nn.ModuleList) -> bool:
    """Whether its members are modules of modules with matrices: no list of linears or norms."""
    return any(
        "." in name and parameter.dim() > 1
        for layer in layers
        for name, parameter in layer.named_parameters()
    )


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
