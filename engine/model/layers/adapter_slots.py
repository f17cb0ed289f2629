"""LoRA weights in slots: static tensors of all adapters' A and B, so that a captured step serves any mix.

All adapters' A are one GEMM, whose result is masked by the adapter of each row, and all their B are another.
So neither shapes nor addresses depend on which adapters a step uses: a graph that is captured once reads the
slot of each row, and an adapter that is loaded later is copied to a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

NO_SLOT = 0
"""Of rows without an adapter; slots are numbered from 1."""
LEAST_RANK = 16
"""Rank of the slots where adapters may be loaded later (vLLM's default for `max_lora_rank`)."""


@dataclass(frozen=True, slots=True)
class SlotMask:
    """Which columns of the stacked LoRA A belong to the adapter of a row: 0 or 1, [rows, slots * rank]."""

    weights: torch.Tensor

    @classmethod
    def of(cls, slots: torch.Tensor, slot_of_column: torch.Tensor, dtype: torch.dtype) -> SlotMask:
        """The mask of rows with these slots, int64 [rows]."""
        return cls((slots[:, None] == slot_of_column[None, :]).to(dtype))


class SlottedWeights:
    """LoRA A and B of one projection in slots.

    Args:
        outputs: the slices of the projection's outputs that adapters may change, one for each linear that it
            stacks.
        like: a tensor of the dtype and on the device of the weights.
    """

    def __init__(
        self,
        outputs: Sequence[slice],
        in_features: int,
        num_slots: int,
        rank: int,
        like: torch.Tensor,
    ) -> None:
        self._places = {(each.start, each.stop): place for place, each in enumerate(outputs)}
        self._outputs, self._rank = tuple(outputs), rank
        self._down = like.new_zeros(len(outputs), num_slots, rank, in_features)
        # Transposed: a slot is a contiguous range of rows.
        self._up = [like.new_zeros(num_slots, rank, out.stop - out.start) for out in outputs]

    @property
    def num_bytes(self) -> int:
        return self._down.nbytes + sum(up.nbytes for up in self._up)

    def takes(self, outputs: slice, rank: int) -> bool:
        """Whether an adapter of that rank fits a slot of that slice of outputs."""
        return (outputs.start, outputs.stop) in self._places and rank <= self._rank

    def clear(self, slot: int) -> None:
        """Make a slot's adapter change nothing."""
        for weights in (*self._down, *self._up):
            weights[slot - 1].zero_()

    def put(
        self, slot: int, outputs: slice, down: torch.Tensor, up: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy A [rank, in] and B [out, rank] to a slot; returns them as views of it."""
        place, rank = self._places[outputs.start, outputs.stop], len(down)
        held_down = self._down[place, slot - 1, :rank]
        held_up = self._up[place][slot - 1, :rank]
        held_down.copy_(down)
        held_up.copy_(up.T)
        return held_down, held_up.T

    def add(self, x: torch.Tensor, y: torch.Tensor, mask: SlotMask) -> None:
        """Add each row's LoRA delta to `y [rows, out]`, in place."""
        inner = functional.linear(x, self._down.flatten(0, 2))
        inner = inner.view(len(x), len(self._up), -1) * mask.weights[:, None]
        for place, (outputs, up) in enumerate(zip(self._outputs, self._up, strict=True)):
            # Not `addmm_`: the delta is rounded before it is added, as in eager steps.
            y[:, outputs].add_(inner[:, place] @ up.flatten(0, 1))
