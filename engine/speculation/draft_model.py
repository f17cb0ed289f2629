"""Draft tokens from a smaller model with the same vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from ..cache.kv_cache import KvCache
from ..cache.step_inputs import Run, step_inputs
from ..model.open import CausalModel
from ..sampling.sampler import Sampler
from ..scheduling.step_plan import ScheduledRow
from ..scheduling.tree import Tree
from .proposer import DraftTokens, SamplingRowOf, TargetStates
from .rejection_sampler import DRAFT_STREAM


class DraftModel:
    """A model beside the target, with a cache of its own under the target's block ids.

    It sees the rows of every step, so a block that the prefix cache shares holds its keys and values too.
    A slot may lack them, where all drafts were accepted and no step followed: that costs acceptance at most.

    With `independent`, draft tokens are drawn with noise of their own, as rejection sampling needs them, and
    their distributions are kept; without, with the noise that the target's token will be drawn with, so
    that both draws agree where the distributions do.
    """

    aux_hidden_state_layers: tuple[int, ...] = ()

    def __init__(
        self,
        model: CausalModel,
        cache: KvCache,
        device: torch.device,
        dtype: torch.dtype,
        *,
        independent: bool,
    ) -> None:
        self._model = model
        self._cache = cache
        self.caches = (cache,)
        self._device = device
        self._dtype = dtype
        self._independent = independent
        self._sampler = Sampler()

    @property
    def bytes_held(self) -> int:
        """See `Proposer`."""
        return self._model.bytes_held + self._cache.num_bytes

    def observe(self, steps: Sequence[TargetStates]) -> None:
        """It computes what it needs itself."""

    def propose(
        self, rows: Sequence[ScheduledRow], draw: SamplingRowOf
    ) -> Mapping[str, DraftTokens]:
        """See `Proposer`."""
        known = [_uncomputed_run(row) for row in rows]
        ends = [end - 1 for end in accumulate(len(run.token_ids) for run in known)]
        last = self._forward(known)[
            [end for end, row in zip(ends, rows, strict=True) if row.num_draft_tokens]
        ]
        going = [row for row in rows if row.num_draft_tokens]
        drafts = {row.sequence_id: _Draft() for row in going}
        while going:
            self._extend(going, drafts, self._model.logits(last), draw)
            going = [
                row for row in going if len(drafts[row.sequence_id].tokens) < row.num_draft_tokens
            ]
            if going:
                last = self._forward([drafts[row.sequence_id].last_run(row) for row in going])
        return {name: one.found() for name, one in drafts.items()}

    def _extend(
        self,
        rows: Sequence[ScheduledRow],
        drafts: Mapping[str, _Draft],
        logits: torch.Tensor,
        draw: SamplingRowOf,
    ) -> None:
        """Add a draft token to each row."""
        draws = [draw(row, drafts[row.sequence_id].tokens) for row in rows]
        if not self._independent:
            for row, token in zip(rows, self._sampler.draw(logits, draws)[0], strict=True):
                drafts[row.sequence_id].tokens.append(token)
            return
        weights = self._sampler.distributions(logits, draws)
        keys = [(own.seed, own.position) for own in draws]
        tokens = self._sampler.choose(weights, keys, DRAFT_STREAM)
        for row, token, by in zip(rows, tokens, weights, strict=True):
            drafts[row.sequence_id].tokens.append(token)
            drafts[row.sequence_id].weights.append(by)

    def _forward(self, runs: Sequence[Run]) -> torch.Tensor:
        inputs = step_inputs(runs, self._cache.block_size, self._device, self._dtype)
        return self._model.forward(inputs, self._cache.layers)


@dataclass(slots=True)
class _Draft:
    """Draft tokens of a row so far, and the distributions that they were drawn from."""

    tokens: list[int] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)

    def last_run(self, row: ScheduledRow) -> Run:
        return Run(row.end + len(self.tokens) - 1, self.tokens[-1:], row.block_ids)

    def found(self) -> DraftTokens:
        weights = torch.stack(self.weights) if self.weights else None
        return DraftTokens(tuple(self.tokens), Tree.chain(len(self.tokens)), weights)


def _uncomputed_run(row: ScheduledRow) -> Run:
    """What the target computes of it; before draft tokens also the token before, which may have been the last
    one of a step in which all were accepted, so that nobody has computed it here."""
    start = max(0, row.start - 1) if row.num_draft_tokens else row.start
    return Run(start, row.tokens[start : row.end], row.block_ids)
