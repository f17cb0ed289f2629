"""Linears that feed attention scores, by intervention: their scaled output changes what a softmax reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from .intervention import spread
from .random_model import RandomModel

_SAME = 1e-4  # relative; a norm behind a projection keeps this much of a uniform scale


@dataclass(frozen=True, slots=True)
class ScoreLinears:
    """The linears of a layer that feed attention scores.

    Attributes:
        all: of queries and keys, however far from the scores.
        normalized: those whose length does not matter, because a norm is between them and the scores.
    """

    all: frozenset[str]
    normalized: frozenset[str]


class _LayerDone(Exception):
    """Ends a forward pass behind a layer."""


@dataclass(frozen=True, slots=True)
class _Scores:
    """The input of a softmax over tokens, and the modules that were running."""

    running: frozenset[str]
    values: torch.Tensor


class _SoftmaxInputs(TorchDispatchMode):
    """Records the inputs of softmaxes over the tokens."""

    def __init__(self, running: Collection[str], num_tokens: int):
        super().__init__()
        self.running, self.num_tokens = running, num_tokens
        self.scores: list[_Scores] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._softmax.default and self._over_tokens(args[0]) and self.running:
            self.scores.append(_Scores(frozenset(self.running), args[0].clone()))
        return func(*args, **(kwargs or {}))

    def _over_tokens(self, values: torch.Tensor) -> bool:
        shape, tokens = values.shape, self.num_tokens
        return len(shape) >= 3 and shape[-2] == tokens and shape[-1] >= tokens


def score_linears(model: RandomModel, index: int, linears: Collection[str]) -> ScoreLinears:
    """Which linears of a layer feed scores of the attention that they belong to.

    Args:
        linears: their paths in the layer; one belongs to the module that holds it.
    """
    layer = model.layers[index]
    before = _scores(model, layer)
    every, normalized = set(), set()
    for path in linears:
        module, holder = layer.get_submodule(path), path.rpartition(".")[0]
        if not any(holder in scores.running for scores in before):
            continue
        if not _same(before, _scores(model, layer, (module, _uneven)), holder):
            every.add(path)
            if _same(before, _scores(model, layer, (module, _even)), holder):
                normalized.add(path)
    return ScoreLinears(frozenset(every), frozenset(normalized))


def _uneven(width: int) -> torch.Tensor:
    return spread(width).sqrt()


def _even(width: int) -> torch.Tensor:
    return torch.full((width,), 4.0)


def _same(before: Sequence[_Scores], after: Sequence[_Scores], holder: str) -> bool:
    """Whether the softmaxes inside a module read the same."""
    return len(before) == len(after) and all(
        _close(first.values, second.values)
        for first, second in zip(before, after, strict=True)
        if holder in first.running
    )


@torch.no_grad()
def _scores(
    model: RandomModel,
    layer: nn.Module,
    scaled: tuple[nn.Module, Callable[[int], torch.Tensor]] | None = None,
) -> list[_Scores]:
    """The softmax inputs of one layer, with the output of one module scaled."""
    running: set[str] = set()
    inputs = _SoftmaxInputs(running, model.token_ids.shape[1])
    with _tracked(layer, running), _scaled(scaled), inputs, suppress(_LayerDone):
        model.logits()
    return inputs.scores


@contextmanager
def _tracked(layer: nn.Module, running: set[str]) -> Iterator[None]:
    """Keep the paths of the running modules of a layer, and stop behind it."""
    handles = []
    for path, module in layer.named_modules():

        def enter(*_: Any, path: str = path) -> None:
            running.add(path)

        def leave(*_: Any, path: str = path) -> None:
            running.discard(path)
            if not path:
                raise _LayerDone

        handles += [
            module.register_forward_pre_hook(enter),
            module.register_forward_hook(leave),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _scaled(scaled: tuple[nn.Module, Callable[[int], torch.Tensor]] | None) -> Iterator[None]:
    """Multiply the output channels of a module."""
    if scaled is None:
        yield
        return
    module, factors = scaled

    def hook(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        return output * factors(output.shape[-1])

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _close(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether scores are the same, where they are not masked."""
    if before.shape != after.shape:
        return False
    kept = before > torch.finfo(before.dtype).min / 2
    gap, size = (before - after)[kept].abs(), before[kept].abs()
    return not gap.numel() or bool(gap.max() <= _SAME * size.max())
