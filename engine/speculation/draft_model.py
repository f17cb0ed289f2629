"""Draft-model proposer: a smaller model with the same vocabulary (Leviathan et al., 2023)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from ..base.device import packed
from ..cache.kv_cache import KvCache
from ..cache.step_inputs import Run
from ..model.adapter.open import CausalModel
from ..scheduling.draft_length import Tree
from ..scheduling.step_plan import ScheduledRow
from .proposer import (
    DRAFT_STREAM,
    CachedProposer,
    DraftTokens,
    SamplingRowOf,
    TargetStates,
    draft_chains,
)


class DraftModel(CachedProposer):
    """A draft model with its own KV cache, addressed by the target's block ids.

    It computes the rows of every step, so blocks shared through the prefix cache hold its keys and values
    too. A slot may lack them where all draft tokens were accepted and no step followed; that only lowers
    acceptance.

    The host waits for the draft tokens once, after the last of them, unless a row's sampling depends on
    their values (penalties, token masks).

    With `independent`, draft tokens are sampled with separate noise, as rejection sampling needs, and
    their distributions are kept. Without, they are sampled with the noise that the target's token will be
    sampled with (coupled), so both agree where the distributions do.
    """

    def __init__(
        self,
        model: CausalModel,
        cache: KvCache,
        device: torch.device,
        dtype: torch.dtype,
        *,
        independent: bool,
    ) -> None:
        super().__init__(model, cache, device, dtype)
        self._independent = independent

    def observe(self, steps: Sequence[TargetStates]) -> None:
        """Nothing to keep: the draft model reads token ids only."""

    def propose(
        self, rows: Sequence[ScheduledRow], draw: SamplingRowOf
    ) -> Mapping[str, DraftTokens]:
        runs = [_uncomputed_run(row) for row in rows]
        ends = [end - 1 for end in accumulate(len(run.token_ids) for run in runs)]
        going = [row for row in rows if row.num_draft_tokens]
        at = [end for end, row in zip(ends, rows, strict=True) if row.num_draft_tokens]
        states = self.forward(runs, None, None)
        if not going:
            return {}
        last = (
            states
            if len(at) == len(states)
            else states.index_select(0, packed([at], self._device)[0])
        )
        probabilities: dict[str, list[torch.Tensor]] = {row.sequence_id: [] for row in going}

        def choose(
            rows: Sequence[ScheduledRow], chains: Sequence[list[int]], logits: torch.Tensor
        ) -> torch.Tensor:
            sampling = [draw(row, chain) for row, chain in zip(rows, chains, strict=True)]
            if not self._independent:
                return self._sampler.begin(logits, sampling).tokens
            distributions = self._sampler.distributions(logits, sampling)
            for row, q in zip(rows, distributions, strict=True):
                probabilities[row.sequence_id].append(q)
            keys = [(each.seed, each.position) for each in sampling]
            return self._sampler.chosen(distributions, keys, DRAFT_STREAM)

        def follow(
            rows: Sequence[ScheduledRow], chains: Sequence[list[int]], tokens: torch.Tensor, _: Any
        ) -> torch.Tensor:
            runs = [_last_run(row, chain) for row, chain in zip(rows, chains, strict=True)]
            return self.model.logits(self.forward(runs, tokens, None))

        drafts = draft_chains(going, self.model.logits(last), choose, follow)
        return {
            name: DraftTokens(
                tuple(tokens),
                Tree.chain(len(tokens)),
                torch.stack(probabilities[name]) if self._independent else None,
            )
            for name, tokens in drafts.items()
        }


def _last_run(row: ScheduledRow, chain: Sequence[int]) -> Run:
    """The last draft token of a row."""
    return Run(row.end + len(chain) - 1, chain[-1:], row.block_ids)


def _uncomputed_run(row: ScheduledRow) -> Run:
    """The tokens of a row that the draft model computes: those of the target's step, and before draft tokens
    also the token before them, which the draft model has not computed if the last step accepted all of its
    draft tokens."""
    start = max(0, row.start - 1) if row.num_draft_tokens else row.start
    return Run(start, row.tokens[start : row.end], row.block_ids)
