"""Patterns of a layer's smoothing map, and the heads whose values are rotated.

Patterns have names with `*` for an expert's number, and sizes left open. They are discovered on a small
model and hold for the layer of any size: `family` fills in the names and shapes of a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..families.layer_map import Fold, LayerMap
from ..model.architecture import Architecture
from ..model.checkpoint import Checkpoint

_EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.|$)")
Part = Literal["all", "first", "last"]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class FoldPattern:
    """A foldable pair of a kind of layer.

    Attributes:
        source, targets: names on disk, relative to the layer. With `*` in the source it is one expert's, and
            so are the targets; else a target's `*` stands for every expert.
        part: which rows of the source feed the targets.
        groups, repeats: see `Fold`.
        norm_offset: see `Fold`.
    """

    source: str
    targets: tuple[str, ...]
    part: Part = "all"
    groups: int = 1
    repeats: int = 1
    norm_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class LayerPattern:
    """The smoothing map of a kind of layer.

    Attributes:
        shared_inputs: its linears and routers by the tensor that they read, in execution order.
        folds: in execution order of the sources.
        unclipped: linears that feed attention scores.
    """

    shared_inputs: tuple[tuple[str, ...], ...]
    folds: tuple[FoldPattern, ...]
    unclipped: tuple[str, ...]

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> LayerPattern:
        """The inverse of `dataclasses.asdict`, after JSON."""
        folds = [
            FoldPattern(**{**entry, "targets": tuple(entry["targets"])}) for entry in value["folds"]
        ]
        groups = tuple(tuple(group) for group in value["shared_inputs"])
        return cls(groups, tuple(folds), tuple(value["unclipped"]))


def starred(name: str) -> str:
    """A name with `*` for an expert's number."""
    return _EXPERT.sub("*", name)


def family_of_pattern(pattern: LayerPattern, base: LayerMap, shapes: Shapes) -> LayerMap:
    """The map of one layer of a checkpoint.

    Args:
        base: its linears; they stay the same, those that the pattern does not know by themselves.
        shapes: of the layer's weights, by the name of their module.
    """
    linears = set(base.linears)
    names = _by_pattern(shapes)
    folds = [fold for entry in pattern.folds for fold in _folds(entry, names, shapes, linears)]
    groups = _groups(pattern, names, linears)
    known = {name for group in groups for name in group}
    groups += [(name,) for name in base.linears if name not in known]
    targets = dict.fromkeys(target for fold in folds for target in fold.targets)
    scores = {name for entry in pattern.unclipped for name in names.get(entry, ())}
    return replace(
        base,
        shared_inputs=tuple(groups),
        folds=tuple(folds),
        unclipped=frozenset(scores & linears),
        routers=tuple(name for name in targets if name not in linears),
    )


def _by_pattern(shapes: Shapes) -> dict[str, list[str]]:
    """The names of each pattern, experts in the order of their numbers."""
    names: dict[str, list[str]] = {}
    for name in sorted(shapes, key=lambda name: (expert_number(name), name)):
        names.setdefault(starred(name), []).append(name)
    return names


def expert_number(name: str) -> int:
    """The number of the expert that a name belongs to; -1 for none."""
    match = _EXPERT.search(name)
    return int(match[0]) if match else -1


def _groups(
    pattern: LayerPattern, names: Mapping[str, list[str]], linears: set[str]
) -> list[tuple[str, ...]]:
    """The linears by the tensor that they read; experts one after the other."""
    groups: list[tuple[str, ...]] = []
    experts: dict[int, list[tuple[str, ...]]] = {}
    place: int | None = None
    for entry in pattern.shared_inputs:
        members = [name for part in entry for name in names.get(part, ()) if name in linears]
        by_number: dict[int, list[str]] = {}
        for name in members:
            by_number.setdefault(expert_number(name), []).append(name)
        for number, group in sorted(by_number.items()):
            if number < 0:
                groups.append(tuple(group))
            else:
                place = len(groups) if place is None else place
                experts.setdefault(number, []).append(tuple(group))
    routed = [group for number in sorted(experts) for group in experts[number]]
    place = place or 0
    return [*groups[:place], *routed, *groups[place:]]


def _folds(
    entry: FoldPattern, names: Mapping[str, list[str]], shapes: Shapes, linears: set[str]
) -> list[Fold]:
    """The pairs of a pattern in one layer, where their shapes agree."""
    folds = []
    for source in names.get(entry.source, ()):
        number = expert_number(source)
        targets = tuple(
            name
            for part in entry.targets
            for name in names.get(part, ())
            if number < 0 or expert_number(name) == number
        )
        read = {starred(name) for name in targets}
        if read != set(entry.targets) or not any(name in linears for name in targets):
            continue  # a reader is stored in another way, such as fused experts: it cannot be scaled along
        width, count = shapes[targets[0]][-1], shapes[source][0]
        num_rows = width // entry.repeats
        rows = None
        if entry.part == "first":
            rows = (0, num_rows)
        elif entry.part == "last":
            rows = (count - num_rows, count)
        fits = num_rows * entry.repeats == width and num_rows % entry.groups == 0
        whole = entry.part != "all" or num_rows == count
        alike = all(shapes[name][-1] == width for name in targets)
        is_norm = len(shapes[source]) == 1
        if fits and whole and alike and (is_norm or source in linears):
            folds.append(
                Fold(source, targets, rows, entry.norm_offset, entry.groups, entry.repeats)
            )
    return folds


@dataclass(frozen=True, slots=True)
class Head:
    """Rows `[start, stop)` of a value projection, or columns of an output projection: heads of `width`."""

    layer: int
    start: int
    stop: int
    width: int
    is_output: bool = False


def rotated_heads(
    checkpoint: Checkpoint, architecture: Architecture, values: frozenset[str]
) -> dict[str, Head]:
    """The matrices that R2 turns, by full name, of an architecture that has its foldable pairs.

    Args:
        values: sources of the pairs to turn, with `*` for an expert's number.
    """
    heads: dict[str, Head] = {}
    for index, family in enumerate(architecture.layers):
        start = f"{architecture.layer_prefix(index)}."
        for fold in family.folds:
            if starred(fold.source) not in values:
                continue
            source, target = f"{start}{fold.source}.weight", f"{start}{fold.targets[0]}.weight"
            first, last = fold.rows or (0, checkpoint.shape(source)[0])
            width = (last - first) // fold.groups if fold.groups > 1 else _head_width(checkpoint)
            columns = checkpoint.shape(target)[1]
            if width and (last - first) % width == 0 and columns % width == 0:
                heads[source] = Head(index, first, last, width)
                heads[target] = Head(index, 0, columns, width, is_output=True)
    return heads


def value_candidates(architecture: Architecture) -> list[str]:
    """Sources of pairs of two linears, with `*` for an expert's number: R2 may be exact there."""
    found: dict[str, None] = {}
    for family in architecture.layers:
        for fold in family.folds:
            if fold.source in family.linears and len(fold.targets) == 1:
                found[starred(fold.source)] = None
    return list(found)


def _head_width(checkpoint: Checkpoint) -> int:
    config = checkpoint.text_config
    heads = int(config.get("num_attention_heads") or 1)
    return int(config.get("head_dim") or int(config.get("hidden_size") or 0) // heads)
