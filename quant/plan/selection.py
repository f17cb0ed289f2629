"""Selection of the linears to quantize, their options, and fused groups that must share a scheme."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import torch

from ..base.errors import BadInput
from ..base.scheme import PER_CHANNEL, Scheme
from ..methods.options import SchemeOptions
from ..model.architecture import Architecture
from ..model.checkpoint import Checkpoint
from .request import Override, compiled

DEFAULT_GROUP_SIZES = (128, 64, 32, 16)
HEAD = "lm_head"
TORCH_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
BYTES_OF = {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()}

Shapes = dict[str, tuple[int, int]]


def find_linears(checkpoint: Checkpoint, architecture: Architecture) -> Shapes:
    """Shapes `(out, in)` of all linears of all layers, or BadInput naming a missing or invalid tensor."""
    for name in checkpoint.names:
        if name.endswith(".weight") and checkpoint.dtype_name(name) not in BYTES_OF:
            raise BadInput(
                f"{name} is {checkpoint.dtype_name(name)}, and only F16, BF16 and F32 weights can be read: "
                "the checkpoint is damaged"
            )
    pattern = re.compile(re.escape(architecture.prefix) + r"\.(\d+)\.")
    held = {int(match[1]) for name in checkpoint.names if (match := pattern.match(name))}
    if not held.issuperset(range(len(architecture.layers))):  # may have more: MTP layers
        raise BadInput(
            f"{checkpoint.path} holds {len(held)} decoder layers, "
            f"but its config says {len(architecture.layers)}"
        )
    return {
        f"{architecture.layer_prefix(index)}.{linear}": matrix_shape(
            checkpoint, f"{architecture.layer_prefix(index)}.{linear}"
        )
        for index, family in enumerate(architecture.layers)
        for linear in family.linears
    }


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
    """The options of every module with the group size resolved, and notes about the choice.

    Args:
        follows: modules that take the group size of the others, or where that does not divide their widths
            one scale for each output channel.

    Raises:
        BadInput: an override without a match, or widths that no usual group size divides.
    """
    options = dict.fromkeys(shapes, base)
    for override in overrides:
        found = [name for name in shapes if override.pattern.search(name)]
        if not found:
            raise BadInput(
                f"--override {override.pattern.pattern!r} matches no quantized linear, such as "
                f"{next(iter(shapes))}"
            )
        options |= {name: override.apply(options[name]) for name in found}
    open_names = {name: shapes[name] for name, one in options.items() if one.group_size is None}
    if not grouped or not open_names:
        return options, []
    leading = {name: shape for name, shape in open_names.items() if name not in follows}
    size, notes = _group_size(leading or open_names)
    for name, (_, in_features) in open_names.items():
        fits = name not in follows or in_features % size == 0
        options[name] = replace(options[name], group_size=size if fits else PER_CHANNEL)
    return options, notes


def _group_size(shapes: Shapes) -> tuple[int, list[str]]:
    """The default group size, and notes about it."""
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


def fused_groups(architecture: Architecture) -> Iterable[tuple[str, ...]]:
    """Full names of the linears that servers fuse into one matrix: q/k/v, and gate/up."""
    for index, family in enumerate(architecture.layers):
        for group in family.shared_inputs:
            if len(group) > 1:
                yield tuple(f"{architecture.layer_prefix(index)}.{linear}" for linear in group)


def split_fusions(
    architecture: Architecture, schemes: Mapping[str, Scheme]
) -> list[tuple[str, ...]]:
    """The fused groups whose members end up with different schemes, or only partly quantized."""
    return [
        group
        for group in fused_groups(architecture)
        if len({schemes.get(name) for name in group}) > 1
    ]
