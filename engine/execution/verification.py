"""Verification of draft tokens: coupled sampling, or rejection sampling (Leviathan et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..base.transfer import packed
from ..sampling.logprobs import WantedLogprobs
from ..sampling.row import SamplingRow, sampling_row, sampling_rows
from ..sampling.sampler import Sampler
from ..scheduling.outputs import TokenLogprobs
from ..scheduling.step_plan import ScheduledRow
from ..speculation.rejection_sampler import Chain, accepted_tokens
from .speculative_row import SpeculativeRow
from .step_layout import StepLayout
from .step_result import StepResult


class Verification(Protocol):
    """An acceptance rule for draft tokens."""

    def draw(self, layout: StepLayout, logits: torch.Tensor, result: StepResult) -> None:
        """Sample from `logits` [ends, vocab] of the layout's `ends` into `result`.

        Accepted draft tokens are recorded in the speculative rows.
        """
        ...


@dataclass(frozen=True, slots=True)
class CoupledVerification:
    """Samples every token as without speculation; a draft token is accepted if it is the sampled one."""

    sampler: Sampler
    eos_token_ids: frozenset[int]

    def draw(self, layout: StepLayout, logits: torch.Tensor, result: StepResult) -> None:
        """See `Verification`."""
        begins = _begins(layout)
        indices: list[int] = []
        sampling: list[SamplingRow] = []
        for row in layout.sampled_rows:
            begin = begins[row.sequence_id]
            indices += range(begin, begin + row.num_samples)
            sampling += sampling_rows(row, self.eos_token_ids)
        tokens, logprobs = self._sample(logits, indices, sampling)
        begin = 0
        for row in layout.sampled_rows:
            end = begin + row.num_samples
            result.tokens[row.sequence_id] = tokens[begin:end]
            result.logprobs[row.sequence_id] = logprobs[begin:end]
            begin = end
        active = [row for row in layout.speculative.values() if row.accept(_last(row, result))]
        while active:
            indices = [begins[each.row.sequence_id] + 1 + each.accepted[-1] for each in active]
            sampling = [sampling_row(each.row, self.eos_token_ids, each.path) for each in active]
            tokens, logprobs = self._sample(logits, indices, sampling)
            for verified, token, scored in zip(active, tokens, logprobs, strict=True):
                result.tokens[verified.row.sequence_id].append(token)
                result.logprobs[verified.row.sequence_id].append(scored)
            active = [each for each in active if each.accept(_last(each, result))]

    def _sample(
        self, logits: torch.Tensor, indices: Sequence[int], sampling: Sequence[SamplingRow]
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        if len(indices) == len(logits):
            return self.sampler.draw(logits, sampling)
        (at,) = packed([indices], logits.device)
        return self.sampler.draw(logits.index_select(0, at), sampling)


@dataclass(frozen=True, slots=True)
class RejectionVerification:
    """Rejection sampling: see `accepted_tokens`."""

    sampler: Sampler
    eos_token_ids: frozenset[int]

    def draw(self, layout: StepLayout, logits: torch.Tensor, result: StepResult) -> None:
        """See `Verification`."""
        sampling = [each for row in layout.sampled_rows for each in self._draws(row, layout)]
        target = self.sampler.distributions(logits, sampling)
        chains: list[Chain] = []
        begins: list[int] = []
        begin = 0
        for row in layout.sampled_rows:
            verified = layout.speculative.get(row.sequence_id)
            draft = None if verified is None else verified.draft
            length = 1 if draft is None else len(draft.token_ids) + 1
            for _ in range(row.num_samples):
                first = sampling[begin]
                distributions = target[begin : begin + length]
                chains.append(Chain(distributions, draft, first.seed, first.position))
                begins.append(begin)
                begin += length
        accepted = accepted_tokens(chains, self.sampler)
        indices = [
            at + i for at, ids in zip(begins, accepted, strict=True) for i in range(len(ids))
        ]
        at, ids = packed([indices, [token for run in accepted for token in run]], logits.device)
        picked = logits if len(indices) == len(logits) else logits.index_select(0, at)
        scored = iter(WantedLogprobs(picked, ids, [sampling[index] for index in indices]).result())
        sampled = iter(accepted)
        for row in layout.sampled_rows:
            tokens = [token for _ in range(row.num_samples) for token in next(sampled)]
            result.tokens[row.sequence_id] = tokens
            result.logprobs[row.sequence_id] = [next(scored) for _ in tokens]
        for verified in layout.speculative.values():
            num_accepted = len(result.tokens[verified.row.sequence_id]) - 1
            verified.accepted = list(range(num_accepted))

    def _draws(self, row: ScheduledRow, layout: StepLayout) -> list[SamplingRow]:
        """Sampling rows of the row's samples, or of each position of its draft and the bonus token."""
        verified = layout.speculative.get(row.sequence_id)
        if verified is None:
            return sampling_rows(row, self.eos_token_ids)
        ids = verified.draft.token_ids
        return [sampling_row(row, self.eos_token_ids, ids[:count]) for count in range(len(ids) + 1)]


def _begins(layout: StepLayout) -> Mapping[str, int]:
    """Offset of each row's samples in the layout's `ends`."""
    begins: dict[str, int] = {}
    begin = 0
    for row in layout.sampled_rows:
        begins[row.sequence_id] = begin
        verified = layout.speculative.get(row.sequence_id)
        begin += row.num_samples + (0 if verified is None else len(verified.draft.token_ids))
    return begins


def _last(verified: SpeculativeRow, result: StepResult) -> int:
    """The token of a row that was sampled last."""
    return result.tokens[verified.row.sequence_id][-1]
