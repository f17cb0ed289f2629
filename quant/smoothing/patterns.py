"""Patterns of a layer's smoothing map, and where rotations go.

Patterns have names with `*` for an expert's number, and sizes left open. They are discovered on a small
model and hold for the layer of any size: `family` fills in the names and shapes of a checkpoint. A rotation
map says what reads the residual stream (what is behind a norm of the layer), what writes into it (its other
matrices with as many rows as the stream is wide; `rotate` proves that these are all), and where heads' values
pass.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..base.errors import BadInput
from ..families.layer_map import Fold, LayerMap
from ..families.registry import type_of
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


R1, R2 = "R1", "R2"


@dataclass(frozen=True, slots=True)
class Head:
    """Rows `[start, stop)` of a value projection, or columns of an output projection: heads of `width`."""

    layer: int
    start: int
    stop: int
    width: int


@dataclass(frozen=True, slots=True)
class RotationMap:
    """Tensors by full name.

    Attributes:
        hidden: width of the residual stream; 0: it is not rotated.
        embedding, head: the token embedding, and the output projection.
        tied: whether the head is the embedding on disk.
        norms: what is added to the weight of each norm on the stream before it multiplies.
        readers: the norm in front of each matrix that reads the stream, the head included.
        writers: matrices whose outputs are added to the stream, and their biases.
        values, outputs: what R2 turns.
    """

    hidden: int
    embedding: str
    head: str
    tied: bool
    norms: dict[str, float] = field(default_factory=dict)
    readers: dict[str, str] = field(default_factory=dict)
    writers: frozenset[str] = frozenset()
    values: dict[str, Head] = field(default_factory=dict)
    outputs: dict[str, Head] = field(default_factory=dict)


def rotation_map_of(
    checkpoint: Checkpoint, architecture: Architecture, *, residual: bool, values: frozenset[str]
) -> RotationMap:
    """The map of a checkpoint whose architecture has its foldable pairs.

    Args:
        residual: whether R1 is asked for.
        values: sources of the pairs that R2 turns, with `*` for an expert's number.

    Raises:
        BadInput: the stream cannot be told, or a norm on it has a bias.
    """
    meta = architecture.meta_model
    embedding = _on_disk(architecture, meta.model.get_input_embeddings())
    head_module = meta.model.get_output_embeddings()
    if embedding is None or head_module is None:
        raise _refused(checkpoint, "it has no token embedding or no output projection")
    # Not by `tie_word_embeddings`, which text configs of wrapped models lack or say otherwise.
    head = _on_disk(architecture, head_module)
    head = None if head == embedding else head
    hidden = checkpoint.shape(embedding)[-1]
    targets = RotationMap(
        hidden if residual else 0, embedding, head or "lm_head.weight", head is None
    )
    norms, readers, writers = targets.norms, targets.readers, set[str]()
    for index, family in enumerate(architecture.layers):
        start = f"{architecture.layer_prefix(index)}."
        if residual:
            offset = _layer_readers(checkpoint, family, start, hidden, norms, readers)
            writers |= _writers(checkpoint, family, start, hidden)
            norms[_final_norm(checkpoint, architecture, hidden)] = offset
        for fold in family.folds:
            if starred(fold.source) in values:
                _heads(checkpoint, fold, start, index, targets)
    if residual:
        readers[targets.head] = _final_norm(checkpoint, architecture, hidden)
        for norm in norms:
            if norm.removesuffix("weight") + "bias" in checkpoint:
                raise _refused(checkpoint, f"{norm.removesuffix('.weight')} has a bias")
    return RotationMap(
        targets.hidden,
        embedding,
        targets.head,
        targets.tied,
        norms,
        readers,
        frozenset(writers),
        targets.values,
        targets.outputs,
    )


def value_candidates(architecture: Architecture) -> list[str]:
    """Sources of pairs of two linears, with `*` for an expert's number: R2 may be exact there."""
    found: dict[str, None] = {}
    for family in architecture.layers:
        for fold in family.folds:
            if fold.source in family.linears and len(fold.targets) == 1:
                found[starred(fold.source)] = None
    return list(found)


def _layer_readers(
    checkpoint: Checkpoint,
    family: LayerMap,
    start: str,
    hidden: int,
    norms: dict[str, float],
    readers: dict[str, str],
) -> float:
    """Add the norms of a layer and what reads them; returns what its norms add to their weights."""
    offset: float | None = None
    for fold in family.folds:
        norm = f"{start}{fold.source}.weight"
        # A norm on the stream is the layer's own child; inside attention are those of latents and heads.
        if fold.source in family.linears or "." in fold.source:
            continue
        if checkpoint.shape(norm) == (hidden,):
            offset = norms[norm] = fold.norm_offset
            readers |= dict.fromkeys((f"{start}{name}.weight" for name in fold.targets), norm)
    if offset is None:
        raise _refused(checkpoint, f"no norm of {start[:-1]} has only linears behind it")
    return offset


def _writers(checkpoint: Checkpoint, family: LayerMap, start: str, hidden: int) -> set[str]:
    behind_norms = {
        name for fold in family.folds if fold.source not in family.linears for name in fold.targets
    }
    return {
        name
        for name in checkpoint.names
        if name.startswith(start)
        and name.endswith(".weight")
        and len(shape := checkpoint.shape(name)) == 2
        and shape[0] == hidden
        and name.removeprefix(start).removesuffix(".weight") not in behind_norms
    }


def _final_norm(checkpoint: Checkpoint, architecture: Architecture, hidden: int) -> str:
    """The only vector as wide as the stream outside the layers."""
    prefix = f"{architecture.prefix}."
    names = [
        name
        for name in checkpoint.names
        if not name.startswith(prefix)
        and name.endswith("weight")
        and checkpoint.shape(name) == (hidden,)
    ]
    if len(names) != 1:
        raise _refused(checkpoint, f"it has {len(names)} norms of {hidden} outside its layers")
    return names[0]


def _heads(
    checkpoint: Checkpoint, fold: Fold, start: str, index: int, targets: RotationMap
) -> None:
    source, target = f"{start}{fold.source}.weight", f"{start}{fold.targets[0]}.weight"
    first, last = fold.rows or (0, checkpoint.shape(source)[0])
    width = (last - first) // fold.groups if fold.groups > 1 else _head_width(checkpoint)
    columns = checkpoint.shape(target)[1]
    if width and (last - first) % width == 0 and columns % width == 0:
        targets.values[source] = Head(index, first, last, width)
        targets.outputs[target] = Head(index, 0, columns, width)


def _head_width(checkpoint: Checkpoint) -> int:
    config = checkpoint.text_config
    heads = int(config.get("num_attention_heads") or 1)
    return int(config.get("head_dim") or int(config.get("hidden_size") or 0) // heads)


def _on_disk(architecture: Architecture, module: object) -> str | None:
    """The tensor on disk of a module's weight."""
    meta = architecture.meta_model
    paths = [path for path, each in meta.model.named_modules() if each is module]
    names = [name for path in paths for name in meta.sources.get(f"{path}.weight", ())]
    return names[0] if names else None


def _refused(checkpoint: Checkpoint, reason: str) -> BadInput:
    kind = type_of(checkpoint.config)
    return BadInput(f"--rotate: model type {kind!r} cannot be rotated: {reason}: leave it out")
