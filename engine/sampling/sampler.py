"""The sampler: token ids and logprobs from logits, by the sampling kernel of their device.

Randomness is stateless: the noise depends on the request's seed and the token's position only, so a request
samples the same tokens alone, in any batch, and after preemption.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ..base.device import HostCopy, packed, to_device
from ..base.sampling_params import SamplingParams
from ..kernels.common.devices import refuses_rows, serves_all
from ..kernels.common.dispatch import Candidate, Operation, lazily
from ..kernels.common.verdicts import Trial, tolerance
from ..scheduling.outputs import TokenLogprobs
from .rowwise import RowwiseSampling, SamplingRow, largest

NoiseKey = tuple[int, int]
"""Key of counter-based noise: seed and token position."""


class SamplingKernel(Protocol):
    """Samples from float32 logits [rows, vocab].

    Order of the processing: logit bias, logits processors, penalties, suppressed token ids, token mask,
    temperature, min-p, top-k, top-p. Masks come after everything that could raise a logit again.
    """

    def draw(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """Sampled token ids, int64 [rows], on the logits' device."""
        ...

    def distributions(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """Float32 [rows, vocab]: the processed distribution that `draw` samples from."""
        ...

    def preferences(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """Draft preferences for coupled acceptance, float32 [rows, vocab], each row summing to 1.

        Their argmax is the token that `draw` samples. Rows that are not greedy have the probabilities divided
        by the noise of the draw, which the target's draw at that position shares.
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
    dtype = torch.float32

    def __str__(self) -> str:
        return f"rows of scores on {self.device}"


def _trial(kernel_query: SamplingKernelQuery) -> Trial[Callable[[], SamplingKernel]]:
    """Distributions for every sampling parameter, and greedy sampling; not timed."""
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8, top_k=40),
        SamplingParams(temperature=1.3, top_p=0.7, min_p=0.01),
        SamplingParams(repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3),
    ]
    rows = [SamplingRow(p, 3, [5, 7, 7, 9], 2, suppressed_ids=frozenset({11})) for p in params]
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(len(rows), 5000, generator=generator)
    logits = logits.to(kernel_query.device)

    def compute(make: Callable[[], SamplingKernel]) -> list[torch.Tensor]:
        kernel = make()
        return [*kernel.distributions(logits, rows), kernel.draw(logits[:1], rows[:1])]

    # Row by row the host waits for each row: times would not compare.
    return Trial(compute, tolerance(torch.float32))


SAMPLING: Operation[SamplingKernelQuery, Callable[[], SamplingKernel]] = Operation(
    "sampling",
    [
        Candidate(
            "triton-batched", refuses_rows, lazily(".sampling.triton_sampling", "BatchedSampling")
        ),
        Candidate("torch-rows", serves_all, RowwiseSampling),
    ],
    _trial,
)


SLICE_BYTES = 64 << 20
"""Upper bound on the float32 logits held at once while scoring prompts."""
SLICE_ROWS = 256
"""Most rows of a slice: enough for an efficient GEMM of the LM head."""
_ROWS = 64
"""Rows per log-softmax: for a long prompt and a large vocabulary one copy would take gigabytes."""


def rows_per_slice(vocab_size: int) -> int:
    return max(1, min(SLICE_ROWS, SLICE_BYTES // (4 * vocab_size)))


class Logprobs:
    """Logprob and rank of a token in each row of logits, and the row's `num_top` best tokens.

    `logits` are float32 [rows, vocab], `tokens` int64 [rows] on the same device; the copy is asynchronous.
    """

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> None:
        self._num_top = min(num_top, logits.shape[-1])
        chunks: list[torch.Tensor] = []
        for begin in range(0, len(tokens), _ROWS):
            logprobs = logits[begin : begin + _ROWS].log_softmax(dim=-1)
            ids = tokens[begin : begin + _ROWS, None]
            of_token = logprobs.gather(1, ids)
            rank = (logprobs > of_token).sum(dim=-1, keepdim=True) + 1
            columns = [ids, rank, of_token]
            if self._num_top:
                columns += logprobs.topk(self._num_top)
            # Float32 represents ids and ranks below 2^24 exactly; an Apple GPU has no float64.
            chunks.append(torch.cat([column.float() for column in columns], dim=1))
        self._table = HostCopy(torch.cat(chunks))

    def result(self) -> list[TokenLogprobs]:
        """One entry per row; synchronises with the device once."""
        results: list[TokenLogprobs] = []
        for token, rank, logprob, *top in self._table.wait().tolist():
            top_tokens = zip(map(int, top[self._num_top :]), top[: self._num_top], strict=True)
            results.append(TokenLogprobs(int(token), logprob, int(rank), tuple(top_tokens)))
        return results


class WantedLogprobs:
    """Logprobs of the rows that request them."""

    def __init__(
        self, logits: torch.Tensor, tokens: torch.Tensor, rows: Sequence[SamplingRow]
    ) -> None:
        self._count = len(rows)
        rows_by_num_top: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            if row.params.logprobs is not None:
                rows_by_num_top.setdefault(row.params.logprobs, []).append(index)
        self._parts: list[tuple[list[int], Logprobs]] = []
        for num_top, indices in rows_by_num_top.items():
            selected, ids = logits, tokens
            if len(indices) < len(rows):
                (row_ids,) = packed([indices], logits.device)
                selected, ids = logits.index_select(0, row_ids), tokens.index_select(0, row_ids)
            self._parts.append((indices, Logprobs(selected, ids, num_top)))

    def result(self) -> list[TokenLogprobs | None]:
        """One entry per row; None for rows that request none."""
        results: list[TokenLogprobs | None] = [None] * self._count
        for indices, logprobs in self._parts:
            for index, result in zip(indices, logprobs.result(), strict=True):
                results[index] = result
        return results


def sliced_logprobs(
    logits: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    token_ids: Sequence[int],
    num_top: int,
    num_rows: int,
) -> list[TokenLogprobs]:
    """Logprobs of a token for each row of `hidden` [rows, hidden], with logits of `num_rows` rows at once."""
    tokens = to_device(np.array(token_ids, dtype=np.int64), hidden.device)
    slices = (slice(begin, begin + num_rows) for begin in range(0, len(token_ids), num_rows))
    parts = [Logprobs(logits(hidden[rows]), tokens[rows], num_top) for rows in slices]
    return [logprobs for part in parts for logprobs in part.result()]


class Draw:
    """Sampled tokens, int64 [rows] on the device, and their asynchronous copy to the host."""

    def __init__(
        self, tokens: torch.Tensor, logits: torch.Tensor, rows: Sequence[SamplingRow]
    ) -> None:
        self.tokens = tokens
        self._logprobs = WantedLogprobs(logits, tokens, rows)
        self._on_host = HostCopy(tokens)

    def result(self) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Token ids, and their logprobs where requested; synchronises with the device."""
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
        return Draw(self._on(logits.device).draw(logits, rows), logits, rows)

    def largest(self, logits: torch.Tensor) -> Draw:
        """Greedy tokens: argmax of each row, the lowest index on ties."""
        return Draw(largest(logits), logits, ())

    def distributions(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        return self._on(logits.device).distributions(logits, rows)

    def preferences(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        return self._on(logits.device).preferences(logits, rows)

    def choose(self, weights: torch.Tensor, keys: Sequence[NoiseKey], stream: int = 0) -> list[int]:
        """Sample an index by each row of weights [rows, vocab], which need not sum to 1.

        It is argmax(w / e) with e ~ Exp(1), the exponential form of the Gumbel-max trick.
        """
        return HostCopy(self.chosen(weights, keys, stream)).wait().tolist()

    def chosen(
        self, weights: torch.Tensor, keys: Sequence[NoiseKey], stream: int = 0
    ) -> torch.Tensor:
        noise = self._on(weights.device).noise(keys, weights.shape[1], stream, weights.device)
        return (weights / noise).argmax(dim=-1)

    def uniform(self, keys: Sequence[NoiseKey], stream: int, device: torch.device) -> torch.Tensor:
        """Uniform noise in [0, 1] for each key, float32 [keys]."""
        return (-self._on(device).noise(keys, 1, stream, device)).exp().squeeze(1)

    def _on(self, device: torch.device) -> SamplingKernel:
        if self._kernel is None:
            self._kernel = SAMPLING.select(SamplingKernelQuery(device.type)).run()
        return self._kernel
