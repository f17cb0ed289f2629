"""What a layer's call gives: its result, and what it wrote into the lists and dicts it was given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .forward import Call
from .nested import containers_of, entries_of, set_entry, tensors_of, with_tensors


@dataclass(frozen=True, slots=True)
class Outcome:
    """A result, and the writes: number of the container among the arguments', key, and value."""

    result: Any
    writes: tuple[tuple[int, Any, Any], ...]

    def parts(self) -> tuple[Any, ...]:
        """Both, as one nested value."""
        return self.result, tuple(value for _, _, value in self.writes)

    def tensors(self) -> list[torch.Tensor]:
        """All tensors, in a fixed order."""
        return tensors_of(self.parts())


def outcome_of(call: Call, run: Callable[[], Any]) -> Outcome:
    """The outcome of `run`, which runs a layer on the arguments of `call`."""
    containers = containers_of(call.told())
    before = [entries_of(container) for container in containers]
    result = run()
    writes = tuple(
        (number, key, value)
        for number, container in enumerate(containers)
        for key, value in entries_of(container).items()
        if key not in before[number] or value is not before[number][key]
    )
    return Outcome(result, writes)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor of an outcome.

    Attributes:
        shape: for one sample.
        dim: the dimension of the samples; None: it has none.
        value: of a tensor without samples.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    dim: int | None
    value: torch.Tensor | None

    def by_sample(self, tensor: torch.Tensor, samples: int) -> torch.Tensor:
        """The tensor with the samples as first dimension, and what a sample has of `dim` as second."""
        assert self.dim is not None
        return tensor.movedim(self.dim, 0).unflatten(0, (samples, self.shape[self.dim]))

    def restored(self, tensor: torch.Tensor) -> torch.Tensor:
        """The inverse of `by_sample`."""
        assert self.dim is not None
        return tensor.flatten(0, 1).movedim(0, self.dim)

    def blank(self, samples: int) -> torch.Tensor:
        """Zeros in place of a tensor that nothing reads."""
        if self.dim is None:
            assert self.value is not None
            return self.value
        shape = list(self.shape)
        shape[self.dim] *= samples
        return torch.zeros(shape, dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class Template:
    """The structure of a layer's outcome, with its tensors described."""

    outcome: Outcome
    leaves: tuple[Leaf, ...]

    def play(self, call: Call, tensors: list[torch.Tensor]) -> Any:
        """Return such an outcome, with these tensors, from a call: the writes are made."""
        rest = iter(tensors)
        result, values = with_tensors(self.outcome.parts(), lambda _: next(rest))
        containers = containers_of(call.told())
        for (number, key, _), value in zip(self.outcome.writes, values, strict=True):
            set_entry(containers[number], key, value)
        return result


def template_of(once: Outcome, twice: Outcome) -> Template:
    """From the outcomes for one sample and for two.

    Raises:
        ValueError: they differ by more than the number of samples.
    """
    pairs = list(zip(once.tensors(), twice.tensors(), strict=True))
    leaves = tuple(_leaf(*pair) for pair in pairs)
    empty = [torch.empty(0) for _ in pairs]
    rest = iter(empty)
    result, values = with_tensors(once.parts(), lambda _: next(rest))
    writes = zip(once.writes, values, strict=True)
    return Template(
        Outcome(result, tuple((number, key, value) for (number, key, _), value in writes)), leaves
    )


def _leaf(once: torch.Tensor, twice: torch.Tensor) -> Leaf:
    shape = tuple(once.shape)
    if once.dim() != twice.dim():
        raise ValueError("a tensor that they return changes its dimensions with the samples")
    differing = [dim for dim in range(once.dim()) if once.shape[dim] != twice.shape[dim]]
    if not differing:
        return Leaf(once.dtype, shape, None, once.clone())
    if len(differing) == 1 and twice.shape[differing[0]] == 2 * shape[differing[0]]:
        return Leaf(once.dtype, shape, differing[0], None)
    raise ValueError("a tensor that they return changes its shape with the samples")
