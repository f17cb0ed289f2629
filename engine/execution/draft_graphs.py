"""Passes of a draft model, replayed from graphs: the catch-up step, and one step for each draft token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..cache.step_inputs import Run, step_inputs
from ..speculation.draft_model import DraftForward, DraftModel
from .step_graphs import Capture, StepGraphs
from .token_graphs import TokenGraphs


class DraftGraphs:
    """`DraftForward` of captured steps.

    Args:
        eager: serves the steps that are not captured.
        sizes, token_sizes: as of `StepGraphs` and `TokenGraphs`.
    """

    def __init__(
        self,
        draft: DraftModel,
        eager: DraftForward,
        max_blocks: int,
        sizes: Sequence[int],
        token_sizes: Sequence[int],
        capture: Capture,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        (cache,) = draft.caches
        self._eager, self._block_size = eager, cache.block_size
        self._device, self._dtype = device, dtype
        cached = draft.model, cache.layers, cache.block_size, max_blocks
        self._decodes = StepGraphs(*cached, sizes, capture, device, dtype)
        self._steps = TokenGraphs(*cached, token_sizes, capture, device, dtype)

    def capture_all(self) -> None:
        """Capture all steps now."""
        self._decodes.capture_all()
        if self._decodes.gave_up:
            self._steps.give_up()
        else:
            self._steps.capture_all()

    def __call__(self, runs: Sequence[Run], token_ids: torch.Tensor | None) -> torch.Tensor:
        """See `DraftForward`."""

        def fill(to: torch.Tensor) -> None:
            assert token_ids is not None
            to.copy_(token_ids)

        if any(len(run.token_ids) > 1 for run in runs):
            known = None if token_ids is None else fill
            forward = self._steps.prepare(runs, (), known)
            return self._eager(runs, token_ids) if forward is None else forward.run()
        inputs = step_inputs(runs, self._block_size, self._device, self._dtype)
        if token_ids is not None:
            fill(inputs.token_ids)
        return self._decodes.prepare(inputs).run()


def replay_draft(
    draft: DraftModel,
    max_blocks: int,
    sizes: Sequence[int],
    token_sizes: Sequence[int],
    capture: Capture,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Have a draft model replay its steps; they are captured with the model's own."""
    eager = draft.forward
    graphs = DraftGraphs(draft, eager, max_blocks, sizes, token_sizes, capture, device, dtype)
    draft.forward, draft.capture_all = graphs, graphs.capture_all
