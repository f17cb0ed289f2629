"""Draft-model proposer: a smaller model with the same vocabulary (Leviathan et al., 2023)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from ..base.transfer import HostCopy, packed
from ..cache.kv_cache import KvCache
from ..cache.step_inputs import Run, step_inputs
from ..model.open import CausalModel
from ..sampling.sampler import Sampler
from ..scheduling.step_plan import ScheduledRow
from ..scheduling.tree import Tree
from .proposer import DraftTokens, SamplingRowOf, TargetStates
from .rejection_sampler import DRAFT_STREAM

DraftForward = Callable[[Sequence[Run], torch.Tensor | None], torch.Tensor]
"""From runs, and token ids that only the device knows in place of theirs, int64 [tokens] or None, to final
hidden states [tokens, hidden]."""


class DraftModel:
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
        self.model = model
        self._cache = cache
        self.caches = (cache,)
        self._device = device
        self._dtype = dtype
        self._independent = independent
        self._sampler = Sampler()
        self.forward: DraftForward = self._eager
        """May replay graphs instead, which `capture_all` captures."""
        self.capture_all: Callable[[], None] = lambda: None

    @property
    def bytes_held(self) -> int:
        """See `Proposer`."""
        return self.model.bytes_held + self._cache.num_bytes

    def observe(self, steps: Sequence[TargetStates]) -> None:
        """Nothing to keep: the draft model reads token ids only."""

    def propose(
        self, rows: Sequence[ScheduledRow], draw: SamplingRowOf
    ) -> Mapping[str, DraftTokens]:
        """See `Proposer`."""
        runs = [_uncomputed_run(row) for row in rows]
        ends = [end - 1 for end in accumulate(len(run.token_ids) for run in runs)]
        going = [row for row in rows if row.num_draft_tokens]
        drafts = {row.sequence_id: _Draft() for row in going}
        at = [end for end, row in zip(ends, rows, strict=True) if row.num_draft_tokens]
        states = self.forward(runs, None)
        last = states if len(at) == len(states) else states.index_select(0, self._indices(at))
        waits: list[Callable[[], None]] = []
        while going:
            tokens, wait = self._extend(going, drafts, self.model.logits(last), draw)
            if any(row.params.reads_tokens for row in going):
                wait()  # the next draft token depends on the values of these
            else:
                waits.append(wait)
            left = [
                (place, row)
                for place, row in enumerate(going)
                if len(drafts[row.sequence_id].tokens) < row.num_draft_tokens
            ]
            if len(left) < len(going):
                tokens = tokens.index_select(0, self._indices([place for place, _ in left]))
            going = [row for _, row in left]
            if going:
                runs = [drafts[row.sequence_id].last_run(row) for row in going]
                last = self.forward(runs, tokens)
        for wait in waits:
            wait()
        return {name: draft.tokens_and_tree() for name, draft in drafts.items()}

    def _extend(
        self,
        rows: Sequence[ScheduledRow],
        drafts: Mapping[str, _Draft],
        logits: torch.Tensor,
        draw: SamplingRowOf,
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        """Sample the next draft token of each row: the tokens on the device, int64 [rows], and what waits for
        them and puts them into the drafts, where 0 stands for them until then."""
        sampling_rows = [draw(row, drafts[row.sequence_id].tokens) for row in rows]
        if self._independent:
            probabilities = self._sampler.distributions(logits, sampling_rows)
            keys = [(sampling.seed, sampling.position) for sampling in sampling_rows]
            tokens = self._sampler.chosen(probabilities, keys, DRAFT_STREAM)
            for row, q in zip(rows, probabilities, strict=True):
                drafts[row.sequence_id].probabilities.append(q)
        else:
            tokens = self._sampler.begin(logits, sampling_rows).tokens
        on_host = HostCopy(tokens)
        extended = [drafts[row.sequence_id].tokens for row in rows]
        places = [len(draft) for draft in extended]
        for draft in extended:
            draft.append(0)

        def wait() -> None:
            for draft, place, token in zip(extended, places, on_host.wait().tolist(), strict=True):
                draft[place] = token

        return tokens, wait

    def _indices(self, values: Sequence[int]) -> torch.Tensor:
        return packed([values], self._device)[0]

    def _eager(self, runs: Sequence[Run], token_ids: torch.Tensor | None) -> torch.Tensor:
        inputs = step_inputs(runs, self._cache.block_size, self._device, self._dtype)
        if token_ids is not None:
            inputs.token_ids.copy_(token_ids)
        return self.model.forward(inputs, self._cache.layers)


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
