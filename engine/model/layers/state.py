"""Constant state of a sequence: the tensors that a layer overwrites with every token, whatever the length."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True, slots=True)
class StateLayout:
    """One tensor of a sequence's state, of `shape` and in the `dtype` that the layer keeps it in."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one sequence."""
        return prod(self.shape) * self.dtype.itemsize

    def zeros(self, num_slots: int, device: torch.device) -> torch.Tensor:
        """The tensor for `num_slots` state slots, [slots, *shape]."""
        return torch.zeros((num_slots, *self.shape), dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class StateBatch:
    """The states of a step's sequences.

    Attributes:
        tensors: one for each `StateLayout` of the model, [slots, *shape].
        slots: int64 [sequences], in the order of their tokens; the state of a sequence at position 0 is
            whatever its slot's last owner left, and counts as nothing.
    """

    tensors: tuple[torch.Tensor, ...] = ()
    slots: torch.Tensor | None = None


NO_STATES = StateBatch()
"""Of a model without constant state."""
