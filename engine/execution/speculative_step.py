"""Speculative steps: draft tokens are verified by coupled or rejection sampling (Leviathan et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..base.device import HostCopy, packed
from ..cache.kv_cache import KvCache
from ..sampling.rowwise import SamplingRow, sampling_row, sampling_rows
from ..sampling.sampler import Sampler, WantedLogprobs
from ..scheduling.outputs import TokenLogprobs
from ..scheduling.step_plan import ScheduledRow
from ..speculation.proposer import ACCEPT_STREAM, DraftTokens, Proposer
from .step import SpeculativeRow, StepLayout, StepResult, StepTimer


@dataclass(frozen=True, slots=True)
class CoupledVerification:
    """Samples every token as without speculation; a draft token is accepted if it is the sampled one."""

    sampler: Sampler
    eos_token_ids: frozenset[int]

    def draw(self, layout: StepLayout, logits: torch.Tensor, result: StepResult) -> None:
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
        sampling = [each for row in layout.sampled_rows for each in self._draws(row, layout)]
        target = self.sampler.distributions(logits, sampling)
        chains: list[DraftChain] = []
        begins: list[int] = []
        begin = 0
        for row in layout.sampled_rows:
            verified = layout.speculative.get(row.sequence_id)
            draft = None if verified is None else verified.draft
            length = 1 if draft is None else len(draft.token_ids) + 1
            for _ in range(row.num_samples):
                first = sampling[begin]
                distributions = target[begin : begin + length]
                chains.append(DraftChain(distributions, draft, first.seed, first.position))
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


Verification = CoupledVerification | RejectionVerification
"""Acceptance rules: `draw` samples from the logits [ends, vocab] of a layout's `ends` into the result.

Accepted draft tokens are recorded in the speculative rows.
"""

Compute = Callable[[StepLayout, StepTimer], tuple[torch.Tensor, torch.Tensor | None, StepResult]]
"""The forward pass of a step: hidden states, logits of its `ends` if any row samples, and a result."""


class SpeculativeDecoding:
    """Speculative steps: a proposer of draft tokens, and the rule by which they are accepted."""

    def __init__(
        self,
        proposer: Proposer,
        sampler: Sampler,
        eos_token_ids: frozenset[int],
        *,
        by_rejection: bool,
    ) -> None:
        self.proposer, self._eos_token_ids = proposer, eos_token_ids
        rule = RejectionVerification if by_rejection else CoupledVerification
        self._verification: Verification = rule(sampler, eos_token_ids)

    @torch.inference_mode()
    def run(
        self, rows: Sequence[ScheduledRow], cache: KvCache, compute: Compute, timer: StepTimer
    ) -> StepResult:
        """Run a step: propose, compute, verify, compact KV slots, and update the proposer."""
        proposer = self.proposer
        with timer("draft"):
            generating = [row for row in rows if row.pooling is None]
            drafts = proposer.propose(generating, self._sampling_row) if generating else {}
        layout = StepLayout.of(rows, drafts)
        hidden, logits, result = compute(layout, timer)
        if logits is not None:
            with timer("sample"):
                self._verification.draw(layout, logits, result)
        with timer("draft"):
            moved: list[tuple[int, int]] = []
            for name, row in layout.speculative.items():
                result.num_draft_tokens[name] = len(row.draft.token_ids)
                result.draft_depths[name] = row.draft.tree.depth
                moved += row.moved_slots(cache.block_size)
            cache.copy_slots(moved)
            if generating:
                proposer.observe(layout.target_states(hidden, result))
        return result

    def _sampling_row(self, row: ScheduledRow, draft_ids: Sequence[int]) -> SamplingRow:
        return sampling_row(row, self._eos_token_ids, draft_ids)


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


@dataclass(frozen=True, slots=True)
class DraftChain:
    """A chain of draft tokens to verify.

    Attributes:
        target: target distributions p, float32 [draft tokens + 1, vocab].
        draft: the draft tokens and their distributions q; None: no draft tokens, one token is sampled.
        seed, position: the completion's seed, and the position of the first draft token in it.
    """

    target: torch.Tensor
    draft: DraftTokens | None
    seed: int
    position: int

    @property
    def token_ids(self) -> tuple[int, ...]:
        return () if self.draft is None else self.draft.token_ids


def accepted_tokens(chains: Sequence[DraftChain], sampler: Sampler) -> list[list[int]]:
    """The accepted draft tokens of each chain, followed by the recovered or bonus token.

    A draft token x is accepted with probability min(1, p(x) / q(x)). The first rejected one is replaced by
    the recovered token, sampled from max(0, p - q), normalized; if all are accepted, the bonus token is
    sampled from p. So every token is distributed by p (Leviathan et al.,
    "Fast Inference from Transformers via Speculative Decoding", 2023;
    Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling", 2023).

    The host synchronises with the device twice, whatever the number of chains.
    """
    counts = _num_accepted(chains, sampler)
    p = torch.stack([chain.target[count] for chain, count in zip(chains, counts, strict=True)])
    q = torch.zeros_like(p)
    for row, chain, count in zip(q, chains, counts, strict=True):
        if chain.draft is None or count == len(chain.token_ids):
            continue
        if chain.draft.probabilities is None:
            row[chain.token_ids[count]].fill_(1.0)
        else:
            row.copy_(chain.draft.probabilities[count])
    residual = (p - q).clamp_(min=0.0)
    # Where p and q are bit-identical the residual is zero; p itself is right then.
    weights = torch.where(residual.any(dim=-1, keepdim=True), residual, p)
    keys = [(c.seed, c.position + count) for c, count in zip(chains, counts, strict=True)]
    sampled = sampler.choose(weights, keys)
    return [
        [*chain.token_ids[:count], token]
        for chain, count, token in zip(chains, counts, sampled, strict=True)
    ]


def _num_accepted(chains: Sequence[DraftChain], sampler: Sampler) -> list[int]:
    """Number of accepted draft tokens of each chain."""
    drafted = [chain for chain in chains if chain.token_ids]
    if not drafted:
        return [0] * len(chains)
    device = drafted[0].target.device
    chains_tokens = packed([chain.token_ids for chain in drafted], device)
    p = torch.cat(
        [
            _of_tokens(chain.target[:-1], ids)
            for chain, ids in zip(drafted, chains_tokens, strict=True)
        ]
    )
    draft_probabilities = torch.cat(
        [
            _draft_probabilities(chain, ids)
            for chain, ids in zip(drafted, chains_tokens, strict=True)
        ]
    )
    keys = [(c.seed, c.position + i) for c in drafted for i in range(len(c.token_ids))]
    is_accepted = sampler.uniform(keys, ACCEPT_STREAM, device) * draft_probabilities < p
    accepted = iter(HostCopy(is_accepted).wait().tolist())
    counts = []
    for chain in chains:
        of_chain = [next(accepted) for _ in chain.token_ids]
        counts.append((*of_chain, False).index(False))
    return counts


def _of_tokens(probabilities: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    return probabilities.gather(1, token_ids[:, None]).squeeze(1)


def _draft_probabilities(chain: DraftChain, token_ids: torch.Tensor) -> torch.Tensor:
    """q of each draft token, float32 [draft tokens]."""
    assert chain.draft is not None
    if chain.draft.probabilities is None:
        return torch.ones(len(chain.token_ids), device=chain.target.device)
    return _of_tokens(chain.draft.probabilities, token_ids)
