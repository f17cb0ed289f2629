"""Which guesses stand: rejection sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..sampling.sampler import Sampler
from .proposer import Guesses

DRAFT_STREAM, ACCEPT_STREAM = 1, 2
"""Of noise: what a draft model draws with, and what decides on its guesses, apart from the sampler's."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Guesses to decide on.

    Attributes:
        target: p, float32 [guesses + 1, vocab].
        guesses: with q; None: there are none, and one token is drawn.
        seed, position: of the completion, and of the first guess in it.
    """

    target: torch.Tensor
    guesses: Guesses | None
    seed: int
    position: int

    @property
    def token_ids(self) -> tuple[int, ...]:
        return () if self.guesses is None else self.guesses.token_ids


def accepted_tokens(chains: Sequence[Chain], sampler: Sampler) -> list[list[int]]:
    """The guesses of each chain that stand, and one token behind them.

    A guess x stands with probability min(1, p(x) / q(x)); in place of the first that does not comes a
    draw from max(0, p - q), normalized; behind the last, a draw from p. So every token is distributed
    by p (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023; Chen et
    al., "Accelerating Large Language Model Decoding with Speculative Sampling", 2023).

    The host waits for the device twice, however many chains there are.
    """
    counts = _num_standing(chains, sampler)
    p = torch.stack([chain.target[count] for chain, count in zip(chains, counts, strict=True)])
    q = torch.zeros_like(p)
    for own, chain, count in zip(q, chains, counts, strict=True):
        if chain.guesses is None or count == len(chain.token_ids):
            continue
        if chain.guesses.probabilities is None:
            own[chain.token_ids[count]] = 1.0
        else:
            own.copy_(chain.guesses.probabilities[count])
    rest = (p - q).clamp_(min=0.0)
    # Where p and q agree to the last bit nothing is left over; p itself is right then.
    weights = torch.where(rest.any(dim=-1, keepdim=True), rest, p)
    keys = [(c.seed, c.position + count) for c, count in zip(chains, counts, strict=True)]
    drawn = sampler.choose(weights, keys)
    return [
        [*chain.token_ids[:count], token]
        for chain, count, token in zip(chains, counts, drawn, strict=True)
    ]


def _num_standing(chains: Sequence[Chain], sampler: Sampler) -> list[int]:
    """How many guesses of each chain stand, from the first on."""
    guessed = [chain for chain in chains if chain.token_ids]
    if not guessed:
        return [0] * len(chains)
    device = guessed[0].target.device
    tokens = torch.tensor([t for chain in guessed for t in chain.token_ids], device=device)[:, None]
    p = torch.cat([chain.target[:-1] for chain in guessed]).gather(1, tokens).squeeze(1)
    certainty = torch.cat([_certainty(chain) for chain in guessed])
    keys = [(c.seed, c.position + i) for c in guessed for i in range(len(c.token_ids))]
    stands = iter((sampler.uniform(keys, ACCEPT_STREAM, device) * certainty < p).tolist())
    counts = []
    for chain in chains:
        own = [next(stands) for _ in chain.token_ids]
        counts.append((*own, False).index(False))
    return counts


def _certainty(chain: Chain) -> torch.Tensor:
    """q of each guess, float32 [guesses]."""
    assert chain.guesses is not None
    if chain.guesses.probabilities is None:
        return torch.ones(len(chain.token_ids), device=chain.target.device)
    tokens = torch.tensor(chain.token_ids, device=chain.target.device)
    return chain.guesses.probabilities.gather(1, tokens[:, None]).squeeze(1)
