"""Summary of scores per position: perplexity, KL divergence with its tail, top-1 agreement, moved ranks.

Positions of a text depend on each other, so intervals resample whole blocks with replacement (block
bootstrap; Künsch, 1989): documents, or the windows of a joined text. A text of few blocks has its blocks
cut into segments.

Servers report the likeliest tokens only: their KL divergence pools all others in one bucket. Pooling never
raises a KL divergence (the data-processing inequality), so it is a lower bound of that over the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..metrics.statistics import CONFIDENCE, RESAMPLES, central_interval
from .passage import Passage
from .positions import QualitySeries

QUANTILES = {
    "median_kl_nats": 0.5,
    "p90_kl_nats": 0.9,
    "p95_kl_nats": 0.95,
    "p99_kl_nats": 0.99,
    "p999_kl_nats": 0.999,
}
# Quantiles with an interval, because a gate may limit them.
GATED_QUANTILES = ("p99_kl_nats", "p999_kl_nats")
FORMULAS = {
    "perplexity": "exp of the mean negative log-likelihood (nats) of the scored tokens, each given those "
    "before it in its window; the protocol says which are scored",
    "perplexity ratio": "perplexity over that of the reference on the same positions: exp of the mean "
    "difference of their negative log-likelihoods",
    "KL": "at each scored position Σ p·(ln p − ln q) in nats; p is the reference model's distribution over "
    "the next token, q this model's; its mean and its quantiles over the positions",
    "top-1 agreement": "share of the scored positions at which both models' likeliest token is the same",
    "KL where the reference is sure": "mean of the KL over the scored positions at which the reference "
    "gives its likeliest token a probability of 0.9 or more",
    "KL by domain": "mean of the KL over the bundled texts of a domain, at most 4,000 tokens, which no "
    "calibration saw",
    "flips": "share of the bundled multiple-choice items whose answer, the option of the highest "
    "log-likelihood behind the context, differs from the reference's; interval: Clopper and Pearson, 95 %",
    "KL of rounding the KV cache": "mean KL of this model from itself with keys and values in the dtype of "
    "its activations, over about the first 1,000 scored positions; the reference's cache has the default "
    "dtype, so that a model is at no distance from itself",
    "KL at depth": "mean of the KL over the positions of long documents with half of a depth to all of it "
    "before them; of a KV cache from the same weights on a cache that rounds nothing",
    "rank moved": "share of the scored positions at which the actual token has another rank in this model's "
    "distribution than in the reference's",
    "quality interval": "95 %: block bootstrap over documents, or the windows of a joined text (segments of "
    "them where there are fewer than 20)",
    "KL of served models": "over the tokens that both servers tell among their likeliest, and a bucket "
    "with the rest: Σ p·(ln p − ln q) in nats, a lower bound of the KL divergence over the vocabulary",
}
MIN_BLOCKS = 20
SURE = 0.9  # the reference is sure of a token with this probability
MIN_SEGMENT = 16
# With fewer blocks no resample says how far another text would be; a constant needs none.
FEWEST_BLOCKS = 5
_BATCH = 16  # resamples whose weights are in memory at once
Interval = tuple[float | None, float | None]
NUM_PASSAGES = 5
PASSAGE_TOKENS = 40
# Sums of rounded probabilities leave a rest of about this size, of either sign.
SMALLEST_REST = 1e-9


@dataclass(frozen=True, slots=True)
class PositionBlocks:
    """The block of each position: `of` is its number from 0, int64 [positions]; `kind` is what a block is,
    for readers."""

    of: np.ndarray
    count: int
    kind: str
    seed: int = 0

    @classmethod
    def over(cls, document: np.ndarray, window: np.ndarray, seed: int = 0) -> PositionBlocks:
        """Documents if there are several, else windows; segments of them if they are too few."""
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
        """Batches of resamples, float64 [resamples, blocks]: the number of draws of each block."""
        rng = np.random.default_rng(self.seed)
        even = np.full(self.count, 1 / self.count)
        for begin in range(0, RESAMPLES, _BATCH):
            size = min(_BATCH, RESAMPLES - begin)
            yield rng.multinomial(self.count, even, size=size).astype(np.float64)

    def mean(self, values: np.ndarray) -> Interval:
        return central_interval(self.resampled_means(values))

    def resampled_means(self, values: np.ndarray) -> np.ndarray:
        """The mean of a column in each resample; resamples of equal `PositionBlocks` are the same."""
        sums = np.bincount(self.of, np.asarray(values, np.float64), self.count)
        counts = np.bincount(self.of, minlength=self.count).astype(np.float64)
        return np.concatenate([(w @ sums) / (w @ counts) for w in self.weights()])

    def exp_mean(self, values: np.ndarray) -> Interval:
        """Interval of exp of the mean: a perplexity, from NLLs, or a ratio of two, from their differences."""
        return central_interval(np.exp(self.resampled_means(values)))

    def quantile(self, values: np.ndarray, share: float) -> Interval:
        """Interval of a quantile. A side that no position bounds, by order statistics, is None."""
        low, high = central_interval(self.resampled_quantiles(values, share))
        tail, count = (1 - CONFIDENCE) / 2, len(values)
        if values.min() == values.max():  # the same at every position, for equal models
            return low, high
        is_open = (1 - share) ** count > tail, share**count > tail
        return None if is_open[0] else low, None if is_open[1] else high

    def resampled_quantiles(self, values: np.ndarray, share: float) -> np.ndarray:
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


def quantile(values: np.ndarray, share: float) -> float:
    """The smallest value with at least `share` of all at or below it."""
    return float(np.quantile(values, share, method="inverted_cdf"))


class TruncatedKL(NamedTuple):
    """KL in nats, and the reference's probability in the bucket."""

    kl: float
    rest: float


