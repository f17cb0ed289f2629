"""The layers and linears of a model type that no library knows, by the names and shapes of the tensors."""

from __future__ import annotations

import re
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

from torch import nn

from ...base.errors import BadInput
from ..families.layer_map import LayerMap
from ..families.registry import type_of
from .architecture import EMBEDDING, HEAD, ROUTERS, Architecture
from .checkpoint import Checkpoint

_LAYER = re.compile(r"(.*?)\.(\d+)\.")
_LEAST = 32  # inputs and outputs: narrower matrices are gates, convolutions and low-rank steps
_PLAIN = re.compile(r"norm|conv|rotary|lora|router|_gate$|\bgate$")
_FLOATS = ("F16", "BF16", "F32")


class NamedModel:
    """The part of a `MetaModel` that needs no modules: names of layers on disk, and sizes by the config.

    Raises:
        BadInput: no tensors in numbered layers.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        matches = (_LAYER.match(name) for name in checkpoint.names if _is_matrix(checkpoint, name))
        numbered = Counter(match[1] for match in matches if match)
        if not numbered:
            raise BadInput(
                f"--model-free: {checkpoint.path} has no matrices in numbered layers, such as "
                "model.layers.0.mlp.up_proj.weight"
            )
        self.disk_prefix = numbered.most_common(1)[0][0]
        numbers = {
            int(match[2])
            for name in checkpoint.names
            if (match := _LAYER.match(name)) and match[1] == self.disk_prefix
        }
        self.disk_paths = [f"{self.disk_prefix}.{number}" for number in sorted(numbers)]
        self.layers = [nn.Module() for _ in numbers]
        text = checkpoint.text_config
        sizes = {name: int(text.get(name) or 0) for name in ("vocab_size", "hidden_size")}
        self.config = SimpleNamespace(**sizes)
        self.text_path, self.sources = "", dict[str, list[str]]()
        self.weight_map = SimpleNamespace(targets={})
        self.model = SimpleNamespace(
            get_input_embeddings=lambda: None,
            get_output_embeddings=lambda: None,
            named_modules=lambda: (),
        )


def named_architecture(checkpoint: Checkpoint) -> Architecture:
    """The layers of a checkpoint, whose linears are their matrices without routers, norms and embeddings."""
    model = NamedModel(checkpoint)
    linears: dict[str, list[str]] = {path: [] for path in model.disk_paths}
    left = []
    for name in filter(lambda name: _is_matrix(checkpoint, name), checkpoint.names):
        module = name.removesuffix(".weight")
        match = _LAYER.match(name)
        path = name[: match.end() - 1] if match else ""
        inside = path in linears and module.startswith(f"{path}.")
        if inside and _is_linear(module, checkpoint.shape(name)):
            linears[path].append(module.removeprefix(f"{path}."))
        elif module != HEAD:
            left.append(module)
    layers = [
        LayerMap(tuple((name,) for name in names), (), frozenset()) for names in linears.values()
    ]
    kinds = Counter(re.sub(r"\.\d+(?=\.|$)", ".*", module) for module in left)
    note = (
        "note: linears are told by name and shape; as they are stay the output projection and "
        f"{', '.join(kinds) or 'no other matrix'}; --ignore REGEX leaves more out"
    )
    name = type_of(checkpoint.config)
    return Architecture(
        name, model.disk_prefix, tuple(layers), tuple(left), (note,), cast(Any, model)
    )


def _is_matrix(checkpoint: Checkpoint, name: str) -> bool:
    is_weight = name.endswith(".weight") and checkpoint.dtype_name(name) in _FLOATS
    return is_weight and len(checkpoint.shape(name)) == 2


def _is_linear(module: str, shape: tuple[int, ...]) -> bool:
    leaf = module.rpartition(".")[2]
    is_plain = _PLAIN.search(leaf) or EMBEDDING.search(module)
    return min(shape) >= _LEAST and not is_plain and ROUTERS.isdisjoint(module.split("."))
