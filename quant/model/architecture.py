"""The decoder layers of a checkpoint and the linears of each: by its family, or by names and shapes alone."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from ...base.errors import BadInput
from ..families.layer_map import LayerMap
from ..families.registry import type_of
from .checkpoint import Checkpoint, kind_name

if TYPE_CHECKING:
    from .meta_model import MetaModel

_FUSED = re.compile(r"\.experts\.(gate_up_proj|down_proj)")
ROUTERS = {"gate", "router", "wg", "classifier", "shared_expert_gate"}
EMBEDDING = re.compile(r"(^|[._])(embed|wte|wpe)|embeddings?[._]")
HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class Architecture:
    """The decoder layers of a model.

    Attributes:
        prefix: common prefix of the layers' tensor names, such as `model.layers`.
        unquantized: full names on disk of the linears that no layer's map has: routers, vision towers and
            projectors, MTP layers, and matrices that are converted on loading. Without `lm_head`.
        notes: notes for the user, one line each.
        meta_model: the model that its layers belong to.
    """

    family: str
    prefix: str
    layers: tuple[LayerMap, ...]
    unquantized: tuple[str, ...]
    notes: tuple[str, ...]
    meta_model: MetaModel = field(compare=False, repr=False)

    def layer_prefix(self, index: int) -> str:
        return self.meta_model.disk_paths[index]


def architecture_of(checkpoint: Checkpoint) -> Architecture:
    """Layers of a plain checkpoint, by transformers' linears, without routers; maps by `with_smoothing`.
    BadInput: no causal language model in layers, or transposed weights (`Conv1D`)."""
    from .meta_model import MetaModel

    name = type_of(checkpoint.config)
    num_layers = checkpoint.text_config.get("num_hidden_layers", 1)
    if not isinstance(num_layers, int) or num_layers < 1:
        raise BadInput(f"{checkpoint.path}: the config has no usable num_hidden_layers")
    model = MetaModel(checkpoint)
    layers = _layers(model, name)
    notes = []
    if any(_FUSED.search(tensor) for tensor in checkpoint.names):
        notes.append(
            "note: the experts of this checkpoint are fused 3-D tensors, which no format here holds: "
            "they stay as they are, and only the other linears are quantized"
        )
    elif any(weight.dim() == 3 for layer in model.layers for weight in layer.parameters()):
        notes.append("note: its 3-D tensors (fused experts or convolutions) stay as they are")
    quantized = {
        f"{model.disk_prefix}.{index}.{linear}"
        for index, layer in enumerate(layers)
        for linear in layer.linears
    }
    unquantized = _unquantized(checkpoint, model, quantized)
    converted = sum(
        module.startswith(f"{model.disk_prefix}.")
        and not model.weight_map.is_direct(f"{module}.weight")
        for module in unquantized
    )
    if converted:
        notes.append(
            f"note: transformers merges or splits {converted} matrices of the layers on loading: they stay "
            "as they are"
        )
    return Architecture(name, model.disk_prefix, layers, unquantized, tuple(notes), model)


def _layers(model: MetaModel, name: str) -> tuple[LayerMap, ...]:
    """The linears of each layer in the order of its modules, by their names on disk."""
    from transformers.pytorch_utils import Conv1D

    layers: list[LayerMap] = []
    for index, layer in enumerate(model.layers):
        if any(isinstance(module, Conv1D) for module in layer.modules()):
            raise BadInput(
                f"model type {name!r} keeps its weights transposed (Conv1D), which no format "
                "here holds"
            )
        on_disk = {name: disk for disk, name in model.names_in_layer(index).items()}
        linears = [
            on_disk[f"{path}.weight"].removesuffix(".weight")
            for path, module in layer.named_modules()
            if isinstance(module, nn.Linear)
            and f"{path}.weight" in on_disk
            and on_disk[f"{path}.weight"].endswith(".weight")
            and f"{model.paths[index]}.{path}.weight" not in model.tied
            and ROUTERS.isdisjoint(path.split("."))
        ]
        layers.append(LayerMap(tuple((linear,) for linear in linears), (), frozenset()))
    if not any(layer.linears for layer in layers):
        raise BadInput(f"model type {name!r} has no linears in its decoder layers")
    return tuple(layers)


def _unquantized(checkpoint: Checkpoint, model: MetaModel, quantized: set[str]) -> tuple[str, ...]:
    """Matrices on disk that a linear or router computes with, unquantized; MTP layers by shape and name."""
    modules = {f"{path}.weight": module for path, module in model.model.named_modules()}
    names = []
    for name in checkpoint.names:
        module = name.removesuffix(".weight")
        if module in quantized or module in (name, HEAD) or len(checkpoint.shape(name)) != 2:
            continue
        owner = modules.get(model.weight_map.targets[name])
        if owner is None:
            computes = not EMBEDDING.search(module)
        else:  # a linear, or a router that transformers writes as a module of its own
            is_torchs = type(owner).__module__.startswith("torch.nn")
            computes = isinstance(owner, nn.Linear) or not is_torchs
        if computes:
            names.append(module)
    return tuple(names)


_LAYER = re.compile(r"(.*?)\.(\d+)\.")
_LEAST = 32  # inputs and outputs: narrower matrices are gates, convolutions and low-rank steps
_PLAIN = re.compile(r"norm|conv|rotary|lora|router|_gate$|\bgate$")
_FLOATS = ("F16", "BF16", "F32")


class NamedModel:
    """The part of a `MetaModel` that needs no modules: names of layers on disk, and sizes by the config.
    Raises BadInput: no tensors in numbered layers."""

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
    kinds = Counter(map(kind_name, left))
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