def truncated_kl(
    reference: Mapping[int | str, float], model: Mapping[int | str, float]
) -> TruncatedKL:
    """KL(reference ‖ model) over the tokens of both and the bucket, by natural-log probabilities of the
    likeliest tokens."""
    shared = reference.keys() & model.keys()
    p = {token: math.exp(reference[token]) for token in shared}
    masses = p.values(), [math.exp(model[token]) for token in shared]
    rests = [max(1.0 - math.fsum(mass), SMALLEST_REST) for mass in masses]
    kl = math.fsum(p[token] * (reference[token] - model[token]) for token in shared)
    kl += rests[0] * math.log(rests[0] / rests[1])
    return TruncatedKL(max(kl, 0.0), rests[0])


@dataclass(frozen=True, slots=True)
class Quality:
    """`llmopt.quality`: scores of one model on one passage. All from `reference_perplexity` on is None
    without a reference, or if a server does not report it.

    Attributes:
        sure: scores at positions at which the reference is sure (`distance`), if there are any.
        intervals: 95 % interval by the key of the value; a side that the sample does not bound is None.
        kv_cache: distance of the model from itself on a KV cache that rounds nothing; None if its own does
            not round, and for servers.
    """

    protocol: str
    description: str
    settings: Mapping[str, int | bool]
    source: str
    token_sha256: str
    num_tokens: int
    num_windows: int
    perplexity: float
    nll_nats: float
    reference: str | None = None
    reference_perplexity: float | None = None
    perplexity_ratio: float | None = None
    kl_nats: float | None = None
    median_kl_nats: float | None = None
    p90_kl_nats: float | None = None
    p95_kl_nats: float | None = None
    p99_kl_nats: float | None = None
    p999_kl_nats: float | None = None
    max_kl_nats: float | None = None
    top1_agreement: float | None = None
    rank_moved: float | None = None
    sure: Mapping[str, Any] | None = None
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    interval_method: str = ""
    speed: Mapping[str, float | None] | None = None
    hurt: list[dict[str, Any]] | None = None
    kv_cache: Mapping[str, Any] | None = None


