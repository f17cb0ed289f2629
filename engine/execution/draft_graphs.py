"""Passes of a draft model or EAGLE head, replayed from graphs: the catch-up step, and one for each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..cache.step_inputs import Run, step_inputs
from ..model.layers.attention import LayerCache, StepInputs
from ..speculation.draft_model import DraftForward, DraftModel
from ..speculation.eagle import EagleProposer
from ..speculation.eagle_head import EagleHead
from .graph_setting import Forward, GraphSetting
from .step_graphs import StepGraphs
from .token_graphs import TokenGraphs


class DraftGraphs:
    """`DraftForward` of captured steps.

    Args:
        eager: serves the steps that are not captured.
        sizes, token_sizes: as of `StepGraphs` and `TokenGraphs`.
    """

    def __init__(
        self,
        setting: GraphSetting,
        eager: DraftForward,
        sizes: Sequence[int],
        token_sizes: Sequence[int],
    ) -> None:
        self._setting, self._eager = setting, eager
        self._decodes = StepGraphs(setting, sizes)
        self._steps = TokenGraphs(setting, token_sizes)

    def capture_all(self) -> None:
        """Capture all steps now."""
        self._decodes.capture_all()
        if self._decodes.gave_up:
            self._steps.give_up()
        else:
            self._steps.capture_all()

    def __call__(self, runs: Sequence[Run], token_ids: torch.Tensor | None) -> torch.Tensor:
        """See `DraftForward`."""
        forward = self.prepare(runs, token_ids)
        return self._eager(runs, token_ids) if forward is None else forward.run()

    def prepare(self, runs: Sequence[Run], token_ids: torch.Tensor | None) -> Forward | None:
        """The pass with its inputs in place; None: it is not captured."""

        def fill(to: torch.Tensor) -> None:
            assert token_ids is not None
            to.copy_(token_ids)

        if any(len(run.token_ids) > 1 for run in runs):
            return self._steps.prepare(runs, (), None if token_ids is None else fill)
        setting = self._setting
        inputs = step_inputs(runs, setting.block_size, setting.device, setting.dtype)
        if token_ids is not None:
            fill(inputs.token_ids)
        forward = self._decodes.prepare(inputs)
        return forward if forward.is_replay else None


class _HeadSteps:
    """An EAGLE head as a model of captured steps: the hidden states that it starts from are one more of their
    static inputs."""

    lora_bank = None

    def __init__(
        self, head: EagleHead, vocab_size: int, rows: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._head, self.vocab_size = head, vocab_size
        self.is_capturable, self.captures_any_step = head.is_capturable, head.captures_any_step
        self.before = torch.zeros(rows, head.hidden_size, dtype=dtype, device=device)
        self.logits = head.logits

    def forward(self, inputs: StepInputs, caches: Sequence[LayerCache]) -> torch.Tensor:
        return self._head.forward(inputs, self.before[: len(inputs.token_ids)], caches)


def replay_draft(
    draft: DraftModel, setting: GraphSetting, sizes: Sequence[int], token_sizes: Sequence[int]
) -> None:
    """Have a draft model replay its steps; they are captured with the model's own, whose `setting` it is."""
    (cache,) = draft.caches
    own = replace(setting, model=draft.model, caches=cache.layers, ranks=None)
    graphs = DraftGraphs(own, draft.forward, sizes, token_sizes)
    draft.forward, draft.capture_all = graphs, graphs.capture_all


def replay_head(
    proposer: EagleProposer,
    setting: GraphSetting,
    sizes: Sequence[int],
    token_sizes: Sequence[int],
) -> None:
    """As `replay_draft`, of an EAGLE head."""
    (cache,) = proposer.caches
    rows = max((*sizes, *token_sizes), default=0)
    vocab_size = setting.model.vocab_size
    steps = _HeadSteps(proposer.head, vocab_size, rows, setting.device, setting.dtype)
    own = replace(setting, model=steps, caches=cache.layers, ranks=None)
    eager = proposer.forward

    def never(*_: Any) -> torch.Tensor:
        raise AssertionError("`prepare` tells which steps are eager")

    graphs = DraftGraphs(own, never, sizes, token_sizes)

    def forward(
        runs: Sequence[Run], token_ids: torch.Tensor | None, before: torch.Tensor
    ) -> torch.Tensor:
        replayed = graphs.prepare(runs, token_ids)
        if replayed is None:
            return eager(runs, token_ids, before)
        steps.before[: len(before)].copy_(before)
        return replayed.run()

    proposer.forward, proposer.capture_all = forward, graphs.capture_all
