"""Proof of smoothing maps by logits: random scales in every fold at once leave them as they were."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..families.layer_map import Fold, LayerMap
from ..methods.base import LayerProblem
from ..methods.folding import can_fold, column_scales, divided_bias, fold_into_norm, row_scales
from .patterns import LayerPattern, family_of_pattern
from .random_model import RandomModel

_SPREAD = 1.0  # standard deviation of the scales' exponents
_ONE_ULP = 1.2e-7  # of float32, relative


def fold_layer(family: LayerMap, tensors: dict[str, torch.Tensor], seed: int) -> int:
    """Fold random scales into every pair of a float32 layer, in place; how many pairs there were.

    The scales are powers of two, with which products round as they did before.

    Args:
        tensors: of the layer, by their relative names.
    """
    generator = torch.Generator().manual_seed(seed)
    done = 0
    for fold in family.folds:
        problem = _problem(family, tensors)
        if can_fold(fold, problem):
            _fold(fold, problem, tensors, generator)
            done += 1
    return done


def _fold(
    fold: Fold,
    problem: LayerProblem,
    tensors: dict[str, torch.Tensor],
    generator: torch.Generator,
) -> None:
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


def _problem(family: LayerMap, tensors: dict[str, torch.Tensor]) -> LayerProblem:
    """What decides whether a fold of a layer is done."""
    linears = family.linears
    norms = {fold.source for fold in family.folds} - set(linears)
    return LayerProblem(
        prefix="",
        family=family,
        schemes={},
        scale_dtypes={},
        weights={name: tensors[f"{name}.weight"] for name in linears},
        statistics={},
        norms={name: tensors[f"{name}.weight"] for name in norms},
        with_bias=frozenset(name for name in linears if f"{name}.bias" in tensors),
        routers={name: tensors[f"{name}.weight"] for name in family.routers},
        norm_biases={name: tensors[f"{name}.bias"] for name in norms if f"{name}.bias" in tensors},
    )


def largest_change(model: RandomModel, patterns: Sequence[LayerPattern]) -> float:
    """Largest change of the logits, relative to the largest, with all pairs of all layers folded."""

    before = model.logits()
    held = [_tensors(model, index) for index in range(len(model.layers))]
    try:
        for index, pattern in enumerate(patterns):
            tensors = dict(held[index])
            fold_layer(_whole_family(pattern, tensors), tensors, index)
            _put(model, index, tensors)
        after = model.logits()
    finally:
        for index, tensors in enumerate(held):
            _put(model, index, tensors)
    return float((after - before).abs().max() / before.abs().max())


def rounding_noise(model: RandomModel) -> float:
    """Largest change of the logits, relative to the largest, by one rounding of every vector.

    What a rounding costs depends on the model: some recurrent layers multiply it many times over.
    """
    before = model.logits()
    vectors = [p for layer in model.layers for p in layer.parameters() if p.dim() == 1]
    held = [vector.clone() for vector in vectors]
    generator = torch.Generator().manual_seed(0)
    try:
        for vector in vectors:
            vector.mul_(1 + _ONE_ULP * torch.randn(vector.shape, generator=generator))
        after = model.logits()
    finally:
        for vector, former in zip(vectors, held, strict=True):
            vector.copy_(former)
    return float((after - before).abs().max() / before.abs().max())


def _whole_family(pattern: LayerPattern, tensors: dict[str, torch.Tensor]) -> LayerMap:
    """The map of a layer all of whose readers are linears."""
    shapes = {
        name.removesuffix(".weight"): tuple(tensor.shape)
        for name, tensor in tensors.items()
        if name.endswith(".weight")
    }
    linears = tuple((name,) for name, shape in shapes.items() if len(shape) == 2)
    return family_of_pattern(pattern, LayerMap(linears, (), frozenset()), shapes)


def _tensors(model: RandomModel, index: int) -> dict[str, torch.Tensor]:
    """Copies of the weights of a layer and of their biases, by their names on disk."""
    tensors = {}
    for path, name in model.names[index].items():
        module = model.layers[index].get_submodule(path)
        for leaf in ("weight", "bias"):
            parameter = module._parameters.get(leaf)
            if parameter is not None:
                tensors[f"{name}.{leaf}"] = parameter.detach().clone()
    return tensors


@torch.no_grad()
def _put(model: RandomModel, index: int, tensors: dict[str, torch.Tensor]) -> None:
    for path, name in model.names[index].items():
        module = model.layers[index].get_submodule(path)
        for leaf in ("weight", "bias"):
            if f"{name}.{leaf}" in tensors:
                parameter = module._parameters[leaf]
                assert parameter is not None
                parameter.copy_(tensors[f"{name}.{leaf}"])
