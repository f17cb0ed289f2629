"""Which guesses stand: rejection sampling."""

from __future__ import annotations

import torch

from ..sampler import choose, uniform_noise
from .proposer import Guesses

DRAFT_STREAM, ACCEPT_STREAM = 1, 2
"""Of noise: what a draft model draws with, and what decides on its guesses, apart from the sampler's."""


def accepted_tokens(target: torch.Tensor, guesses: Guesses, seed: int, position: int) -> list[int]:
    """The guesses that stand, and one token behind them.

    A guess x stands with probability min(1, p(x) / q(x)); in place of the first that does not comes a
    draw from max(0, p - q), normalized; behind the last, a draw from p. So every token is distributed
    by p (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023; Chen et
    al., "Accelerating Large Language Model Decoding with Speculative Sampling", 2023).

    Args:
        target: p, float32 [guesses + 1, vocab].
        guesses: a chain, with q.
        seed, position: of the completion, and of the first guess in it.
    """
    tokens: list[int] = []
    draft = guesses.probabilities
    for index, guess in enumerate(guesses.token_ids):
        p, at = target[index], position + index
        certainty = 1.0 if draft is None else float(draft[index, guess])
        if uniform_noise(seed, at, ACCEPT_STREAM) * certainty < float(p[guess]):
            tokens.append(guess)
            continue
        rest = p.clone()
        if draft is None:
            rest[guess] = 0.0
        else:
            rest = (rest - draft[index]).clamp_(min=0.0)
        # Where p and q agree to the last bit nothing is left over; p itself is right then.
        return [*tokens, choose(rest if bool(rest.any()) else p, seed, at)]
    return [*tokens, choose(target[-1], seed, position + len(guesses.token_ids))]
