"""The sampling operation: its kernel interface and its candidates (batched on the device, or row by row)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..base.sampling_params import SamplingParams
from ..kernels.common.dispatch import Candidate, Operation
from ..kernels.common.runtime import refuses_rows
from ..kernels.common.verdicts import Trial, tolerance
from .row import SamplingRow
from .rowwise import RowwiseSampling

NoiseKey = tuple[int, int]
"""Key of counter-based noise: seed and token position."""


class SamplingKernel(Protocol):
    """Samples from float32 logits [rows, vocab].

    Order of the logits processing: logit bias, logits processors, penalties, suppressed token ids, token
    mask, temperature, min-p, top-k, top-p. Tokens are masked after everything that could raise their
    logits again.
    """

    def draw(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """A sampled token id for each row, int64 [rows], on the logits' device."""
        ...

    def distributions(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """Float32 [rows, vocab]: the processed distribution that `draw` samples from."""
        ...

    def preferences(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """Draft preferences for coupled acceptance, float32 [rows, vocab], each row summing to 1.

        Their argmax is the token that `draw` samples from `logits`. Of rows that are not greedy they are the
        probabilities divided by the noise of the draw, which the target's draw at that position shares.
        """
        ...

    def noise(
        self, keys: Sequence[NoiseKey], size: int, stream: int, device: torch.device
    ) -> torch.Tensor:
        """Exp(1) noise of a stream, float32 [keys, size]; stream 0 is that of `draw`."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingKernelQuery:
    """Kernel query of sampling: the device of the logits."""

    device: str

    def __str__(self) -> str:
        return f"rows of scores on {self.device}"


def _batched() -> SamplingKernel:
    from .batched import BatchedSampling

    return BatchedSampling()


TRIED_VOCAB = 5000


def _trial(kernel_query: SamplingKernelQuery) -> Trial[Callable[[], SamplingKernel]]:
    """Distributions of rows that use every sampling parameter, and greedy sampling."""
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8, top_k=40),
        SamplingParams(temperature=1.3, top_p=0.7, min_p=0.01),
        SamplingParams(repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3),
    ]
    known = [5, 7, 7, 9]
    rows = [SamplingRow(each, 3, known, 2, suppressed_ids=frozenset({11})) for each in params]
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(len(rows), TRIED_VOCAB, generator=generator)
    logits = logits.to(kernel_query.device)

    def compute(make: Callable[[], SamplingKernel]) -> list[torch.Tensor]:
        kernel = make()
        return [*kernel.distributions(logits, rows), kernel.draw(logits[:1], rows[:1])]

    # Not timed: row by row the host waits for each.
    return Trial(compute, tolerance(torch.float32))


SAMPLING: Operation[SamplingKernelQuery, Callable[[], SamplingKernel]] = Operation(
    "sampling",
    [
        Candidate("triton-batched", lambda s: refuses_rows(s.device, torch.float32), _batched),
        Candidate("torch-rows", lambda _: None, RowwiseSampling),
    ],
    _trial,
)
