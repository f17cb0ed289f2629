"""Patterns of a layer's smoothing map: names with `*` for an expert's number, and sizes left open.

They are discovered on a small model and hold for the layer of any size: `family_of_pattern` fills in the
names and shapes of a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..families.layer_map import Fold, LayerMap

_EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.|$)")
Part = Literal["all", "first", "last"]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class FoldPattern:
    """A foldable pair, as `Fold`, names with `*`: of one expert, or in targets alone, of every expert. `part`
    are the source's rows that feed the targets."""

    source: str
    targets: tuple[str, ...]
    part: Part = "all"
    groups: int = 1
    repeats: int = 1
    norm_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class LayerPattern:
    """Map of a kind of layer: linears and routers by input, foldable pairs in order, and `unclipped`."""

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
    return _EXPERT.sub("*", name)


def family_of_pattern(pattern: LayerPattern, base: LayerMap, shapes: Shapes) -> LayerMap:
    """Map of one layer, by its linears and the shapes of weights; unknown linears stand alone."""
    linears = set(base.linears)
    names: dict[str, list[str]] = {}  # by pattern, experts in the order of their numbers
    for name in sorted(shapes, key=lambda name: (expert_number(name), name)):
        names.setdefault(starred(name), []).append(name)
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


def expert_number(name: str) -> int:
    match = _EXPERT.search(name)
    return int(match[0]) if match else -1


def _groups(
    pattern: LayerPattern, names: Mapping[str, list[str]], linears: set[str]
) -> list[tuple[str, ...]]:
    """The linears by the tensor that they read; experts one after the other."""
    groups: list[tuple[str, ...]] = []
    experts: dict[int, list[tuple[str, ...]]] = {}
    before = 0  # groups that run before the first expert
    for entry in pattern.shared_inputs:
        by_number: dict[int, list[str]] = {}
        for name in (name for part in entry for name in names.get(part, ()) if name in linears):
            by_number.setdefault(expert_number(name), []).append(name)
        for number, group in sorted(by_number.items()):
            if number < 0:
                groups.append(tuple(group))
            else:
                before = before if experts else len(groups)
                experts.setdefault(number, []).append(tuple(group))
    routed = [group for number in sorted(experts) for group in experts[number]]
    return [*groups[:before], *routed, *groups[before:]]


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
