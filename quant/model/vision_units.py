"""The blocks of a vision tower and the projectors behind it, as layers that are loaded one at a time."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from torch import nn

from ..families.layer_map import LayerMap
from ..families.vision import vision_map
from .architecture import Architecture
from .checkpoint import Checkpoint
from .meta_model import MetaModel

VISION, PROJECTOR, TEXT = "vision", "projector", "text"
_PROJECTOR = re.compile(
    r"projector|merger|connector|adapter|resampler|perceiver|aligner|embed_vision|^mlp1$"
)
_OTHER_MODALITY = re.compile(r"audio|speech|sound|video_tower")


class VisionModel(MetaModel):
    """The meta-device model whose layers are the blocks of its tower, then its projectors.

    Attributes:
        parts: `vision` or `projector`, of each layer.
    """

    def __init__(self, checkpoint: Checkpoint):
        super().__init__(checkpoint)
        decoder, prefix = self.layers, self.disk_prefix
        units = [
            (path, disk, module)
            for path, module in vision_units(self.model, self.text_path)
            if (disk := self._disk_path(path, module)) is not None and disk != prefix
        ]
        self.paths = [path for path, _, _ in units]
        self.disk_paths = [disk for _, disk, _ in units]
        self.layers: list[Any] = [module for _, _, module in units]
        self.parts = [part_of(path) for path in self.paths]
        self._finish()
        self.ends = decoder[:1]

    def _disk_path(self, path: str, module: nn.Module) -> str | None:
        """Prefix on disk of a module's tensors; None where they are converted on loading."""
        prefixes = Counter(
            disk.removesuffix(f".{name}")
            for name, _ in module.named_parameters()
            for disk in self.sources.get(f"{path}.{name}", ())
            if disk.endswith(f".{name}") and self.weight_map.is_direct(disk)
        )
        return prefixes.most_common(1)[0][0] if prefixes else None


def vision_architecture(checkpoint: Checkpoint, family: str) -> Architecture | None:
    """The layers of a checkpoint's vision side; None where it has none."""
    model = VisionModel(checkpoint)
    if not model.layers:
        return None
    layers: list[LayerMap] = []
    for index, module in enumerate(model.layers):
        on_disk = {name: disk for disk, name in model.names_in_layer(index).items()}
        linears = [
            on_disk[f"{path}.weight"].removesuffix(".weight")
            for path, inner in module.named_modules()
            if type(inner) is nn.Linear and f"{path}.weight" in on_disk
        ]
        layers.append(vision_map(linears, set(on_disk.values())))
    return Architecture(family, "", tuple(layers), (), (), model)


def vision_units(model: nn.Module, text: str) -> list[tuple[str, nn.Module]]:
    """Paths and modules outside the language model at path `text`: blocks in their order, then projectors."""
    blocks: list[tuple[str, nn.Module]] = []
    projectors: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        inside = path == text or path.startswith(f"{text}.")
        if inside or not path or _OTHER_MODALITY.search(path) or not _has_linears(module):
            continue
        if any(path.startswith(f"{outer}.") for outer, _ in [*blocks, *projectors.items()]):
            continue
        if _PROJECTOR.search(path) and not isinstance(module, nn.ModuleList):
            projectors[path] = module
        elif _is_block(model, path):
            blocks.append((path, module))
    return [*blocks, *projectors.items()]


def _is_block(model: nn.Module, path: str) -> bool:
    parent, _, number = path.rpartition(".")
    return number.isdigit() and isinstance(model.get_submodule(parent), nn.ModuleList)


def _has_linears(module: nn.Module) -> bool:
    return any(type(inner) is nn.Linear for inner in module.modules())


def part_of(path: str) -> str:
    """The part that a module outside the language model belongs to."""
    return PROJECTOR if any(_PROJECTOR.search(name) for name in path.split(".")) else VISION
