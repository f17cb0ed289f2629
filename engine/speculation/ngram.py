"""N-gram proposer (prompt lookup, Saxena 2023): continuations of earlier matches in the sequence itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..cache.kv_cache import KvCache
from ..scheduling.step_plan import ScheduledRow
from ..scheduling.tree import Tree
from .proposer import DraftTokens, SamplingRowOf, TargetStates


class NgramProposer:
    """Proposes what followed the longest earlier match of the last tokens, the latest match among several."""

    bytes_held = 0
    aux_hidden_state_layers: tuple[int, ...] = ()
    caches: tuple[KvCache, ...] = ()

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest

    def observe(self, steps: Sequence[TargetStates]) -> None:
        """Nothing to keep: `propose` reads the rows' token ids."""

    def propose(
        self, rows: Sequence[ScheduledRow], draw: SamplingRowOf
    ) -> Mapping[str, DraftTokens]:
        """See `Proposer`."""
        drafts = {}
        for row in rows:
            count = row.num_draft_tokens
            if count and (tokens := self._look_up(row.tokens[:], count)):
                drafts[row.sequence_id] = DraftTokens(tokens, Tree.chain(len(tokens)))
        return drafts

    def _look_up(self, history: Sequence[int], count: int) -> tuple[int, ...]:
        tokens = np.asarray(history, dtype=np.int64)
        for size in range(min(self._longest, len(tokens) - 1), self._shortest - 1, -1):
            # Windows that end before the last token, so that each has a continuation.
            windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], size)
            matches = np.flatnonzero((windows == tokens[-size:]).all(axis=1))
            if matches.size:
                start = int(matches[-1]) + size
                return tuple(tokens[start : start + count].tolist())
        return ()
