"""Dispatch mode that answers data-dependent operators on the meta device with fixed values.

A meta tensor has a shape and no values, so routing and length checks (`nonzero`, `.item()`) cannot run on
it. The sizes that the probe reads do not depend on those values: `nonzero` and a mask are answered with one
hit, a scalar with zero or False, which leaves conditional branches untaken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class ProbeTooLong(Exception):
    """A forward pass took more operators than it was allowed."""


class DataFreeMode(TorchDispatchMode):
    """Answer data-dependent operators of meta tensors; count operators, at most `max_operators`."""

    def __init__(self, max_operators: int) -> None:
        super().__init__()
        self._left = max_operators

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ProbeTooLong
        answer = _ANSWERS.get(func)
        if answer is not None and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            return answer(args)
        return func(*args, **(kwargs or {}))


def _one_hit(args: tuple[Any, ...]) -> torch.Tensor:
    tensor = args[0]
    return torch.empty((1, tensor.dim()), dtype=torch.long, device="meta")


def _scalar(args: tuple[Any, ...]) -> bool | int | float:
    dtype = args[0].dtype
    if dtype is torch.bool:
        return False
    return 0.0 if dtype.is_floating_point else 0


def _selected(args: tuple[Any, ...]) -> torch.Tensor:
    return torch.empty((1,), dtype=args[0].dtype, device="meta")


def _counts(args: tuple[Any, ...]) -> torch.Tensor:
    length = args[2] if len(args) > 2 else 0
    return torch.empty((max(1, length),), dtype=torch.long, device="meta")


def _indexed(args: tuple[Any, ...]) -> torch.Tensor:
    """`tensor[indices]`, each mask as the position of one hit."""
    tensor, indices = args
    positions: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype is torch.bool:
            positions += [torch.empty((1,), dtype=torch.long, device="meta")] * index.dim()
        else:
            positions.append(index)
    return aten.index.Tensor(tensor, positions)


def _not_equal(args: tuple[Any, ...]) -> bool:
    return False


_ANSWERS: dict[Any, Callable[[tuple[Any, ...]], Any]] = {
    aten.nonzero.default: _one_hit,
    aten._local_scalar_dense.default: _scalar,
    aten.masked_select.default: _selected,
    aten.bincount.default: _counts,
    aten.equal.default: _not_equal,
    aten.index.Tensor: _indexed,
}
