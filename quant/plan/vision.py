"""Vision towers and projectors in a plan: blocks as layers, linears, and what formats cannot hold."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from ..base.errors import BadInput
from ..base.scheme import Scheme
from ..families.layer_map import LayerMap
from ..families.vision import vision_map
from ..kinds.base.format import WeightFormat
from ..methods.registry import METHODS
from ..model.architecture import Architecture
from ..model.checkpoint import Checkpoint
from ..model.meta_model import MetaModel
from ..model.parameters import by_kind
from .request import QuantizeRequest
from .selection import Shapes, matrix_shape

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
        if inside or not path or _OTHER_MODALITY.search(path):
            continue
        if not any(type(inner) is nn.Linear for inner in module.modules()):
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


def part_of(path: str) -> str:
    """The part that a module outside the language model belongs to."""
    return PROJECTOR if any(_PROJECTOR.search(name) for name in path.split(".")) else VISION


_OPTION = "--quantize-vision"


def refuse_vision(request: QuantizeRequest, formats: Sequence[WeightFormat]) -> None:
    """Raises BadInput where the vision tower cannot be quantized with the other options."""
    known = [method.name for method in METHODS.values() if method.in_towers]
    reasons = {
        f"method {request.method} takes decoder layers alone; choose {', '.join(known)}": (
            request.method not in known
        ),
        "a GGUF file holds the language model, and llama.cpp wants the tower in another": any(
            weight_format.name == "gguf" for weight_format in formats
        ),
        "--stats keeps statistics of decoder layers: leave one of them out": request.stats
        is not None,
        "--asymmetric-calibration is of decoder layers: leave one of them out": (
            request.options.asymmetric
        ),
        "--rotate turns the language model alone: leave one of them out": bool(request.rotations),
    }
    for reason, holds in reasons.items():
        if holds:
            raise BadInput(f"{_OPTION}: {reason}")


def vision_layers(checkpoint: Checkpoint, family: str) -> Architecture:
    """The layers of the vision side.

    Raises:
        BadInput: there is none.
    """
    layers = vision_architecture(checkpoint, family)
    if layers is None:
        raise BadInput(f"{_OPTION}: {checkpoint.folder} ({family}) has no vision tower")
    return layers


def vision_linears(checkpoint: Checkpoint, layers: Architecture | None) -> Shapes:
    """Shapes `(out, in)` of the linears of the vision tower and projector."""
    return (
        {}
        if layers is None
        else {
            name: matrix_shape(checkpoint, name)
            for index, family in enumerate(layers.layers)
            for linear in family.linears
            for name in [f"{layers.layer_prefix(index)}.{linear}"]
        }
    )


def vision_misfits(
    formats: Sequence[WeightFormat],
    modules: Shapes,
    schemes: Mapping[str, Scheme],
    vision: Collection[str],
) -> tuple[str, ...]:
    """The vision linears that a format cannot hold, for their widths or beside the schemes of the text."""
    misfits = [
        name
        for name in modules
        if name in vision and not all(_fits(f, name, modules, schemes[name]) for f in formats)
    ]
    text = {name: scheme for name, scheme in schemes.items() if name not in vision}
    for weight_format in formats:
        for scheme in dict.fromkeys(schemes[name] for name in vision if name in schemes):
            try:
                weight_format.config({**text, "vision": scheme}, ())
            except BadInput:
                misfits += [
                    name
                    for name in modules
                    if name in vision and schemes[name] == scheme and name not in misfits
                ]
    return tuple(misfits)


def _fits(weight_format: WeightFormat, name: str, modules: Shapes, scheme: Scheme) -> bool:
    try:
        weight_format.check_scheme(scheme)
        weight_format.check(name, *modules[name], scheme)
    except BadInput:
        return False
    return True


def misfit_notes(misfits: Sequence[str]) -> list[str]:
    """A note about the vision linears that stay."""
    if not misfits:
        return []
    return [
        f"note: {len(misfits)} linears of the vision side stay as they are, for the format does not hold "
        f"their widths: {', '.join(by_kind(misfits))}"
    ]
