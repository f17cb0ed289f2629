"""Speculative verification: draws behind the rows of a step, and behind the draft tokens that it accepts."""

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
    """A rule of acceptance."""

    def draw(self, layout: StepLayout, logits: torch.Tensor, result: StepResult) -> None:
        """Draw from `logits` [draws, vocab], those behind the layout's `ends`, into `result`.

        What is accepted is noted in the speculative rows.
        """
        ...


@dataclass(frozen=True, slots=True)
class CoupledVerification:
    """Draws every token as it is drawn without drafts: a draft token is accepted where it is that one."""

    sampler: Sampler
    eos_token_ids: frozenset[int]

    def draw(self, layout: StepLayout, logits: torch.Tensor, result: StepResult) -> None:
        """See `Verification`."""
        begins = _begins(layout)
        places: list[int] = []
        draws: list[SamplingRow] = []
        for row in layout.drawing:
            begin = begins[row.sequence_id]
            places += range(begin, begin + row.num_samples)
            draws += sampling_rows(row, self.eos_token_ids)
        tokens, logprobs = self._drawn(logits, places, draws)
        begin = 0
        for row in layout.drawing:
            end = begin + row.num_samples
            result.tokens[row.sequence_id] = tokens[begin:end]
            result.logprobs[row.sequence_id] = logprobs[begin:end]
            begin = end
        going = [one for one in layout.speculative.values() if one.accept(_last(one, result))]
        while going:
            places = [begins[one.row.sequence_id] + 1 + one.accepted[-1] for one in going]
            draws = [sampling_row(one.row, self.eos_token_ids, one.path) for one in going]
            tokens, logprobs = self._drawn(logits, places, draws)
            for one, token, scored in zip(going, tokens, logprobs, strict=True):
                result.tokens[one.row.sequence_id].append(token)
                result.logprobs[one.row.sequence_id].append(scored)
            going = [one for one in going if one.accept(_last(one, result))]

    def _drawn(
        self, logits: torch.Tensor, places: Sequence[int], draws: Sequence[SamplingRow]
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        if len(places) == len(logits):
            return self.sampler.draw(logits, draws)
        (at,) = packed([places], logits.device)
        return self.sampler.draw(logits.index_select(0, at), draws)


@dataclass(frozen=True, slots=True)
class RejectionVerification:
    """Rejection sampling: see `accepted_tokens`."""

    sampler: Sampler
    eos_token_ids: frozenset[int]

    def draw(self, layout: StepLayout, logits: torch.Tensor, result: StepResult) -> None:
        """See `Verification`."""
        draws = [own for row in layout.drawing for own in self._draws(row, layout)]
        target = self.sampler.distributions(logits, draws)
        chains: list[Chain] = []
        begins: list[int] = []
        begin = 0
        for row in layout.drawing:
            one = layout.speculative.get(row.sequence_id)
            draft = None if one is None else one.draft
            length = 1 if draft is None else len(draft.token_ids) + 1
            for _ in range(row.num_samples):
                own = draws[begin]
                chains.append(Chain(target[begin : begin + length], draft, own.seed, own.position))
                begins.append(begin)
                begin += length
        answers = accepted_tokens(chains, self.sampler)
        places = [at + i for at, own in zip(begins, answers, strict=True) for i in range(len(own))]
        at, ids = packed([places, [token for own in answers for token in own]], logits.device)
        picked = logits if len(places) == len(logits) else logits.index_select(0, at)
        scored = iter(WantedLogprobs(picked, ids, [draws[place] for place in places]).result())
        drawn = iter(answers)
        for row in layout.drawing:
            tokens = [token for _ in range(row.num_samples) for token in next(drawn)]
            result.tokens[row.sequence_id] = tokens
            result.logprobs[row.sequence_id] = [next(scored) for _ in tokens]
        for one in layout.speculative.values():
            one.accepted = list(range(len(result.tokens[one.row.sequence_id]) - 1))

    def _draws(self, row: ScheduledRow, layout: StepLayout) -> list[SamplingRow]:
        """For each of the row's samples, and for each token that may come behind its draft tokens."""
        one = layout.speculative.get(row.sequence_id)
        if one is None:
            return sampling_rows(row, self.eos_token_ids)
        ids = one.draft.token_ids
        return [sampling_row(row, self.eos_token_ids, ids[:count]) for count in range(len(ids) + 1)]


def _begins(layout: StepLayout) -> Mapping[str, int]:
    """Where the draws of each row begin among the layout's `ends`."""
    begins: dict[str, int] = {}
    begin = 0
    for row in layout.drawing:
        begins[row.sequence_id] = begin
        one = layout.speculative.get(row.sequence_id)
        begin += row.num_samples + (0 if one is None else len(one.draft.token_ids))
    return begins


def _last(one: SpeculativeRow, result: StepResult) -> int:
    """The token of a row that was drawn last."""
    return result.tokens[one.row.sequence_id][-1]
