"""Constant state of a sequence: the tensors that a layer overwrites with every token, in a slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from ...base.device import packed
from ...kernels.attention.batch import AttentionBatch
from ...kernels.elementwise.recurrence import Recurrence, StateRows, stepped
from ...scheduling.request import NULL_SLOT
from ...scheduling.step_plan import Copies


@dataclass(frozen=True, slots=True)
class StateLayout:
    """One tensor of a sequence's state, of `shape` and in the `dtype` that the layer keeps it in."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def empty(self, num_slots: int, device: torch.device) -> torch.Tensor:
        return torch.empty((num_slots, *self.shape), dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class StateBatch:
    """The states of a step's sequences: `tensors` [slots, *shape], `slots` int64 [sequences]. At position 0 a
    state is whatever its slot's last owner left, and counts as nothing."""

    tensors: tuple[torch.Tensor, ...] = ()
    slots: torch.Tensor | None = None


NO_STATES = StateBatch()
"""The batch of a model without constant state."""


@dataclass(frozen=True, slots=True)
class RunOfTokens:
    """Rows of several tokens of a sequence; `slot`, int64 [1]; `has_state`: tokens came before these."""

    begin: int
    end: int
    slot: torch.Tensor
    has_state: bool


@dataclass(frozen=True, slots=True)
class StepStates:
    """Which rows of a step are of which sequence, with several tokens (`runs`) or one, and their states.
    `rows`, int64 [decodes], None: none; `slots` of states; `fresh`: no tokens came before this one."""

    tensors: tuple[torch.Tensor, ...]
    runs: tuple[RunOfTokens, ...]
    rows: torch.Tensor | None
    slots: torch.Tensor
    fresh: torch.Tensor

    @classmethod
    def of(cls, states: StateBatch, batch: AttentionBatch) -> StepStates:
        """From the slots in the order of the sequences' rows, without waiting for the device."""
        assert states.slots is not None
        slots, decode = states.slots, batch.decode
        runs: list[RunOfTokens] = []
        single, row = [], 0  # index among the sequences, and row, of those with one token
        for span in sorted(batch.spans, key=lambda span: span.begin):
            single += range(len(runs) + len(single), len(runs) + len(single) + span.begin - row)
            index, row = len(runs) + len(single), span.end
            has_state = span.num_cached > span.end - span.begin
            runs.append(RunOfTokens(span.begin, span.end, slots[index : index + 1], has_state))
        if decode is None:
            return cls(states.tensors, tuple(runs), None, slots[:0], slots[:0] > 0)
        if runs:
            single += range(len(runs) + len(single), len(slots))
            slots = slots[packed([single], slots.device)[0]]
        return cls(states.tensors, tuple(runs), decode.rows, slots, decode.lengths <= 1)

    @property
    def decoded(self) -> StateRows | None:
        """The sequences of a step that brings one token of each; None: some bring several."""
        if self.rows is None or self.runs:
            return None
        return StateRows(self.slots, self.fresh)

    def advance(
        self, index: int, inputs: Sequence[torch.Tensor], run: Recurrence, step: Recurrence
    ) -> torch.Tensor:
        """Outputs of a recurrence over every sequence's tokens; overwrites its states. `inputs` are [tokens,
        ...] each. `run` goes over consecutive tokens of one sequence, `step` over a token of each of several;
        `index` is the tensor's among the states."""
        states = self.tensors[index]
        if (rows := self.decoded) is not None:
            return stepped(states, rows, inputs, step)
        outputs: torch.Tensor | None = None
        for part in self.runs:
            rows = slice(part.begin, part.end)
            state = states.index_select(0, part.slot)[0]
            state = state if part.has_state else torch.zeros_like(state)
            out, after = run(*(x[rows] for x in inputs), state)
            states.index_copy_(0, part.slot, after[None].to(states.dtype))
            if outputs is None:
                outputs = out.new_empty(len(inputs[0]), *out.shape[1:])
            outputs[rows] = out
        assert outputs is not None, "a step without tokens"
        if self.rows is not None:
            chosen = [x.index_select(0, self.rows) for x in inputs]
            rows = StateRows(self.slots, self.fresh)
            outputs.index_copy_(0, self.rows, stepped(states, rows, chosen, step))
        return outputs


NO_STEP_STATES = StepStates((), (), None, torch.empty(0, dtype=torch.int64), torch.empty(0) > 0)
"""The states of a step of a model without constant state."""


def state_bytes_per_sequence(layouts: Sequence[StateLayout]) -> int:
    return sum(layout.num_bytes for layout in layouts)


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
