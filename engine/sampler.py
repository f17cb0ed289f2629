"""From scores to tokens.

Randomness is stateless: the noise of a draw depends on the request's seed and the position of the token,
and on nothing else. So a request draws the same tokens alone, in any batch, and after a preemption.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .outputs import TokenLogprobs
from .sampling.kernels import SAMPLING, NoiseKey, SamplingKernel, SamplingSituation
from .sampling.logprobs import logprobs_of
from .sampling.row import SamplingRow


class Sampler:
    """Draws a token for each row of scores, by the kernel for the device that the first ones lie on."""

    def __init__(self) -> None:
        self._kernel: SamplingKernel | None = None

    def draw(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow]
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Tokens for float32 `logits` [rows, vocab], and their logprobs where a row asks for them.

        The host waits for the tokens together, and then for logprobs.
        """
        drawn: list[int] = self._on(logits.device).draw(logits, rows).tolist()
        return drawn, wanted_logprobs(logits, drawn, rows)

    def distributions(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """See `SamplingKernel`."""
        return self._on(logits.device).distributions(logits, rows)

    def preferences(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """See `SamplingKernel`."""
        return self._on(logits.device).preferences(logits, rows)

    def choose(self, weights: torch.Tensor, keys: Sequence[NoiseKey], stream: int = 0) -> list[int]:
        """A draw by each row of `weights` [rows, vocab], which need not sum to 1.

        It is argmax(w / e) with e ~ Exp(1).
        """
        noise = self._on(weights.device).noise(keys, weights.shape[1], stream, weights.device)
        return (weights / noise).argmax(dim=-1).tolist()

    def uniform(self, keys: Sequence[NoiseKey], stream: int, device: torch.device) -> torch.Tensor:
        """A number from 0 to 1 for each key, float32 [keys]."""
        return (-self._on(device).noise(keys, 1, stream, device)).exp().squeeze(1)

    def _on(self, device: torch.device) -> SamplingKernel:
        if self._kernel is None:
            self._kernel = SAMPLING.select(SamplingSituation(device.type)).run()
        return self._kernel


def wanted_logprobs(
    logits: torch.Tensor, tokens: Sequence[int], rows: Sequence[SamplingRow]
) -> list[TokenLogprobs | None]:
    """Log-probabilities of the tokens drawn from `logits` [rows, vocab], for the rows that ask for them."""
    found: list[TokenLogprobs | None] = [None] * len(rows)
    asked: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        if row.params.logprobs is not None:
            asked.setdefault(row.params.logprobs, []).append(index)
    for num_top, indices in asked.items():
        own = logits if len(indices) == len(rows) else logits[indices]
        scored = logprobs_of(own, [tokens[index] for index in indices], num_top)
        for index, one in zip(indices, scored, strict=True):
            found[index] = one
    return found
