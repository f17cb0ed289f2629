"""Rejection sampling of draft tokens: accepted, recovered and bonus tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..base.transfer import HostCopy, packed
from ..sampling.sampler import Sampler
from .proposer import DraftTokens

DRAFT_STREAM, ACCEPT_STREAM = 1, 2
"""Noise streams of draft sampling and of acceptance; stream 0 is the sampler's."""


@dataclass(frozen=True, slots=True)
class Chain:
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


def accepted_tokens(chains: Sequence[Chain], sampler: Sampler) -> list[list[int]]:
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


def _num_accepted(chains: Sequence[Chain], sampler: Sampler) -> list[int]:
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


def _draft_probabilities(chain: Chain, token_ids: torch.Tensor) -> torch.Tensor:
    """q of each draft token, float32 [draft tokens]."""
    assert chain.draft is not None
    if chain.draft.probabilities is None:
        return torch.ones(len(chain.token_ids), device=chain.target.device)
    return _of_tokens(chain.draft.probabilities, token_ids)
