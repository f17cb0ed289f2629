"""Server metrics: `/metrics` scraped during a pass; counters, gauges and histograms by short name.

llmopt, vLLM, SGLang and llama.cpp name the same quantities differently; the short names are vLLM's without
the prefix. Prometheus' text format itself is parsed by prometheus-client.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ...base.errors import BadInput
from ...base.extras import import_extra
from .json_http import RequestFailed

if TYPE_CHECKING:
    from .address import Address

SampleKind = Literal["counter", "gauge", "sum", "count"]
PREFIXES = ("llmopt_", "vllm:", "sglang:", "llamacpp:")
"""Where a server has a metric under two of them, the first is read."""
SYNONYMS = {
    "kv_cache_usage_ratio": "kv_cache_usage",
    "kv_cache_usage_perc": "kv_cache_usage",
    "gpu_cache_usage_perc": "kv_cache_usage",
    "token_usage": "kv_cache_usage",
    "num_running_reqs": "num_requests_running",
    "requests_processing": "num_requests_running",
    "num_queue_reqs": "num_requests_waiting",
    "requests_deferred": "num_requests_waiting",
    "num_preemptions_total": "num_preemptions",
    "prefix_cache_queries_total": "prefix_cache_queries",
    "gpu_prefix_cache_queries_total": "prefix_cache_queries",
    "prefix_cache_hits_total": "prefix_cache_hits",
    "gpu_prefix_cache_hits_total": "prefix_cache_hits",
    "prompt_tokens_total": "prompt_tokens",
    "generation_tokens_total": "generation_tokens",
    "tokens_predicted_total": "generation_tokens",
    "spec_decode_num_draft_tokens_total": "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens_total": "spec_decode_num_accepted_tokens",
}
SHARES = {"kv_cache_usage", "cache_hit_rate"}
"""Gauges that are averaged over engines, not summed."""
PATH = "/metrics"
EVERY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a scrape; `sum` and `count` are a histogram's."""

    kind: SampleKind
    value: float


def parse_samples(text: str) -> dict[str, Sample]:
    """{short name: sample}, summed over label sets (gauges that are shares: averaged).

    Metrics that only carry labels (`_info`) and those outside the known prefixes are left out.

    Raises:
        ValueError: not the text format.
    """
    sources: dict[str, dict[tuple[int, str], list[float]]] = {}
    kinds: dict[str, SampleKind] = {}
    for source, name, kind, value in _values(text):
        sources.setdefault(name, {}).setdefault(source, []).append(value)
        kinds[name] = kind
    chosen = {name: by_source[min(by_source)] for name, by_source in sources.items()}
    return {
        name: Sample(kinds[name], sum(each) / len(each) if name in SHARES else sum(each))
        for name, each in chosen.items()
    }


def _values(text: str) -> Iterator[tuple[tuple[int, str], str, SampleKind, float]]:
    """((rank of the prefix, full name), short name, kind, value) of every sample that is kept."""
    parser = import_extra("a scrape of server metrics", "serve", "prometheus_client.parser")
    for family in parser.text_string_to_metric_families(text):
        rank = next((n for n, p in enumerate(PREFIXES) if family.name.startswith(p)), None)
        if rank is None or family.name.endswith("_info"):
            continue
        for sample in family.samples:
            if (kind := _kind(family.type, sample.name)) is not None:
                short: str = sample.name.removeprefix(PREFIXES[rank])
                yield (rank, sample.name), SYNONYMS.get(short, short), kind, sample.value


def _kind(family_type: str, sample_name: str) -> SampleKind | None:
    if family_type in ("histogram", "summary"):
        ending = sample_name.rpartition("_")[2]
        return {"sum": "sum", "count": "count"}.get(ending)  # type: ignore[return-value]
    if sample_name.endswith("_created"):
        return None
    if family_type == "counter":
        return "counter"
    return "gauge" if family_type in ("gauge", "unknown") else None


def increases(first: Mapping[str, Sample], last: Mapping[str, Sample]) -> dict[str, float]:
    """Increase of each counter, and of a histogram's sum and count; one that fell (the server was restarted)
    is left out."""
    return {
        name: sample.value - first[name].value
        for name, sample in last.items()
        if sample.kind != "gauge" and name in first and sample.value >= first[name].value
    }


class Scraper:
    """Reads `/metrics` of one server; a thread scrapes it between `start` and `stop`.

    Attributes:
        url: what is scraped.
        reason: why there is nothing to scrape, in one line; None where the server has metrics.
    """

    def __init__(self, address: Address) -> None:
        self.url = address.url + PATH
        self._address = address
        self._samples: list[dict[str, Sample]] = []
        self._failed = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.reason = self._why_not()

    def start(self) -> None:
        """Scrape now, and every second until `stop`."""
        self._samples, self._failed = [], 0
        if self.reason is not None:
            return
        self._scrape()
        self._stop.clear()
        self._thread = threading.Thread(target=self._keep_scraping, daemon=True)
        self._thread.start()

    def stop(self) -> tuple[list[dict[str, Sample]], int]:
        """(the samples of each scrape in order, how many scrapes failed); the last is of now."""
        if self._thread is None:
            return [], self._failed
        self._stop.set()
        self._thread.join()
        self._thread = None
        self._scrape()
        return self._samples, self._failed

    def _keep_scraping(self) -> None:
        while not self._stop.wait(EVERY_SECONDS):
            self._scrape()

    def _scrape(self) -> None:
        try:
            self._samples.append(parse_samples(self._text()))
        except (RequestFailed, ValueError):
            self._failed += 1

    def _text(self) -> str:
        return self._address.get(PATH).decode("utf-8", "replace")

    def _why_not(self) -> str | None:
        try:
            if parse_samples(self._text()):
                return None
            return f"{self.url} has no Prometheus metrics"
        except RequestFailed as error:
            return f"{self.url} {'does not answer:' if error.is_unreachable else 'answers'} {error}"
        except BadInput as error:
            return str(error)
        except ValueError:
            return f"{self.url} is not in Prometheus' text format"


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
    grown = increases(first, last)
    counters = {name: value for name, value in grown.items() if last[name].kind == "counter"}
    stems = [name.removesuffix("_count") for name in grown if last[name].kind == "count"]
    return {
        "num_scrapes": len(scrapes),
        "failed_scrapes": failed,
        "counters": counters,
        "gauges": {
            name: {"mean": sum(each) / len(each), "max": max(each)} for name, each in gauges.items()
        },
        # Of what each histogram observed between both, where it observed anything.
        "means": {
            stem: grown[f"{stem}_sum"] / grown[f"{stem}_count"]
            for stem in stems
            if grown[f"{stem}_count"] > 0 and f"{stem}_sum" in grown
        },
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
