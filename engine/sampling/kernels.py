"""Who draws: all rows at once on the device, or one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..kernels.common.dispatch import Candidate, Operation
from ..kernels.common.runtime import refuses_rows
from .row import SamplingRow
from .rowwise import RowwiseSampling

NoiseKey = tuple[int, int]
"""A seed and a position."""


class SamplingKernel(Protocol):
    """Draws from float32 scores [rows, vocab].

    What is done to the scores, in this order: logit bias, logits processors, penalties, suppressed tokens,
    token mask, temperature, min-p, top-k, top-p. That a token may not come is said after everything
    that could raise its score again.
    """

    def draw(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """A token for each row, int64 [rows], on the scores' device."""
        ...

    def distributions(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """Float32 [rows, vocab]: the probabilities that `draw` draws by."""
        ...

    def preferences(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """Float32 [rows, vocab], each row summing to 1: what `draw` would draw from scores like these.

        The token that it draws from `logits` themselves has the most. Where a row is not greedy, the
        noise of its draw is in them, which the draw from other scores shares.
        """
        ...

    def noise(
        self, keys: Sequence[NoiseKey], size: int, stream: int, device: torch.device
    ) -> torch.Tensor:
        """Exp(1) noise of a stream, float32 [keys, size]; stream 0 is that of `draw`."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingKernelQuery:
    """What a candidate may look at: the device of the scores."""

    device: str

    def __str__(self) -> str:
        return f"rows of scores on {self.device}"


def _batched() -> SamplingKernel:
    from .batched import BatchedSampling

    return BatchedSampling()


SAMPLING: Operation[SamplingKernelQuery, Callable[[], SamplingKernel]] = Operation(
    "sampling",
    [
        Candidate("triton-batched", lambda s: refuses_rows(s.device, torch.float32), _batched),
        Candidate("torch-rows", lambda _: None, RowwiseSampling),
    ],
)
