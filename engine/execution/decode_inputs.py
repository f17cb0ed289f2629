"""Static input tensors of decode steps, which graphs are captured on; filled without torch on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..cache.step_inputs import Run
from ..kernels.attention.paged_attention import AttentionBatch, DecodeGroup
from ..model.layers.attention import StepInputs
from ..scheduling.block_pool import NULL_BLOCK


def is_plain_decode(runs: Sequence[Run]) -> bool:
    """Whether every run is one token of text, at its plain position, of a sequence with all its blocks."""
    return all(
        len(run.token_ids) == 1
        and run.tree is None
        and not run.num_evicted
        and NULL_BLOCK not in run.block_ids
        and run.rope_positions is None
        and all(image.offset + image.num_tokens <= run.start for image in run.images)
        for run in runs
    )


class DecodeInputs:
    """Token ids, positions, slots, lengths and block tables of up to `rows` sequences.

    Rows of padding see one token, of the null block. On a CPU NumPy arrays share the tensors' memory, and a
    block table is written only where it changed.
    """

    def __init__(
        self, rows: int, max_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        def zeros() -> torch.Tensor:
            return torch.zeros(rows, dtype=torch.int64, device=device)

        self._block_size, self._dtype = block_size, dtype
        self._token_ids, self._positions, self._slots = zeros(), zeros(), zeros()
        self._rows = torch.arange(rows, device=device)
        self._lengths, self._evicted_spans = zeros() + 1, zeros()
        self._tables = torch.full((rows, max_blocks), NULL_BLOCK, device=device)
        self._filled: list[Sequence[int] | None] = [None] * rows
        self._arrays = None
        if device.type == "cpu":
            columns = (self._token_ids, self._positions, self._slots, self._lengths)
            self._arrays = [tensor.numpy() for tensor in (*columns, self._tables)]

    @property
    def takes_runs(self) -> bool:
        """Whether `fill_runs` can write to the tensors."""
        return self._arrays is not None

    def step(
        self, size: int, sink_length: int, aux_hidden_state_layers: tuple[int, ...]
    ) -> StepInputs:
        """The inputs of a step of `size` rows, on these tensors."""
        group = DecodeGroup(
            self._rows[:size],
            self._tables[:size].view(-1),
            self._lengths[:size],
            self._evicted_spans[:size],
            sink_length,
        )
        batch = AttentionBatch([], group, self._block_size, self._dtype)
        rows = self._token_ids[:size], self._positions[:size], self._slots[:size]
        return StepInputs(*rows, batch, aux_hidden_state_layers=aux_hidden_state_layers)

    def fill(self, inputs: StepInputs, group: DecodeGroup, rows: int, size: int) -> None:
        """Copy a step's values."""
        self._token_ids[:rows] = inputs.token_ids
        self._positions[:rows] = inputs.positions
        self._slots[:rows] = inputs.slots
        self._lengths[:rows] = group.lengths
        self._evicted_spans[:rows] = group.evicted_spans
        tables = group.block_ids.view(rows, -1)
        self._tables[:rows, : tables.shape[1]] = tables
        self._filled[:rows] = [None] * rows
        self._pad(rows, size)

    def fill_runs(self, runs: Sequence[Run], size: int) -> None:
        """Write the values of a plain decode step."""
        assert self._arrays is not None
        token_ids, positions, slots, lengths, tables = self._arrays
        rows, block_size = len(runs), self._block_size
        starts = [run.start for run in runs]
        token_ids[:rows] = [run.token_ids[0] for run in runs]
        positions[:rows] = starts
        lengths[:rows] = starts
        lengths[:rows] += 1
        slots[:rows] = [
            run.block_ids[run.start // block_size] * block_size + run.start % block_size
            for run in runs
        ]
        self._evicted_spans[:rows] = 0
        for row, run in enumerate(runs):
            if run.block_ids != self._filled[row]:
                held = run.block_ids[: run.start // block_size + 1]
                tables[row, : len(held)] = held
                # What was cut off here is written when the sequence reaches it.
                self._filled[row] = run.block_ids if len(held) == len(run.block_ids) else None
        self._pad(rows, size)

    def _pad(self, rows: int, size: int) -> None:
        if rows == size:
            return
        self._token_ids[rows:size] = 0
        self._positions[rows:size] = 0
        self._slots[rows:size] = NULL_BLOCK * self._block_size
        self._lengths[rows:size] = 1
        self._evicted_spans[rows:size] = 0
        self._tables[rows:size, 0] = NULL_BLOCK
        self._filled[rows:size] = [None] * (size - rows)