def summarize(
    passage: Passage,
    series: QualitySeries,
    *,
    reference: str | None = None,
    speed: Mapping[str, float | None] | None = None,
    seed: int = 0,
    tokenizer: Any = None,
) -> Quality:
    """Reduce the series of a passage; one column is in memory at a time, with its resamples. With a
    `tokenizer` the passages that lost most are shown."""
    blocks = blocks_of(series, seed)
    nll = series.needed("nll")
    mean_nll = float(nll.mean(dtype=np.float64))
    values: dict[str, float | None] = {}
    intervals: dict[str, Interval] = {"perplexity": blocks.exp_mean(nll)}
    if (theirs := series.column("reference_nll")) is not None:
        difference = nll.astype(np.float64) - theirs
        values["reference_perplexity"] = math.exp(theirs.mean(dtype=np.float64))
        values["perplexity_ratio"] = math.exp(difference.mean())
        intervals["perplexity_ratio"] = blocks.exp_mean(difference)
    if (kl := series.column("kl")) is not None:
        values["kl_nats"] = float(kl.mean(dtype=np.float64))
        values |= {name: quantile(kl, share) for name, share in QUANTILES.items()}
        values["max_kl_nats"] = float(kl.max())
        intervals["kl_nats"] = blocks.mean(kl)
        intervals |= {name: blocks.quantile(kl, QUANTILES[name]) for name in GATED_QUANTILES}
    if (top1 := series.column("top1")) is not None:
        values["top1_agreement"] = float(top1.mean())
        intervals["top1_agreement"] = blocks.mean(top1)
    rank, moved = series.column("rank"), series.column("reference_rank")
    if rank is not None and moved is not None:
        values["rank_moved"] = float((rank != moved).mean())
        intervals["rank_moved"] = blocks.mean(rank != moved)
    top = series.column("reference_top")
    return Quality(
        protocol=passage.protocol,
        description=passage.description,
        settings=dict(passage.settings),
        source=passage.source,
        token_sha256=passage.sha256,
        num_tokens=len(nll),
        num_windows=len(passage.windows),
        perplexity=math.exp(mean_nll),
        nll_nats=mean_nll,
        reference=reference,
        sure=None if top is None else distance(series, top >= SURE, seed),
        intervals=intervals,
        interval_method=blocks.words,
        speed=speed,
        hurt=None if tokenizer is None else hurt_passages(series, tokenizer),
        **values,  # pyright: ignore[reportArgumentType]
    )


def blocks_of(series: QualitySeries, seed: int = 0) -> PositionBlocks:
    return PositionBlocks.over(series.needed("document"), series.needed("window"), seed)


def distance(series: QualitySeries, where: np.ndarray, seed: int = 0) -> dict[str, Any] | None:
    """Mean KL divergence and top-1 agreement with their intervals over the positions of a mask; None if the
    series has no distance, or the mask no position."""
    kl, top1 = series.column("kl"), series.column("top1")
    if kl is None or top1 is None or not where.any():
        return None
    document, window = series.needed("document")[where], series.needed("window")[where]
    blocks = PositionBlocks.over(document, window, seed)
    columns = {"kl_nats": kl[where], "top1_agreement": top1[where]}
    intervals: dict[str, Interval] = {
        name: blocks.mean(column)
        if blocks.count >= FEWEST_BLOCKS or column.min() == column.max()
        else (None, None)
        for name, column in columns.items()
    }
    means = {name: float(column.mean(dtype=np.float64)) for name, column in columns.items()}
    return {"num_tokens": int(where.sum()), **means, "intervals": intervals}


def hurt_passages(series: QualitySeries, tokenizer: Any) -> list[dict[str, Any]] | None:
    """The runs of up to 40 positions with the largest sums of KL divergence, without overlap; None without a
    reference, empty if the models are the same."""
    kl = series.column("kl")
    if kl is None:
        return None
    windows, positions = series.needed("window"), series.needed("position")
    token_ids = series.needed("token_id")
    return [
        {
            "window": int(windows[begin]),
            "position": int(positions[begin]),
            "mean_kl_nats": float(kl[begin:end].mean()),
            "tokens": [str(tokenizer.decode([int(token)])) for token in token_ids[begin:end]],
            "kl_nats": [round(float(value), 5) for value in kl[begin:end]],
        }
        for begin, end in worst_runs(kl, windows)
    ]


def worst_runs(
    values: np.ndarray,
    windows: np.ndarray,
    *,
    count: int = NUM_PASSAGES,
    length: int = PASSAGE_TOKENS,
) -> list[tuple[int, int]]:
    """Ranges of at most `length` positions of one window with the largest positive sums, in that order."""
    total = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    last = np.concatenate([np.flatnonzero(np.diff(windows)) + 1, [len(windows)]])
    begins = np.arange(len(values))
    ends = np.minimum(begins + length, last[np.searchsorted(last, begins, side="right")])
    sums = total[ends] - total[begins]
    runs: list[tuple[int, int]] = []
    for index in np.argsort(-sums, kind="stable"):
        begin, end = int(begins[index]), int(ends[index])
        if len(runs) == count or sums[index] <= 0:
            break
        if all(end <= other or begin >= stop for other, stop in runs):
            runs.append((begin, end))
    return runs


def score_of(record: Mapping[str, Any], path: str) -> tuple[float, Interval | None] | None:
    """A value of a quality record with its interval, by its dotted path, such as `domains.code.kl_nats`; None
    if it was not scored."""
    *parts, name = path.split(".")
    part: Mapping[str, Any] | None = record
    for key in parts:
        part = (part or {}).get(key)
    if not part or part.get(name) is None:
        return None
    interval = (part.get("intervals") or {}).get(name)
    return part[name], None if interval is None else (interval[0], interval[1])
