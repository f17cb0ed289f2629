"""The server's own metrics in a record: what its counters rose by, and how its gauges moved, in each pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .exposition import Sample, counter_deltas, histogram_means
from .scrape import EVERY_SECONDS, Scraper


def pass_metrics(scrapes: Sequence[Mapping[str, Sample]], failed: int) -> dict[str, Any] | None:
    """The metrics of one pass; None without two scrapes to compare.

    Counters are differences of the last and the first scrape, gauges are mean and maximum over all scrapes,
    and `means` are the means of what histograms observed. A server's other clients are in all of them.
    """
    if len(scrapes) < 2:
        return None
    first, last = scrapes[0], scrapes[-1]
    gauges: dict[str, list[float]] = {}
    for scrape in scrapes:
        for name, sample in scrape.items():
            if sample.kind == "gauge":
                gauges.setdefault(name, []).append(sample.value)
    counters = counter_deltas(first, last)
    return {
        "num_scrapes": len(scrapes),
        "failed_scrapes": failed,
        "counters": counters,
        "gauges": {
            name: {"mean": sum(each) / len(each), "max": max(each)} for name, each in gauges.items()
        },
        "means": histogram_means(first, last),
        "prefix_cache_hit_rate": _ratio(counters, "prefix_cache_hits", "prefix_cache_queries"),
        "draft_acceptance": _ratio(
            counters, "spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens"
        ),
    }


def _ratio(counters: Mapping[str, float], part: str, whole: str) -> float | None:
    if part not in counters or not counters.get(whole):
        return None
    return counters[part] / counters[whole]


def server_metrics_part(
    scraper: Scraper, passes: Sequence[Mapping[str, Any] | None]
) -> dict[str, Any]:
    """`llmopt.server_metrics` of a result: each pass, and all of them together.

    Of all passes, counters are sums, gauges the mean of means and the highest of all.
    """
    known = [each for each in passes if each is not None]
    reason = scraper.reason
    if reason is None and not known:
        reason = f"{scraper.url} could not be scraped during the passes"
    return {
        "url": scraper.url,
        "reason": reason,
        "scraped_every_s": EVERY_SECONDS,
        "counters": _over(known, "counters", sum),
        "gauges": {
            name: {
                "mean": sum(each["mean"] for each in values) / len(values),
                "max": max(each["max"] for each in values),
            }
            for name, values in _by_name(known, "gauges").items()
        },
        "means": _over(known, "means", lambda values: sum(values) / len(values)),
        "runs": list(passes),
    }


def _by_name(passes: Sequence[Mapping[str, Any]], part: str) -> dict[str, list[Any]]:
    values: dict[str, list[Any]] = {}
    for each in passes:
        for name, value in each[part].items():
            values.setdefault(name, []).append(value)
    return values


def _over(passes: Sequence[Mapping[str, Any]], part: str, reduce: Any) -> dict[str, float]:
    return {name: reduce(values) for name, values in _by_name(passes, part).items()}
