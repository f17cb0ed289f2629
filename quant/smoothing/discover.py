"""Discovery of a random model's smoothing map: the pairs that each kind of layer can fold, by trials.

The proof is one of logits: random scales in every fold at once leave them as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ...base.errors import BadInput
from ..families.layer_map import Fold, LayerMap
from ..methods.base import LayerProblem
from ..methods.folding import can_fold, column_scales, divided_bias, fold_into_norm, row_scales
from .intervention import UNKNOWN, Intervention, ScoreLinears, score_linears
from .patterns import expert_number, family_of_pattern, starred
from .small_model import RandomModel

_SAME_LOGITS = 1e-5  # of all folds at once, in float32
_ROUNDINGS = 10  # that a fold into a norm with an offset may differ by
_NORM_OFFSETS = (0.0, 1.0)
Targets = dict[str, torch.Tensor]
_SPREAD = 1.0  # standard deviation of the scales' exponents
_ONE_ULP = 1.2e-7  # of float32, relative


def discover(model: RandomModel) -> list[LayerMap]:
    """The map of each layer, one for all layers of a kind, proven at once; BadInput where the model fails."""
    trials = Intervention(model)
    kinds: dict[object, LayerMap] = {}
    patterns = []
    for index in range(len(model.layers)):
        # Names of the modules, their classes, and which of them run.
        layer = trials.model.layers[index]
        ran = {starred(path) for path in (*trials.readers[index], *trials.norms[index])}
        modules = {(starred(path), type(module)) for path, module in layer.named_modules()}
        kind = frozenset(modules), frozenset(ran), frozenset(model.names[index].values())
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


def _discover_layer(trials: Intervention, index: int, *, whole: bool) -> LayerMap:
    """Try every source of a layer, the first expert for all; `whole` as in `Intervention.trial`."""
    names = trials.model.names[index]
    sources = {starred(path): path for path in reversed(trials.order[index])}
    readers = [path for path in sources.values() if path in trials.readers[index]]
    scores = score_linears(trials.model, index, readers)
    folds: list[Fold] = []
    for path in dict.fromkeys(trials.order[index]):
        if path in names and path == sources[starred(path)]:
            folds += _Source(trials, index, path, whole).folds(scores)
    unclipped = {starred(names[path]) for path in readers if path in names and path in scores.all}
    return LayerMap(_shared_inputs(trials, index), tuple(folds), frozenset(unclipped))


@dataclass(frozen=True, slots=True)
class _Source:
    """A norm or linear of a layer that may be folded into; `whole` as in `Intervention.trial`."""

    trials: Intervention
    index: int
    path: str
    whole: bool

    def folds(self, scores: ScoreLinears) -> Iterator[Fold]:
        if self.path in self.trials.norms[self.index]:
            for offset in _NORM_OFFSETS:
                if (targets := self._trial(offset=offset)) is not None:
                    # Exact, but it made quantized Gemma 3 worse than plain rounding (llm-compressor #2522).
                    if not (offset and scores.normalized & targets.keys()):
                        yield from self._pattern(targets, norm_offset=offset)
                    return
            return
        if (targets := self._trial()) is not None:
            yield from self._pattern(targets)
            return
        for is_first in (True, False):
            yield from self._largest_part(is_first)

    def _trial(self, rows: slice = slice(None), offset: float = 0.0) -> Targets | None:
        return self.trials.trial(self.index, self.path, rows, offset, whole=self.whole)

    def _largest_part(self, is_first: bool) -> Iterator[Fold]:
        """The pattern of the most first or last rows of a fused projection that can be folded."""
        num_rows = len(self.trials.readers[self.index][self.path].get_parameter("weight"))

        def rows(count: int) -> tuple[int, int]:
            return (0, count) if is_first else (num_rows - count, num_rows)

        best = self._trial(slice(*rows(1)))
        if best is None:
            return
        # Rows can be folded one by one, so a search by halves finds the last.
        low, high = 1, num_rows
        while high - low > 1:
            middle = (low + high) // 2
            targets = self._trial(slice(*rows(middle)))
            low, high, best = (low, middle, best) if targets is None else (middle, high, targets)
        yield from self._pattern(best, rows(low))

    def _pattern(
        self, targets: Targets, rows: tuple[int, int] | None = None, norm_offset: float = 0.0
    ) -> Iterator[Fold]:
        """The pattern of a proven pair; none where it has no name on disk or another channel order."""
        names = self.trials.model.names[self.index]
        layout = _layout(list(targets.values()))
        # Patterns of names must say the same: all experts that ran, or those of the source's expert.
        patterns = {starred(path) for path in targets}
        ran = {path for path in self.trials.readers[self.index] if starred(path) in patterns}
        if (number := expert_number(self.path)) >= 0:
            ran = {path for path in ran if expert_number(path) == number}
        if layout is not None and all(path in names for path in targets) and ran == set(targets):
            on_disk = dict.fromkeys(starred(names[path]) for path in targets)
            yield Fold(starred(names[self.path]), tuple(on_disk), rows, norm_offset, *layout)


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
            first, second = inputs[group[0]], inputs[path]
            if len(first) == len(second) and all(map(torch.equal, first, second)):
                group.append(path)
                break
        else:
            groups.append([path])
    return tuple(tuple(starred(names[path]) for path in group) for group in groups)


def fold_layer(family: LayerMap, tensors: dict[str, torch.Tensor], seed: int) -> int:
    """Fold random powers of two into every pair of a float32 layer, in place; returns their number."""
    generator = torch.Generator().manual_seed(seed)
    done = 0
    for fold in family.folds:
        problem = _problem(family, tensors)
        if not can_fold(fold, problem):
            continue
        width = tensors[f"{fold.targets[0]}.weight"].shape[1]
        exponents = _SPREAD * torch.randn(width // fold.repeats, generator=generator)
        scales = torch.exp2(exponents.round())
        source = f"{fold.source}.weight"
        if fold.source in problem.norms:
            tensors[source], scales = fold_into_norm(tensors[source], scales, fold.norm_offset)
            for name, bias in divided_bias(fold, problem, scales).items():
                tensors[f"{name}.bias"] = bias
        else:
            divisors = row_scales(fold, len(tensors[source]), scales)
            tensors[source] = tensors[source] / divisors[:, None]
        columns = column_scales(fold, scales)
        for target in fold.targets:
            tensors[f"{target}.weight"] = tensors[f"{target}.weight"] * columns
        done += 1
    return done


def _problem(family: LayerMap, tensors: dict[str, torch.Tensor]) -> LayerProblem:
    """The parts of a problem that decide whether a fold of a layer is done."""
    linears = family.linears
    norms = {fold.source for fold in family.folds} - set(linears)
    return LayerProblem(
        prefix="",
        family=family,
        schemes={},
        scale_dtypes={},
        weights={name: tensors[f"{name}.weight"] for name in linears},
        norms={name: tensors[f"{name}.weight"] for name in norms},
        with_bias=frozenset(name for name in linears if f"{name}.bias" in tensors),
        routers={name: tensors[f"{name}.weight"] for name in family.routers},
        norm_biases={name: tensors[f"{name}.bias"] for name in norms if f"{name}.bias" in tensors},
    )


def largest_change(model: RandomModel, patterns: Sequence[LayerMap]) -> float:
    """Largest change of the logits, relative to the largest, with all pairs of all layers folded."""
    layers = random_layers(model, patterns)
    for index, (family, tensors) in enumerate(layers):
        fold_layer(family, tensors, index)
    return logits_change(model, [tensors for _, tensors in layers])


def rounding_noise(model: RandomModel) -> float:
    """Largest relative change of the logits by one rounding of every vector; some layers multiply it."""
    before = model.logits()
    vectors = [p for layer in model.layers for p in layer.parameters() if p.dim() == 1]
    former = [vector.clone() for vector in vectors]
    generator = torch.Generator().manual_seed(0)
    try:
        for vector in vectors:
            vector.mul_(1 + _ONE_ULP * torch.randn(vector.shape, generator=generator))
        after = model.logits()
    finally:
        for vector, values in zip(vectors, former, strict=True):
            vector.copy_(values)
    return float((after - before).abs().max() / before.abs().max())


def random_layers(
    model: RandomModel, patterns: Sequence[LayerMap | None]
) -> list[tuple[LayerMap, dict[str, torch.Tensor]]]:
    """The map of each layer, and copies of its weights and biases by their names on disk."""
    layers = []
    for index, pattern in enumerate(patterns):
        tensors = {name: p.detach().clone() for name, p in _parameters(model, index)}
        shapes = {
            name.removesuffix(".weight"): tuple(tensor.shape)
            for name, tensor in tensors.items()
            if name.endswith(".weight")
        }
        linears = tuple((name,) for name, shape in shapes.items() if len(shape) == 2)
        family = LayerMap(linears, (), frozenset())
        layers.append((family_of_pattern(pattern, family, shapes) if pattern else family, tensors))
    return layers


def logits_change(model: RandomModel, tensors: Sequence[Mapping[str, torch.Tensor]]) -> float:
    """Largest change of the logits, relative to the largest, with other weights and biases of the layers, by
    their names on disk."""
    parameters = [dict(_parameters(model, index)) for index in range(len(tensors))]
    changed = [
        (of_layer[name], tensor)
        for of_layer, named in zip(parameters, tensors, strict=True)
        for name, tensor in named.items()
    ]
    former = [parameter.detach().clone() for parameter, _ in changed]
    before = model.logits()
    with torch.no_grad():
        try:
            for parameter, tensor in changed:
                parameter.copy_(tensor)
            after = model.logits()
        finally:
            for (parameter, _), values in zip(changed, former, strict=True):
                parameter.copy_(values)
    return float((after - before).abs().max() / before.abs().max())


def _parameters(model: RandomModel, index: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights and biases of a layer, by their names on disk."""
    for path, name in model.names[index].items():
        module = model.layers[index].get_submodule(path)
        for leaf in ("weight", "bias"):
            if (parameter := module._parameters.get(leaf)) is not None:
                yield f"{name}.{leaf}", parameter
