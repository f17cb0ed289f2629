"""Selection of the linears to quantize, their options, and fused groups that must share a scheme.

Vision towers and projectors too: their blocks are layers, and formats cannot hold all of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...base.errors import BadInput
from ..base.scheme import PER_CHANNEL, Scheme
from ..families.layer_map import LayerMap
from ..families.vision import vision_map
from ..kinds.base.format import WeightFormat
from ..methods.options import SchemeOptions
from ..methods.registry import METHODS
from ..model.architecture import Architecture
from ..model.checkpoint import Checkpoint
from ..model.meta_model import MetaModel
from .request import DEFAULT_GROUP_SIZES, Override, QuantizeRequest, compiled

VISION, PROJECTOR, TEXT = "vision", "projector", "text"
_PROJECTOR = re.compile(
    r"projector|merger|connector|adapter|resampler|perceiver|aligner|embed_vision|^mlp1$"
)
_OTHER_MODALITY = re.compile(r"audio|speech|sound|video_tower")


class VisionModel(MetaModel):
    """The meta-device model whose layers are the blocks of its tower, then its projectors."""

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
        parent, _, number = path.rpartition(".")
        if _PROJECTOR.search(path) and not isinstance(module, nn.ModuleList):
            projectors[path] = module
        elif number.isdigit() and isinstance(model.get_submodule(parent), nn.ModuleList):
            blocks.append((path, module))
    return [*blocks, *projectors.items()]


def part_of(path: str) -> str:
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
    """The layers of a checkpoint's vision side; BadInput where there is none."""
    model = VisionModel(checkpoint)
    if not model.layers:
        raise BadInput(f"{_OPTION}: {checkpoint.folder} ({family}) has no vision tower")
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


def vision_linears(checkpoint: Checkpoint, layers: Architecture | None) -> Shapes:
    names = () if layers is None else _linears(layers)
    return {name: matrix_shape(checkpoint, name) for name in names}


def _linears(architecture: Architecture) -> list[str]:
    return [
        f"{architecture.layer_prefix(index)}.{linear}"
        for index, family in enumerate(architecture.layers)
        for linear in family.linears
    ]


def vision_misfits(
    formats: Sequence[WeightFormat],
    modules: Shapes,
    schemes: Mapping[str, Scheme],
    vision: Collection[str],
) -> tuple[str, ...]:
    """The vision linears that a format cannot hold, for their widths or with the schemes of the text."""
    misfits = []
    for name in (name for name in modules if name in vision):
        try:
            check_widths(formats, {name: modules[name]}, {name: schemes[name]})
        except BadInput:
            misfits.append(name)
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


HEAD = "lm_head"
TORCH_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
BYTES_OF = {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()}

Shapes = dict[str, tuple[int, int]]


def check_widths(
    formats: Sequence[WeightFormat], modules: Shapes, schemes: Mapping[str, Scheme]
) -> None:
    """Raises BadInput where a format cannot hold the scheme or the shape of a module."""
    for weight_format in formats:
        for scheme in dict.fromkeys(schemes.values()):
            weight_format.check_scheme(scheme)
        for name, (out_features, in_features) in modules.items():
            weight_format.check(name, out_features, in_features, schemes[name])


def find_linears(checkpoint: Checkpoint, architecture: Architecture) -> Shapes:
    """Shapes `(out, in)` of all linears of all layers, or BadInput naming a missing or invalid tensor."""
    for name in checkpoint.names:
        if name.endswith(".weight") and checkpoint.dtype_name(name) not in BYTES_OF:
            raise BadInput(
                f"{name} is {checkpoint.dtype_name(name)}, and only F16, BF16 and F32 weights can be read: "
                "the checkpoint is damaged"
            )
    pattern = re.compile(re.escape(architecture.prefix) + r"\.(\d+)\.")
    numbers = {int(match[1]) for name in checkpoint.names if (match := pattern.match(name))}
    if not numbers.issuperset(range(len(architecture.layers))):  # may have more: MTP layers
        raise BadInput(
            f"{checkpoint.path} holds {len(numbers)} decoder layers, "
            f"but its config says {len(architecture.layers)}"
        )
    return {name: matrix_shape(checkpoint, name) for name in _linears(architecture)}


