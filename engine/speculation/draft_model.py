"""Draft-model proposer: a smaller model with the same vocabulary (Leviathan et al., 2023)."""

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
    """A draft model with its own KV cache, addressed by the target's block ids.

    It computes the rows of every step, so blocks shared through the prefix cache hold its keys and values
    too. A slot may lack them where all draft tokens were accepted and no step followed; that only lowers
    acceptance.

    With `independent`, draft tokens are sampled with separate noise, as rejection sampling needs, and
    their distributions are kept. Without, they are sampled with the noise that the target's token will be
    sampled with (coupled), so both agree where the distributions do.
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
        """Nothing to keep: the draft model reads token ids only."""

    def propose(
        self, rows: Sequence[ScheduledRow], draw: SamplingRowOf
    ) -> Mapping[str, DraftTokens]:
        """See `Proposer`."""
        runs = [_uncomputed_run(row) for row in rows]
        ends = [end - 1 for end in accumulate(len(run.token_ids) for run in runs)]
        last = self._forward(runs)[
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
        return {name: draft.tokens_and_tree() for name, draft in drafts.items()}

    def _extend(
        self,
        rows: Sequence[ScheduledRow],
        drafts: Mapping[str, _Draft],
        logits: torch.Tensor,
        draw: SamplingRowOf,
    ) -> None:
        """Sample the next draft token of each row."""
        sampling_rows = [draw(row, drafts[row.sequence_id].tokens) for row in rows]
        if not self._independent:
            for row, token in zip(rows, self._sampler.draw(logits, sampling_rows)[0], strict=True):
                drafts[row.sequence_id].tokens.append(token)
            return
        probabilities = self._sampler.distributions(logits, sampling_rows)
        keys = [(sampling.seed, sampling.position) for sampling in sampling_rows]
        tokens = self._sampler.choose(probabilities, keys, DRAFT_STREAM)
        for row, token, q in zip(rows, tokens, probabilities, strict=True):
            drafts[row.sequence_id].tokens.append(token)
            drafts[row.sequence_id].probabilities.append(q)

    def _forward(self, runs: Sequence[Run]) -> torch.Tensor:
        inputs = step_inputs(runs, self._cache.block_size, self._device, self._dtype)
        return self._model.forward(inputs, self._cache.layers)


@dataclass(slots=True)
class _Draft:
    """Draft tokens of a row so far, and the distributions that they were sampled from."""

    tokens: list[int] = field(default_factory=list)
    probabilities: list[torch.Tensor] = field(default_factory=list)

    def last_run(self, row: ScheduledRow) -> Run:
        return Run(row.end + len(self.tokens) - 1, self.tokens[-1:], row.block_ids)

    def tokens_and_tree(self) -> DraftTokens:
        probabilities = torch.stack(self.probabilities) if self.probabilities else None
        return DraftTokens(tuple(self.tokens), Tree.chain(len(self.tokens)), probabilities)


def _uncomputed_run(row: ScheduledRow) -> Run:
    """The tokens of a row that the draft model computes: those of the target's step, and before draft tokens
    also the token before them, which the draft model has not computed if the last step accepted all of its
    draft tokens."""
    start = max(0, row.start - 1) if row.num_draft_tokens else row.start
    return Run(start, row.tokens[start : row.end], row.block_ids)
