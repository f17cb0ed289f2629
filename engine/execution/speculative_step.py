"""Speculative steps: draft tokens are verified by coupled or rejection sampling (Leviathan et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..base.device import HostCopy, packed
from ..cache.kv_cache import KvCache
from ..sampling.rowwise import SamplingRow, sampling_row, sampling_rows
from ..sampling.sampler import Sampler, WantedLogprobs
from ..scheduling.outputs import TokenLogprobs
from ..scheduling.step_plan import ScheduledRow
from ..speculation.proposer import ACCEPT_STREAM, DraftTokens, Proposer
from .step import StepLayout, StepResult, StepTimer

Compute = Callable[[StepLayout, StepTimer], tuple[torch.Tensor, torch.Tensor | None, StepResult]]
"""The forward pass of a step: hidden states, logits of its `ends` if any row samples, and a result."""


class SpeculativeDecoding:
    """Speculative steps: a proposer, and the rule that accepts its tokens, by logits [ends, vocab]."""

    def __init__(
        self,
        proposer: Proposer,
        sampler: Sampler,
        eos_token_ids: frozenset[int],
        *,
        by_rejection: bool,
    ) -> None:
        self.proposer, self._sampler, self._eos_token_ids = proposer, sampler, eos_token_ids
        self._draw = self._draw_by_rejection if by_rejection else self._draw_coupled

    @torch.inference_mode()
    def run(
        self, rows: Sequence[ScheduledRow], cache: KvCache, compute: Compute, timer: StepTimer
    ) -> StepResult:
        """Run a step: propose, compute, verify, compact KV slots, and update the proposer."""
        proposer = self.proposer
        with timer("draft"):
            generating = [row for row in rows if row.pooling is None]
            ids = self._eos_token_ids
            drafts = {}
            if generating:
                drafts = proposer.propose(generating, lambda row, own: sampling_row(row, ids, own))
        layout = StepLayout.of(rows, drafts)
        hidden, logits, result = compute(layout, timer)
        if logits is not None:
            with timer("sample"):
                self._draw(layout, logits, result)
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

    def _draw_coupled(self, layout: StepLayout, logits: torch.Tensor, result: StepResult) -> None:
        """Sample every token as without speculation; a draft token is accepted if it is the sampled one."""
        begins: dict[str, int] = {}  # offset of each row's samples in the layout's `ends`
        indices: list[int] = []
        sampling: list[SamplingRow] = []
        begin = 0
        for row in layout.sampled_rows:
            begins[row.sequence_id] = begin
            indices += range(begin, begin + row.num_samples)
            sampling += sampling_rows(row, self._eos_token_ids)
            drafted = layout.speculative.get(row.sequence_id)
            begin += row.num_samples + (0 if drafted is None else len(drafted.draft.token_ids))
        result.add_samples(layout.sampled_rows, *self._sample(logits, indices, sampling))
        active = [*layout.speculative.values()]
        while active := [r for r in active if r.accept(result.tokens[r.row.sequence_id][-1])]:
            indices = [begins[r.row.sequence_id] + 1 + r.accepted[-1] for r in active]
            sampling = [sampling_row(r.row, self._eos_token_ids, r.path) for r in active]
            tokens, logprobs = self._sample(logits, indices, sampling)
            for verified, token, scored in zip(active, tokens, logprobs, strict=True):
                result.tokens[verified.row.sequence_id].append(token)
                result.logprobs[verified.row.sequence_id].append(scored)

    def _sample(
        self, logits: torch.Tensor, indices: Sequence[int], sampling: Sequence[SamplingRow]
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        if len(indices) == len(logits):
            return self._sampler.draw(logits, sampling)
        (at,) = packed([indices], logits.device)
        return self._sampler.draw(logits.index_select(0, at), sampling)

    def _draw_by_rejection(
        self, layout: StepLayout, logits: torch.Tensor, result: StepResult
    ) -> None:
        """Rejection sampling: see `accepted_tokens`."""
        sampling: list[SamplingRow] = []
        for row in layout.sampled_rows:
            verified = layout.speculative.get(row.sequence_id)
            if verified is None:
                sampling += sampling_rows(row, self._eos_token_ids)
                continue
            # Each position of the draft, and the bonus token.
            ids = verified.draft.token_ids
            counts = range(len(ids) + 1)
            sampling += [sampling_row(row, self._eos_token_ids, ids[:count]) for count in counts]
        target = self._sampler.distributions(logits, sampling)
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
        accepted = accepted_tokens(chains, self._sampler)
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
            verified.accepted = list(range(len(result.tokens[verified.row.sequence_id]) - 1))


@dataclass(frozen=True, slots=True)
class DraftChain:
    """Draft tokens to verify, with distributions q (None: no drafts), and the target's p [drafts + 1, vocab].
    `seed` is the completion's, `position` that of the first draft token in it."""

    target: torch.Tensor
    draft: DraftTokens | None
    seed: int
    position: int

    @property
    def token_ids(self) -> tuple[int, ...]:
        return () if self.draft is None else self.draft.token_ids


def accepted_tokens(chains: Sequence[DraftChain], sampler: Sampler) -> list[list[int]]:
    """The accepted draft tokens of each chain, followed by the recovered or bonus token; two syncs in all.

    A draft token x is accepted with probability min(1, p(x) / q(x)). The first rejected one is replaced by a
    sample of max(0, p - q), normalized; if all are accepted, the bonus token is sampled from p. So every
    token is distributed by p (Leviathan et al., 2023; Chen et al., 2023).
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
    drafted = [chain for chain in chains if chain.token_ids]
    if not drafted:
        return [0] * len(chains)
    device = drafted[0].target.device
    chains_tokens = packed([chain.token_ids for chain in drafted], device)
    targets, drafts = [], []
    for chain, ids in zip(drafted, chains_tokens, strict=True):
        assert chain.draft is not None
        targets.append(_of_tokens(chain.target[:-1], ids))
        q = chain.draft.probabilities
        drafts.append(torch.ones(len(ids), device=device) if q is None else _of_tokens(q, ids))
    p, draft_probabilities = torch.cat(targets), torch.cat(drafts)
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
