"""Rejection sampling: which draft tokens are accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..sampling.sampler import Sampler
from .proposer import DraftTokens

DRAFT_STREAM, ACCEPT_STREAM = 1, 2
"""Of noise: what a draft model draws with, and what decides on its draft tokens, apart from the sampler's."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Draft tokens to decide on.

    Attributes:
        target: p, float32 [draft tokens + 1, vocab].
        draft: with q; None: there are none, and one token is drawn.
        seed, position: of the completion, and of the first draft token in it.
    """

    target: torch.Tensor
    draft: DraftTokens | None
    seed: int
    position: int

    @property
    def token_ids(self) -> tuple[int, ...]:
        return () if self.draft is None else self.draft.token_ids


def accepted_tokens(chains: Sequence[Chain], sampler: Sampler) -> list[list[int]]:
    """The draft tokens of each chain that are accepted, and one token behind them.

    A draft token x is accepted with probability min(1, p(x) / q(x)); in place of the first that is not comes
    a draw from max(0, p - q), normalized; behind the last, a draw from p. So every token is distributed
    by p (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023; Chen et
    al., "Accelerating Large Language Model Decoding with Speculative Sampling", 2023).

    The host waits for the device twice, however many chains there are.
    """
    counts = _num_accepted(chains, sampler)
    p = torch.stack([chain.target[count] for chain, count in zip(chains, counts, strict=True)])
    q = torch.zeros_like(p)
    for own, chain, count in zip(q, chains, counts, strict=True):
        if chain.draft is None or count == len(chain.token_ids):
            continue
        if chain.draft.probabilities is None:
            own[chain.token_ids[count]] = 1.0
        else:
            own.copy_(chain.draft.probabilities[count])
    rest = (p - q).clamp_(min=0.0)
    # Where p and q agree to the last bit nothing is left over; p itself is right then.
    weights = torch.where(rest.any(dim=-1, keepdim=True), rest, p)
    keys = [(c.seed, c.position + count) for c, count in zip(chains, counts, strict=True)]
    drawn = sampler.choose(weights, keys)
    return [
        [*chain.token_ids[:count], token]
        for chain, count, token in zip(chains, counts, drawn, strict=True)
    ]


def _num_accepted(chains: Sequence[Chain], sampler: Sampler) -> list[int]:
    """How many draft tokens of each chain are accepted, from the first on."""
    drafted = [chain for chain in chains if chain.token_ids]
    if not drafted:
        return [0] * len(chains)
    device = drafted[0].target.device
    tokens = torch.tensor([t for chain in drafted for t in chain.token_ids], device=device)[:, None]
    p = torch.cat([chain.target[:-1] for chain in drafted]).gather(1, tokens).squeeze(1)
    draft_probabilities = torch.cat([_draft_probabilities(chain) for chain in drafted])
    keys = [(c.seed, c.position + i) for c in drafted for i in range(len(c.token_ids))]
    accepted = iter(
        (sampler.uniform(keys, ACCEPT_STREAM, device) * draft_probabilities < p).tolist()
    )
    counts = []
    for chain in chains:
        own = [next(accepted) for _ in chain.token_ids]
        counts.append((*own, False).index(False))
    return counts


def _draft_probabilities(chain: Chain) -> torch.Tensor:
    """q of each draft token, float32 [draft tokens]."""
    assert chain.draft is not None
    if chain.draft.probabilities is None:
        return torch.ones(len(chain.token_ids), device=chain.target.device)
    tokens = torch.tensor(chain.token_ids, device=chain.target.device)
    return chain.draft.probabilities.gather(1, tokens[:, None]).squeeze(1)