def find_head(checkpoint: Checkpoint) -> tuple[int, int]:
    """Shape of the output projection, or BadInput where it is tied to the embedding."""
    if f"{HEAD}.weight" not in checkpoint or checkpoint.config.get("tie_word_embeddings", False):
        raise BadInput(
            "--quantize-lm-head: this model's output projection is its embedding table (tied), which "
            "must stay a float table to be looked up in: leave the option out"
        )
    return matrix_shape(checkpoint, HEAD)


def matrix_shape(checkpoint: Checkpoint, module: str) -> tuple[int, int]:
    """Shape of one linear, or BadInput where it is missing or not a float matrix."""
    name = f"{module}.weight"
    if name not in checkpoint:
        raise BadInput(f"{checkpoint.path} has no tensor {name!r}")
    dtype, shape = checkpoint.dtype_name(name), checkpoint.shape(name)
    if dtype not in BYTES_OF or len(shape) != 2:
        raise BadInput(
            f"{name} is {dtype} {list(shape)}: only F16, BF16 and F32 matrices can be quantized"
        )
    return shape[0], shape[1]


def find_ignored(patterns: tuple[str, ...], names: list[str]) -> tuple[str, ...]:
    """The names that match `--ignore`; BadInput for a pattern without a match."""
    chosen: set[str] = set()
    for pattern in patterns:
        search = compiled("--ignore", pattern).search
        matches = {name for name in names if search(name)}
        if not matches:
            raise BadInput(f"--ignore {pattern!r} matches no linear, such as {names[0]}")
        chosen |= matches
    return tuple(name for name in names if name in chosen)


def options_by_module(
    shapes: Shapes,
    base: SchemeOptions,
    overrides: Iterable[Override],
    *,
    grouped: bool,
    follows: Collection[str] = (),
) -> tuple[dict[str, SchemeOptions], list[str]]:
    """The options of every module with the group size resolved, and notes about it; `follows` take the group
    size of the others, or one scale per output channel. BadInput for an override without a match, or odd
    widths."""
    options = dict.fromkeys(shapes, base)
    for pattern, changes in overrides:
        matching = [name for name in shapes if pattern.search(name)]
        if not matching:
            raise BadInput(
                f"--override {pattern.pattern!r} matches no quantized linear, such as "
                f"{next(iter(shapes))}"
            )
        options |= {name: replace(options[name], **changes) for name in matching}
    open_names = {n: shapes[n] for n, option in options.items() if option.group_size is None}
    if not grouped or not open_names:
        return options, []
    leading = {name: shape for name, shape in open_names.items() if name not in follows}
    size, notes = _group_size(leading or open_names)
    for name, (_, in_features) in open_names.items():
        fits = name not in follows or in_features % size == 0
        options[name] = replace(options[name], group_size=size if fits else PER_CHANNEL)
    return options, notes


def _group_size(shapes: Shapes) -> tuple[int, list[str]]:
    preferred = DEFAULT_GROUP_SIZES[0]
    for size in DEFAULT_GROUP_SIZES:
        if all(in_features % size == 0 for _, in_features in shapes.values()):
            if size == preferred:
                return size, []
            odd = next(name for name, shape in shapes.items() if shape[1] % preferred)
            return size, [
                f"note: group size {size}, the largest usual one that divides every width "
                f"({odd} has {shapes[odd][1]} inputs)"
            ]
    smallest = DEFAULT_GROUP_SIZES[-1]
    odd = next(name for name, shape in shapes.items() if shape[1] % smallest)
    raise BadInput(
        f"no usual group size divides the {shapes[odd][1]} inputs of {odd}: "
        "give one with --group-size, -1 for one scale per output channel"
    )


def split_fusions(
    architecture: Architecture, schemes: Mapping[str, Scheme]
) -> list[tuple[str, ...]]:
    """The fused matrices of servers, by names of their linears, that do not share one scheme."""
    groups = [
        tuple(f"{architecture.layer_prefix(index)}.{linear}" for linear in group)
        for index, family in enumerate(architecture.layers)
        for group in family.shared_inputs
    ]
    return [group for group in groups if len({schemes.get(name) for name in group}) > 1]
