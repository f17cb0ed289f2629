"""The sampler: token ids and logprobs from logits.

Randomness is stateless: the noise depends on the request's seed and the token's position only, so a
request samples the same tokens alone, in any batch, and after preemption.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..base.transfer import HostCopy
from ..scheduling.outputs import TokenLogprobs
from .kernels import SAMPLING, NoiseKey, SamplingKernel, SamplingKernelQuery
from .logprobs import WantedLogprobs
from .row import SamplingRow
from .rowwise import largest


class Draw:
    """Sampled tokens, in an asynchronous copy to the host.

    Attributes:
        tokens: int64 [rows], on the device.
    """

    def __init__(
        self, tokens: torch.Tensor, logits: torch.Tensor, rows: Sequence[SamplingRow]
    ) -> None:
        self.tokens = tokens
        self._logprobs = WantedLogprobs(logits, tokens, rows)
        self._on_host = HostCopy(tokens)

    def result(self) -> tuple[list[int], list[TokenLogprobs | None]]:
        """The token ids, and their logprobs where requested; synchronises with the device."""
        return self._on_host.wait().tolist(), self._logprobs.result()


class Sampler:
    """Samples a token for each row of logits, by the kernel of the first logits' device."""

    def __init__(self) -> None:
        self._kernel: SamplingKernel | None = None

    def draw(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow]
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Token ids for float32 `logits` [rows, vocab], and their logprobs where requested."""
        return self.begin(logits, rows).result()

    def begin(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> Draw:
        """As `draw`, without synchronising with the device."""
        return Draw(self._on(logits.device).draw(logits, rows), logits, rows)

    def largest(self, logits: torch.Tensor) -> Draw:
        """The first of the largest of each row, as `draw` of greedy rows that change no logits."""
        return Draw(largest(logits), logits, ())

    def distributions(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """See `SamplingKernel`."""
        return self._on(logits.device).distributions(logits, rows)

    def preferences(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """See `SamplingKernel`."""
        return self._on(logits.device).preferences(logits, rows)

    def choose(self, weights: torch.Tensor, keys: Sequence[NoiseKey], stream: int = 0) -> list[int]:
        """Sample an index by each row of `weights` [rows, vocab], which need not sum to 1.

        It is argmax(w / e) with e ~ Exp(1), the exponential form of the Gumbel-max trick.
        """
        return HostCopy(self.chosen(weights, keys, stream)).wait().tolist()

    def chosen(
        self, weights: torch.Tensor, keys: Sequence[NoiseKey], stream: int = 0
    ) -> torch.Tensor:
        """As `choose`, on the device, int64 [rows]."""
        noise = self._on(weights.device).noise(keys, weights.shape[1], stream, weights.device)
        return (weights / noise).argmax(dim=-1)

    def uniform(self, keys: Sequence[NoiseKey], stream: int, device: torch.device) -> torch.Tensor:
        """Uniform noise in [0, 1] for each key, float32 [keys]."""
        return (-self._on(device).noise(keys, 1, stream, device)).exp().squeeze(1)

    def _on(self, device: torch.device) -> SamplingKernel:
        if self._kernel is None:
            self._kernel = SAMPLING.select(SamplingKernelQuery(device.type)).run()
        return self._kernel
