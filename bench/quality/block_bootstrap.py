"""Block bootstrap over documents or windows: percentile intervals of means, ratios and quantiles.

Positions of a text depend on each other, so that whole blocks are resampled with replacement (Künsch, 1989):
documents, or the windows of a joined text. A text of few blocks has its blocks cut into segments.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 1000
MIN_BLOCKS = 20
MIN_SEGMENT = 16
# Resamples whose weights are in memory at once.
_BATCH = 16

Interval = tuple[float | None, float | None]


@dataclass(frozen=True, slots=True)
class Blocks:
    """The block of each position.

    Attributes:
        of: int64 [positions], the number of the block, from 0.
        kind: what a block is, for readers.
    """

    of: np.ndarray
    count: int
    kind: str
    seed: int = 0

    @classmethod
    def over(cls, document: np.ndarray, window: np.ndarray, seed: int = 0) -> Blocks:
        """Documents where there are several, else windows; segments of them where they are too few."""
        several = len(document) > 0 and bool(document[0] != document[-1])
        labels, kind = (document, "documents") if several else (window, "windows")
        of = np.unique(labels, return_inverse=True)[1].astype(np.int64)
        count = int(of.max()) + 1 if len(of) else 0
        if count < MIN_BLOCKS and len(of):
            length = max(MIN_SEGMENT, len(of) // MIN_BLOCKS)
            starts = np.concatenate([[0], np.flatnonzero(np.diff(of)) + 1])
            within = np.arange(len(of)) - starts[of]
            of = np.unique(of * (len(of) + 1) + within // length, return_inverse=True)[1]
            count, kind = int(of.max()) + 1, f"segments of {length} positions"
        return cls(of.astype(np.int64), count, kind, seed)

    @property
    def words(self) -> str:
        """The resampling, for readers."""
        return (
            f"{100 * CONFIDENCE:g} %, block bootstrap over {self.count} {self.kind}, "
            f"{RESAMPLES:,} resamples"
        )

    def weights(self) -> Iterator[np.ndarray]:
        """Batches of resamples, float64 [resamples, blocks]: how often each block was drawn."""
        rng = np.random.default_rng(self.seed)
        even = np.full(self.count, 1 / self.count)
        for begin in range(0, RESAMPLES, _BATCH):
            size = min(_BATCH, RESAMPLES - begin)
            yield rng.multinomial(self.count, even, size=size).astype(np.float64)

    def mean(self, values: np.ndarray) -> Interval:
        """Of the mean of a column."""
        return self._interval(self.resampled_means(values))

    def resampled_means(self, values: np.ndarray) -> np.ndarray:
        """The mean of a column in each resample; resamples of equal `Blocks` are the same."""
        sums = np.bincount(self.of, np.asarray(values, np.float64), self.count)
        counts = np.bincount(self.of, minlength=self.count).astype(np.float64)
        return np.concatenate([(w @ sums) / (w @ counts) for w in self.weights()])

    def exp_mean(self, values: np.ndarray) -> Interval:
        """Of exp of the mean: of a perplexity, from NLLs, or of a ratio of two, from their differences."""
        return self._interval(np.exp(self.resampled_means(values)))

    def quantile(self, values: np.ndarray, share: float) -> Interval:
        """Of a quantile. A side that no position of the sample bounds, by order statistics, is None."""
        low, high = self._interval(self.resampled_quantiles(values, share))
        tail = (1 - CONFIDENCE) / 2
        count = len(values)
        if values.min() == values.max():  # the same at every position, as of equal models
            return low, high
        return (
            None if (1 - share) ** count > tail else low,
            None if share**count > tail else high,
        )

    def resampled_quantiles(self, values: np.ndarray, share: float) -> np.ndarray:
        """The quantile of a column in each resample."""
        order = np.argsort(values, kind="stable")
        sorted_values, blocks = np.asarray(values, np.float64)[order], self.of[order]
        quantiles = []
        for weights in self.weights():
            for weight in weights:
                # The smallest value with at least `share` of the resample at or below it.
                reached = np.cumsum(weight[blocks])
                index = np.searchsorted(reached, share * reached[-1] - 1e-9)
                quantiles.append(sorted_values[min(int(index), len(sorted_values) - 1)])
        return np.array(quantiles)

    def _interval(self, resampled: np.ndarray) -> Interval:
        tail = (1 - CONFIDENCE) / 2
        low, high = np.quantile(resampled, [tail, 1 - tail])
        return float(low), float(high)


def quantile(values: np.ndarray, share: float) -> float:
    """The smallest value with at least `share` of all at or below it."""
    return float(np.quantile(values, share, method="inverted_cdf"))
