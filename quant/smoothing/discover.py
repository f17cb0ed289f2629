"""Discovery of a random model's smoothing map: which pairs each kind of layer can fold, by trials."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..base.errors import BadInput
from .attention_scores import ScoreLinears, score_linears
from .intervention import UNKNOWN, Intervention
from .patterns import FoldPattern, LayerPattern, Part, expert_number, starred
from .proof import largest_change, rounding_noise
from .random_model import RandomModel

_SAME_LOGITS = 1e-5  # of all folds at once, in float32
_ROUNDINGS = 10  # that a fold into a norm with an offset may differ by
_NORM_OFFSETS = (0.0, 1.0)
Targets = dict[str, torch.Tensor]


def discover(model: RandomModel) -> list[LayerPattern]:
    """The map of each layer; layers of one kind share one that was proven in all of them at once.

    Raises:
        BadInput: the model does not run.
    """
    trials = Intervention(model)
    kinds: dict[object, LayerPattern] = {}
    patterns = []
    for index in range(len(model.layers)):
        kind = _kind(trials, index)
        if kind not in kinds:
            kinds[kind] = _discover_layer(trials, index, whole=False)
        patterns.append(kinds[kind])
    tolerance = max(_SAME_LOGITS, _ROUNDINGS * rounding_noise(model))
    if largest_change(model, patterns) <= tolerance:
        return patterns
    # A layer's keys and values may serve others, and layers that are built alike may still differ in that.
    patterns = [_discover_layer(trials, index, whole=True) for index in range(len(patterns))]
    if (change := largest_change(model, patterns)) > tolerance:
        raise BadInput(f"folds that hold one by one change the logits together, by {change:.1e}")
    return patterns


def _kind(trials: Intervention, index: int) -> object:
    """What a layer's modules are called, which classes they have, and which of them run."""
    layer = trials.model.layers[index]
    ran = {starred(path) for path in (*trials.readers[index], *trials.norms[index])}
    modules = {(starred(path), type(module)) for path, module in layer.named_modules()}
    return frozenset(modules), frozenset(ran), frozenset(trials.model.names[index].values())


def _discover_layer(trials: Intervention, index: int, *, whole: bool) -> LayerPattern:
    """Try every source of a layer; of experts the first one that ran stands for all.

    Args:
        whole: see `Intervention.trial`.
    """
    names = trials.model.names[index]
    sources = {starred(path): path for path in reversed(trials.order[index])}
    readers = [path for path in sources.values() if path in trials.readers[index]]
    scores = score_linears(trials.model, index, readers)
    folds: list[FoldPattern] = []
    for path in dict.fromkeys(trials.order[index]):
        if path in names and path == sources[starred(path)]:
            folds += _Source(trials, index, path, whole).folds(scores)
    unclipped = [starred(names[path]) for path in readers if path in names and path in scores.all]
    return LayerPattern(_shared_inputs(trials, index), tuple(folds), tuple(unclipped))


@dataclass(frozen=True, slots=True)
class _Source:
    """A norm or linear of a layer that may be folded into.

    Attributes:
        whole: see `Intervention.trial`.
    """

    trials: Intervention
    index: int
    path: str
    whole: bool

    def folds(self, scores: ScoreLinears) -> Iterator[FoldPattern]:
        """Its pairs."""
        if self.path in self.trials.norms[self.index]:
            yield from self._norm_folds(scores)
            return
        targets = self._trial()
        if targets is not None:
            yield from self._pattern(targets, "all")
            return
        parts: tuple[Part, ...] = ("first", "last")
        for part in parts:
            targets = self._largest_part(part)
            if targets is not None:
                yield from self._pattern(targets, part)

    def _trial(self, rows: slice = slice(None), offset: float = 0.0) -> Targets | None:
        return self.trials.trial(self.index, self.path, rows, offset, whole=self.whole)

    def _norm_folds(self, scores: ScoreLinears) -> Iterator[FoldPattern]:
        for offset in _NORM_OFFSETS:
            targets = self._trial(offset=offset)
            if targets is None:
                continue
            # It is exact, but made quantized Gemma 3 worse than plain rounding (llm-compressor #2522).
            if not (offset and scores.normalized & targets.keys()):
                yield from self._pattern(targets, "all", offset)
            return

    def _largest_part(self, part: Part) -> Targets | None:
        """What the most first or last rows of a fused projection feed that can be folded."""
        num_rows = len(self.trials.readers[self.index][self.path].get_parameter("weight"))

        def attempt(count: int) -> Targets | None:
            first = part == "first"
            return self._trial(slice(0, count) if first else slice(num_rows - count, num_rows))

        best = attempt(1)
        if best is None:
            return None
        low, high = (
            1,
            num_rows,
        )  # rows can be folded one by one, so a search by halves finds the last
        while high - low > 1:
            middle = (low + high) // 2
            targets = attempt(middle)
            low, high, best = (low, middle, best) if targets is None else (middle, high, targets)
        return best

    def _pattern(
        self, targets: Targets, part: Part, norm_offset: float = 0.0
    ) -> Iterator[FoldPattern]:
        """The pattern of a proven pair; none where it has no name on disk or another channel order."""
        names = self.trials.model.names[self.index]
        layout = _layout(list(targets.values()))
        if layout is not None and all(path in names for path in targets) and self._covers(targets):
            on_disk = dict.fromkeys(starred(names[path]) for path in targets)
            yield FoldPattern(starred(names[self.path]), tuple(on_disk), part, *layout, norm_offset)

    def _covers(self, targets: Targets) -> bool:
        """Whether patterns of names say the same: all experts that ran, or those of the source's expert."""
        patterns = {starred(path) for path in targets}
        ran = {path for path in self.trials.readers[self.index] if starred(path) in patterns}
        number = expert_number(self.path)
        if number >= 0:
            ran = {path for path in ran if expert_number(path) == number}
        return ran == set(targets)


def _layout(maps: list[torch.Tensor]) -> tuple[int, int] | None:
    """Groups and repeats (see `Fold`) that every map of channels follows; None for another order."""
    width = len(maps[0])
    if any(len(channels) != width for channels in maps):
        return None
    known = torch.stack(maps)
    num_rows = int(known.max()) + 1
    if num_rows < 1 or width % num_rows or bool((known < UNKNOWN).any()):
        return None
    repeats = width // num_rows
    for groups in [1] if repeats == 1 else [g for g in range(1, num_rows + 1) if num_rows % g == 0]:
        rows = torch.arange(num_rows).view(groups, 1, -1).expand(-1, repeats, -1).flatten()
        if bool(((known == rows) | (known == UNKNOWN)).all()):
            return groups, repeats
    return None


def _shared_inputs(trials: Intervention, index: int) -> tuple[tuple[str, ...], ...]:
    """The readers with a name on disk, by the tensor that they read, in execution order."""
    names, inputs = trials.model.names[index], trials.inputs[index]
    groups: list[list[str]] = []
    seen: set[str] = set()
    for path in trials.readers[index]:
        pattern = starred(names.get(path, ""))
        if not pattern or pattern in seen:
            continue
        seen.add(pattern)
        for group in groups:
            if _same_inputs(inputs[group[0]], inputs[path]):
                group.append(path)
                break
        else:
            groups.append([path])
    return tuple(tuple(starred(names[path]) for path in group) for group in groups)


def _same_inputs(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))
