"""Gate keys of quality: scores on fixed tokens, each with its 95 % interval over the text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scored:
    """A score under `llmopt.quality`.

    Attributes:
        name: its key there, and among the intervals.
        column: of `quality.parquet`, from which two runs are compared position by position.
        quantile: of the column; None is the mean.
    """

    key: str
    label: str
    unit: str
    name: str
    column: str
    quantile: float | None = None


SCORED = {
    each.key: each
    for each in (
        Scored("perplexity", "Perplexity", "", "perplexity", "nll"),
        Scored("kl", "KL from the reference", "nats", "kl_nats", "kl"),
        Scored("p99_kl", "p99 KL from the reference", "nats", "p99_kl_nats", "kl", 0.99),
        Scored("p999_kl", "p99.9 KL from the reference", "nats", "p999_kl_nats", "kl", 0.999),
        Scored("top1", "Top-1 agreement", "share", "top1_agreement", "top1"),
    )
}
