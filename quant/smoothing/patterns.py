"""Patterns of a layer's smoothing map: a `LayerMap` of a small model, with `*` for an expert's number.

They hold for the layer of any size: `family_of_pattern` fills in the names and shapes of a checkpoint. A fold
with `*` in its source is within one expert; with `*` in targets alone it is of every expert. Its `rows` say
whether all rows feed the targets, the first or the last.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from ..families.layer_map import Fold, LayerMap

_EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.|$)")
Shapes = Mapping[str, tuple[int, ...]]


def starred(name: str) -> str:
    return _EXPERT.sub("*", name)


def family_of_pattern(pattern: LayerMap, base: LayerMap, shapes: Shapes) -> LayerMap:
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
    pattern: LayerMap, names: Mapping[str, list[str]], linears: set[str]
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
    entry: Fold, names: Mapping[str, list[str]], shapes: Shapes, linears: set[str]
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
        rows = entry.rows
        if rows is not None:
            rows = (0, num_rows) if rows[0] == 0 else (count - num_rows, count)
        fits = num_rows * entry.repeats == width and num_rows % entry.groups == 0
        whole = rows is not None or num_rows == count
        alike = all(shapes[name][-1] == width for name in targets)
        is_norm = len(shapes[source]) == 1
        if fits and whole and alike and (is_norm or source in linears):
            folds.append(replace(entry, source=source, targets=targets, rows=rows))
    return folds
