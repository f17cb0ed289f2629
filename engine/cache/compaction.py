"""Compaction of the KV cache to a budget: key scores by sequence, and the tokens that SnapKV or H2O keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from ..base.device import packed
from ..kernels.attention.paged_attention import ScoredSpan
from ..scheduling.kv_eviction import KvEviction
from ..scheduling.step_plan import Compaction, ScheduledRow
from .kv_cache import KvCache

POOLING_KERNEL = 7
"""SnapKV: neighbours over which scores are pooled."""


def kept_slots(rule: KvEviction, sums: torch.Tensor) -> torch.Tensor:
    """Slots that each KV head keeps, int64 [kv_heads, budget], ascending: the last, and the best before them.
    `sums` [kv_heads, slots]: SnapKV's of recent queries are max-pooled; H2O's are of all queries."""
    end = sums.shape[1] - rule.num_recent
    scores = sums[:, :end]
    if rule.method == "snapkv":
        scores = functional.max_pool1d(
            scores[None], POOLING_KERNEL, stride=1, padding=POOLING_KERNEL // 2
        )[0]
    # A stable sort, so that equal scores do not depend on the machine: the earlier key is kept.
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    largest = order[:, : rule.budget - rule.num_recent].sort(dim=-1).values
    recent = torch.arange(end, sums.shape[1], device=sums.device).expand(len(sums), -1)
    return torch.cat([largest, recent], dim=-1)


@dataclass(slots=True)
class SequenceScores:
    """Key scores of a sequence: per layer [kv_heads, num_slots or more], after `num_evicted` tokens."""

    sums: list[torch.Tensor]
    num_slots: int = 0
    num_evicted: int = 0


class Evictor:
    """Key scores of the running sequences, and compaction of their blocks by them. A running sequence has a
    row in every step; a sequence without one has ended or is recomputed, and its scores are dropped. A fork
    goes on from the scores of a sequence of its request."""

    def __init__(self, rule: KvEviction, cache: KvCache) -> None:
        self._rule = rule
        self._cache, self._device = cache, cache.layers[0].keys.codes.device
        self.scores: dict[str, SequenceScores] = {}

    def compact(self, compactions: Sequence[Compaction]) -> None:
        for compaction in compactions:
            self._compact(compaction, self.scores[compaction.sequence_id])

    def _compact(self, compaction: Compaction, scores: SequenceScores) -> None:
        num_slots, num_kept = compaction.num_slots, compaction.num_kept
        assert scores.num_slots == num_slots, "the scores are not of this sequence"
        size = self._cache.block_size
        source, destination = (
            (table[:, None] * size + torch.arange(size, device=table.device)).flatten()
            for table in packed([compaction.source, compaction.destination], scores.sums[0].device)
        )
        for index, layer in enumerate(self._cache.layers):
            kept = kept_slots(self._rule, scores.sums[index][:, :num_slots])
            heads = torch.arange(len(kept), device=kept.device)
            for part in layer.parts:
                slots = part.flatten(0, 1)
                # Each head's own tokens, [num_kept, kv_heads, ...]: all are read before any is written.
                slots[destination[:num_kept]] = slots[source[kept.T], heads]
            scores.sums[index] = scores.sums[index].gather(1, kept)
        scores.num_evicted += num_slots - num_kept
        scores.num_slots = num_kept

    def spans(self, rows: Sequence[ScheduledRow], begins: Sequence[int]) -> list[ScoredSpan]:
        """The tokens of a step that are scored, of `rows` that begin at `begins` in the batch."""
        spans = [pair for pair in zip(rows, begins, strict=True) if pair[0].num_scored]
        # All are looked up before any goes on: forks look for their parent's earlier scores.
        layers = self._cache.layers
        self.scores = {
            row.sequence_id: _of(row, self.scores)
            or SequenceScores(
                [torch.zeros(layer.keys.num_heads, 0, device=self._device) for layer in layers]
            )
            for row, _ in spans
        }
        for row, _ in spans:
            self._extend(self.scores[row.sequence_id], row.end - row.num_evicted)
        tables = packed([row.block_ids for row, _ in spans], self._device) if spans else ()
        return [
            ScoredSpan(
                begin + row.num_tokens - row.num_scored,
                begin + row.num_tokens,
                row.end - row.num_evicted,
                table,
                self.scores[row.sequence_id].sums,
            )
            for (row, begin), table in zip(spans, tables, strict=True)
        ]

    def _extend(self, scores: SequenceScores, num_slots: int) -> None:
        """Room for `num_slots`, in whole blocks, so that decode does not copy at every token."""
        size = self._cache.block_size
        for index, sums in enumerate(scores.sums):
            if sums.shape[1] < num_slots:
                room = -(-num_slots // size) * size - sums.shape[1]
                scores.sums[index] = functional.pad(sums, (0, room))
        scores.num_slots = num_slots


def _of(row: ScheduledRow, before: Mapping[str, SequenceScores]) -> SequenceScores | None:
    """Scores of a row's sequence up to `start`, or a copy of those of the sequence that it forked from."""
    at = row.start - row.num_evicted, row.num_evicted
    scores = before.get(row.sequence_id)
    if scores is not None and (scores.num_slots, scores.num_evicted) == at:
        return scores
    request = row.sequence_id.rpartition("/")[0] + "/"
    for name, other in before.items():
        if name.startswith(request) and (other.num_slots, other.num_evicted) == at:
            return SequenceScores([sums.clone() for sums in other.sums], *at)
    return None
