"""The state cache: constant states of all sequences by slot, and their copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..base.device import packed
from ..config.compatibility import refuse
from ..config.config import EngineConfig
from ..model.layers.state import StateLayout
from ..scheduling.request import NULL_SLOT
from ..scheduling.step_plan import Copies


def state_bytes_per_sequence(layouts: Sequence[StateLayout]) -> int:
    """Bytes of the constant state of one sequence."""
    return sum(layout.num_bytes for layout in layouts)


def check_states(config: EngineConfig, layouts: Sequence[StateLayout]) -> None:
    """Check that what `config` asks for goes with a model of these states.

    Raises:
        BadInput: it does not.
    """
    if layouts:
        refuse({"states", *config.features}, "layers of this model keep a constant state")


class StateCache:
    """State tensors with a slot for each running sequence and each checkpoint, and the null slot."""

    def __init__(
        self, layouts: Sequence[StateLayout], num_slots: int, device: torch.device
    ) -> None:
        self.tensors = tuple(layout.empty(num_slots + 1, device) for layout in layouts)
        for tensor in self.tensors:
            tensor[NULL_SLOT].zero_()
        self.num_bytes = sum(tensor.nbytes for tensor in self.tensors)

    def copy(self, copies: Copies) -> None:
        """Copy slots (source, destination); all sources are read before any write."""
        if not copies:
            return
        for tensor in self.tensors:
            sources, destinations = packed([*zip(*copies, strict=True)], tensor.device)
            tensor.index_copy_(0, destinations, tensor.index_select(0, sources))
