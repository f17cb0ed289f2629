"""Usage by API key in the exposition: the label is the key's name, so that its values are bounded."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from ..access.key_ring import KeyRing


class KeyCollector(Collector):
    """Requests and tokens by key, and requests that its limits refused; nothing without keys."""

    def __init__(self, keys: KeyRing, model_name: str) -> None:
        self._keys = keys
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        principals = [*self._keys.named]
        if not principals:
            return
        requests = self._family("requests", "Requests that have ended, by API key.")
        prompt = self._family("prompt_tokens", "Prompt tokens of requests, by API key.")
        generated = self._family("generation_tokens", "Generated tokens, by API key.")
        refused = self._family(
            "refused_requests", "Requests refused by a limit of their API key.", "limit"
        )
        for principal in principals:
            labels = [*self._labels.values(), principal.key_name or ""]
            requests.add_metric(labels, principal.usage.num_requests)
            prompt.add_metric(labels, principal.usage.prompt_tokens)
            generated.add_metric(labels, principal.usage.completion_tokens)
            by_limit = {
                "requests": principal.limits.refused["requests"],
                "tokens": principal.limits.refused["tokens"],
                "concurrency": principal.concurrency.num_refused,
            }
            for limit, count in by_limit.items():
                refused.add_metric([*labels, limit], count)
        yield from (requests, prompt, generated, refused)

    def _family(self, name: str, text: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(
            f"llmopt_api_key_{name}", text, labels=[*self._labels, "key", *labels]
        )
