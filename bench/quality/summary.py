"""Summary of scores per position: perplexity, KL divergence with its tail, top-1 agreement, moved ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from .block_bootstrap import Blocks, Interval, quantile
from .passage import Passage
from .positions import QualitySeries

QUANTILES = {
    "median_kl_nats": 0.5,
    "p90_kl_nats": 0.9,
    "p95_kl_nats": 0.95,
    "p99_kl_nats": 0.99,
    "p999_kl_nats": 0.999,
}
# Quantiles with an interval: those that a gate may limit.
GATED_QUANTILES = ("p99_kl_nats", "p999_kl_nats")
FORMULAS = {
    "perplexity": "exp of the mean negative log-likelihood (nats) of the scored tokens, each given those "
    "before it in its window; the protocol says which are scored",
    "perplexity ratio": "perplexity over that of the reference on the same positions: exp of the mean "
    "difference of their negative log-likelihoods",
    "KL": "at each scored position Σ p·(ln p − ln q) in nats; p is the reference model's distribution over "
    "the next token, q this model's; its mean and its quantiles over the positions",
    "top-1 agreement": "share of the scored positions at which both models' likeliest token is the same",
    "rank moved": "share of the scored positions at which the actual token has another rank in this model's "
    "distribution than in the reference's",
    "quality interval": "95 %: block bootstrap over documents, or the windows of a joined text (segments of "
    "them where there are fewer than 20)",
    "KL of served models": "over the tokens that both servers tell among their likeliest, and a bucket "
    "with the rest: Σ p·(ln p − ln q) in nats, a lower bound of the KL divergence over the vocabulary",
}


@dataclass(frozen=True, slots=True)
class Quality:
    """`llmopt.quality`: scores of one model on one passage.

    All from `reference_perplexity` on is None without a reference, or where a server does not tell it.

    Attributes:
        num_tokens: number of scored positions.
        intervals: 95 % interval by the key of the value; a side that the sample does not bound is None.
        interval_method: how the intervals were made.
        speed: rates of scoring; see `scoring.py`.
        hurt: the passages that lost most; see `hurt_passages.py`.
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
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    interval_method: str = ""
    speed: Mapping[str, float | None] | None = None
    hurt: list[dict[str, Any]] | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def blocks_of(series: QualitySeries, seed: int = 0) -> Blocks:
    """The blocks over which the positions of a series are resampled."""
    return Blocks.over(series.needed("document"), series.needed("window"), seed)


def summarize(
    passage: Passage,
    series: QualitySeries,
    *,
    reference: str | None = None,
    speed: Mapping[str, float | None] | None = None,
    seed: int = 0,
) -> Quality:
    """Reduce the series of a passage; one column is in memory at a time, with its resamples."""
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
        values |= _kl_values(kl, blocks, intervals)
    if (top1 := series.column("top1")) is not None:
        values["top1_agreement"] = float(top1.mean())
        intervals["top1_agreement"] = blocks.mean(top1)
    rank, moved = series.column("rank"), series.column("reference_rank")
    if rank is not None and moved is not None:
        values["rank_moved"] = float((rank != moved).mean())
        intervals["rank_moved"] = blocks.mean(rank != moved)
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
        intervals=intervals,
        interval_method=blocks.words,
        speed=speed,
        **values,  # pyright: ignore[reportArgumentType]
    )


def _kl_values(
    kl: np.ndarray, blocks: Blocks, intervals: dict[str, Interval]
) -> dict[str, float | None]:
    """Mean, quantiles and maximum of the KL divergence; adds the intervals of those that have one."""
    values: dict[str, float | None] = {"kl_nats": float(kl.mean(dtype=np.float64))}
    values |= {name: quantile(kl, share) for name, share in QUANTILES.items()}
    values["max_kl_nats"] = float(kl.max())
    intervals["kl_nats"] = blocks.mean(kl)
    for name in GATED_QUANTILES:
        intervals[name] = blocks.quantile(kl, QUANTILES[name])
    return values
