"""The decoder layers of a checkpoint, and the linears of each that can be quantized."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..base.errors import BadInput
from .checkpoint import Checkpoint
from .families import FAMILIES, Family, family_of

_KNOWN_PREFIX = "model.layers"
_FUSED = re.compile(r"\.experts\.(gate_up_proj|down_proj)")
_ROUTERS = {"gate", "router", "wg", "classifier", "shared_expert_gate"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """The decoder layers of a model.

    Attributes:
        model_type: as in `config.json`.
        prefix: common prefix of the layers' tensor names, such as `model.layers`.
        layers: the family of each layer.
        notes: for the user, one line each.
    """

    model_type: str
    prefix: str
    layers: tuple[Family, ...]
    notes: tuple[str, ...]

    def layer_prefix(self, index: int) -> str:
        """Name of a layer in the checkpoint."""
        return f"{self.prefix}.{index}"


def architecture_of(checkpoint: Checkpoint) -> Architecture:
    """The layers of a plain checkpoint.

    Model types without a smoothing map are inspected through transformers: every linear of a decoder
    layer is quantized, except routers.

    Raises:
        BadInput: no causal language model that can be run layer by layer, or transposed weights
            (`Conv1D`), which no format here supports.
    """
    config = checkpoint.config
    model_type = str(config.get("model_type"))
    if "text_config" in config:
        raise BadInput(
            f"model type {model_type!r} is more than a text model: only causal language models can be "
            "quantized"
        )
    if model_type not in FAMILIES:
        return _discovered(checkpoint, model_type)
    num_layers = config.get("num_hidden_layers")
    if not isinstance(num_layers, int) or num_layers < 1:
        raise BadInput(f"{checkpoint.folder}/config.json has no usable num_hidden_layers")
    names = _names_by_layer(checkpoint, num_layers)
    notes = []
    if any(_FUSED.search(name) for name in checkpoint.names):
        notes.append(
            "note: the experts of this checkpoint are fused 3-D tensors, which no format here holds: "
            "they stay as they are, and only the other linears are quantized"
        )
    return Architecture(
        model_type=model_type,
        prefix=_KNOWN_PREFIX,
        layers=tuple(family_of(config, names[index]) for index in range(num_layers)),
        notes=tuple(notes),
    )


def _names_by_layer(checkpoint: Checkpoint, num_layers: int) -> list[set[str]]:
    """Names of the tensors of each layer, relative to it."""
    names: list[set[str]] = [set() for _ in range(num_layers)]
    pattern = re.compile(re.escape(_KNOWN_PREFIX) + r"\.(\d+)\.(.+)")
    for name in checkpoint.names:
        match = pattern.fullmatch(name)
        if match and int(match[1]) < num_layers:
            names[int(match[1])].add(match[2])
    return names


def _discovered(checkpoint: Checkpoint, model_type: str) -> Architecture:
    """The layers of a model type without a smoothing map: the linears in transformers' modules."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    from .meta_model import MetaModel

    meta_model = MetaModel(checkpoint)
    layers: list[Family] = []
    left_alone = False
    for index, layer in enumerate(meta_model.layers):
        if any(isinstance(module, Conv1D) for module in layer.modules()):
            raise BadInput(
                f"model type {model_type!r} keeps its weights transposed (Conv1D), which no format "
                "here holds"
            )
        on_disk = {name: disk for disk, name in meta_model.names_in_layer(index).items()}
        linears = [
            on_disk[f"{path}.weight"].removesuffix(".weight")
            for path, module in layer.named_modules()
            if isinstance(module, nn.Linear)
            and f"{path}.weight" in on_disk
            and _ROUTERS.isdisjoint(path.split("."))
        ]
        left_alone |= any(parameter.dim() == 3 for parameter in layer.parameters())
        layers.append(Family(tuple((name,) for name in linears), (), frozenset(), mapped=False))
    if not any(family.linears for family in layers):
        raise BadInput(f"model type {model_type!r} has no linears in its decoder layers")
    notes = [
        f"note: no smoothing map is known for model type {model_type!r}: the linears of its decoder "
        "layers are quantized without moving scales between them"
    ]
    if left_alone:
        notes.append("note: its 3-D tensors (fused experts or convolutions) stay as they are")
    return Architecture(model_type, meta_model.disk_prefix, tuple(layers), tuple(notes))
