"""Server endpoint from `--base-url` and its options; its model, tokenizer, version and GPU; its `/metrics`.

llmopt, vLLM, SGLang and llama.cpp name the same metrics differently; the short names are vLLM's without the
prefix. prometheus-client parses Prometheus' text format.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from ...base.errors import BadInput
from ...base.extras import import_extra
from ...engine.base.host import is_loopback
from ...quant.source.load_processor import load_tokenizer
from ...quant.source.models import is_local, refuse_mock, resolve_model
from ..options import values
from ..options.options import BenchOptions
from ..options.values import BACKENDS, CHAT, COMPLETIONS, POOLING
from .exchange import Endpoint
from .json_http import JsonClient, RequestFailed

PATHS = {
    COMPLETIONS: "/v1/completions",
    CHAT: "/v1/chat/completions",
    values.TRANSFORMERS: "/v1/completions",
    values.EMBEDDINGS: "/v1/embeddings",
    values.RERANK: "/v1/rerank",
    values.POOLED: "/pooling",
}
CARD_SECONDS = 10.0
DEFAULT_CONTEXT = 32768
VERSION_PATHS = {"/version": "version", "/props": "build_info"}
"""vLLM and llmopt have the first, llama.cpp the second: {path: key of the version}."""
GPU_LABELS = ("gpu", "gpu_name", "modelName")
"""Labels of metrics that name a GPU: llmopt's, common exporters', and that of NVIDIA's DCGM exporter."""
UNREACHABLE = (RequestFailed, ValueError)
KNOWN_OWNERS = ("llmopt", "vllm", "sglang", "openai", "system", "openai-internal")
"""`owned_by` of models whose server is known to read `max_completion_tokens`."""


@dataclass(frozen=True, slots=True)
class Address:
    """A server's URL, request path and headers, from the options.

    Attributes:
        url: scheme, host, port and prefix, without a `/v1` at its end, a key or a query.
        backend: the request format, a value of `BACKENDS`.
    """

    url: str
    path: str
    headers: tuple[tuple[str, str], ...]
    verify_tls: bool = True
    backend: str = COMPLETIONS

    @classmethod
    def parse(
        cls,
        base_url: str,
        *,
        backend: str = COMPLETIONS,
        endpoint: str | None = None,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        verify_tls: bool = True,
    ) -> Address:
        """Build the address. BadInput: no URL of http or https, or a broken header."""
        try:
            parts = urlsplit(base_url)
            port = parts.port
        except ValueError as error:
            raise BadInput(f"--base-url {base_url!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadInput(f"--base-url {base_url!r}: write http://HOST:PORT or https://HOST")
        if parts.username is not None:
            raise BadInput("--base-url holds a password: give --api-key or --header instead")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        netloc = host if port is None else f"{host}:{port}"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        path = endpoint or PATHS[BACKENDS[backend]]
        fields = {"Host": netloc, "Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key:
            fields["Authorization"] = f"Bearer {api_key}"
        fields |= headers or {}
        for name, value in fields.items():
            if not name.isascii() or any(c in name + value for c in "\r\n\0") or not name.strip():
                raise BadInput(f"--header {name!r}: write one line of NAME=VALUE")
        return cls(
            f"{parts.scheme}://{netloc}{prefix}",
            prefix + "/" + path.lstrip("/"),
            tuple(fields.items()),
            verify_tls,
            BACKENDS[backend],
        )

    @classmethod
    def of(cls, options: BenchOptions) -> Address:
        """The address of the server of `options`. Raises BadInput: an address option is invalid, or an option
        applies only to in-process engines."""
        assert options.base_url is not None
        if options.plan is not None or options.slowdown != 1.0:
            raise BadInput(
                "--plan and --slowdown work on the engine of this process, not on a server"
            )
        return cls.parse(
            options.base_url,
            backend=options.backend,
            endpoint=options.endpoint,
            api_key=options.api_key or os.environ.get("OPENAI_API_KEY", "").strip(),
            headers=options.header,
            verify_tls=not options.insecure,
        )

    @property
    def is_loopback(self) -> bool:
        return is_loopback(urlsplit(self.url).hostname or "")

    def endpoint(self, timeout: float) -> Endpoint:
        """Host, port, TLS and request head (all headers but Content-Length) for the workers."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        fields = (f"{name}: {value}" for name, value in self.headers)
        lines = [f"POST {self.path} HTTP/1.1", *fields]
        return Endpoint(
            parts.hostname,
            parts.port or {"http": 80, "https": 443}[parts.scheme],
            ("\r\n".join(lines) + "\r\n").encode("utf-8"),
            parts.scheme == "https",
            self.verify_tls,
            timeout,
            self.backend in POOLING,
        )

    def model_card(self, model: str | None = None) -> dict[str, Any]:
        """The card of `model` in `/v1/models`, that of its base where it is an adapter, or that of the only
        model where the name is not listed or not given; {} where several others are listed. BadInput: the
        server is unreachable, the answer is no list, or it lists several and no name is given."""
        url = f"{self.url}/v1/models"
        try:
            cards = self.json_client(CARD_SECONDS).get(url)["data"]
            by_id = {card["id"]: card for card in cards}
            if not by_id or not all(isinstance(name, str) for name in by_id):
                raise TypeError
        except (RequestFailed, LookupError, TypeError) as error:
            complaint = f"{url} gives no list of models: give --model"
            if isinstance(error, RequestFailed) and error.status is not None:
                complaint = f"{url} answers HTTP {error.status}: give --model, or the right key"
            elif isinstance(error, RequestFailed) and error.is_unreachable:
                complaint = f"no server answers at {self.url}: {error}"
            raise BadInput(complaint) from error
        if model in by_id:
            return by_id.get(by_id[model].get("parent"), by_id[model])
        # vLLM lists a model once for each name that it is served by.
        bases = {
            card.get("root") or name: card for name, card in by_id.items() if not card.get("parent")
        }
        if len(bases) == 1:
            return next(card for card in by_id.values() if not card.get("parent"))
        if model is None:
            names = ", ".join(list(by_id)[:4])
            raise BadInput(f"{url} lists {len(by_id)} models: give --model, such as {names}")
        return {}

    def listed(self, model: str | None) -> str | None:
        """The model, where the server lists it by that name."""
        with suppress(BadInput):
            return model if self.model_card(model).get("id") == model else None

    def get(self, path: str) -> bytes:
        """The body of a GET with every request's headers. RequestFailed: no answer, no 2xx, or no HTTP."""
        return self.json_client(CARD_SECONDS).read(self.url + path)

    def json_client(self, timeout: float) -> JsonClient:
        return JsonClient(dict(self.headers), self.verify_tls, timeout)

    @property
    def completions_url(self) -> str:
        if self.path.endswith("/chat/completions"):
            return self.url + PATHS[COMPLETIONS]
        return self.request_url

    @property
    def request_url(self) -> str:
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}{self.path}"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of a server, with the tokenizer of its prompts."""

    model: str
    tokenizer_name: str
    tokenizer: Any
    max_model_len: int
    owner: str | None = None


def find_served(options: BenchOptions, address: Address) -> ServedModel:
    """Served model name and tokenizer. BadInput: no `--model` and none listed, or no tokenizer."""
    card: dict[str, Any] = {}
    try:
        card = address.model_card(options.model)
    except BadInput:
        # With every option set, a failing server shows as failed requests, which are counted.
        if options.model is None:
            raise
    model = options.model or card["id"]
    names = [options.tokenizer] if options.tokenizer else [model, card.get("root")]
    tokenizer_name, folder = find_tokenizer([name for name in names if name], options)
    # llama.cpp lists the context of a slot under `meta` (measured with xllamacpp 2026.10.11549).
    slot = meta.get("n_ctx") if isinstance(meta := card.get("meta"), dict) else None
    limit = options.max_model_len or card.get("max_model_len") or slot
    tokenizer = load_tokenizer(folder, trust_remote_code=options.trust_remote_code)
    owner = card.get("owned_by")
    return ServedModel(model, tokenizer_name, tokenizer, limit or DEFAULT_CONTEXT, owner)


def find_tokenizer(names: Sequence[str], options: BenchOptions) -> tuple[str, Path]:
    """(name, folder) of the first of `names` that is a model here; only the options' go to the hub."""
    for name in names:
        given = name in (options.tokenizer, options.model)
        if is_local(name) or (given and (options.tokenizer or "/" in name)):
            folder = resolve_model(name)
            refuse_mock(folder, "bench")
            return name, folder
    raise BadInput(
        f"no tokenizer for {' or '.join(map(repr, names))}: give --tokenizer FOLDER, a .gguf file, a bundled "
        "model or a hub id"
    )


def server_facts(address: Address, model: str | None = None) -> dict[str, str | None]:
    """{`model`, `version`, `gpu`}; values are None where the server does not say."""
    try:
        card = address.model_card(model)
    except BadInput:
        card = {}
    root = card.get("root") or card.get("id")
    return {"model": root, "version": server_version(address), "gpu": gpu_of_metrics(address)}


def server_version(address: Address) -> str | None:
    for path, key in VERSION_PATHS.items():
        try:
            answer: Any = json.loads(address.get(path))
        except UNREACHABLE:
            continue
        if isinstance(answer, dict) and isinstance(answer.get(key), str):
            return answer[key]
    return None


def gpu_of_metrics(address: Address) -> str | None:
    """GPUs named by the labels of the server's Prometheus metrics, sorted."""
    try:
        parser = import_extra("a scrape of server metrics", "serve", "prometheus_client.parser")
        text = address.get("/metrics").decode("utf-8", "replace")
        names = {
            sample.labels[label]
            for family in parser.text_string_to_metric_families(text)
            for sample in family.samples
            for label in GPU_LABELS
            if sample.labels.get(label) and not sample.labels[label].isdigit()
        }
    except UNREACHABLE:
        return None
    return ", ".join(sorted(names)) or None


SampleKind = Literal["counter", "gauge", "sum", "count"]
PREFIXES = ("llmopt_", "vllm:", "sglang:", "llamacpp:")
"""Names of each metric; where a server has two of them, the first is read."""
_ALIASES = {
    "kv_cache_usage": "kv_cache_usage_ratio kv_cache_usage_perc gpu_cache_usage_perc token_usage",
    "num_requests_running": "num_running_reqs requests_processing",
    "num_requests_waiting": "num_queue_reqs requests_deferred",
    "num_preemptions": "num_preemptions_total",
    "prefix_cache_queries": "prefix_cache_queries_total gpu_prefix_cache_queries_total",
    "prefix_cache_hits": "prefix_cache_hits_total gpu_prefix_cache_hits_total",
    "prompt_tokens": "prompt_tokens_total",
    "generation_tokens": "generation_tokens_total tokens_predicted_total",
    "spec_decode_num_draft_tokens": "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens": "spec_decode_num_accepted_tokens_total",
}
SYNONYMS = {alias: name for name, aliases in _ALIASES.items() for alias in aliases.split()}
SHARES = {"kv_cache_usage", "cache_hit_rate"}
"""Gauges that are averaged over engines, not summed."""
PATH = "/metrics"
EVERY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A value of a scrape; a histogram has a `sum` and a `count`."""

    kind: SampleKind
    value: float


def parse_samples(text: str) -> dict[str, Sample]:
    """{short name: sample} of known prefixes, summed over labels. ValueError: another format."""
    sources: dict[str, dict[tuple[int, str], list[float]]] = {}
    kinds: dict[str, SampleKind] = {}
    parser = import_extra("a scrape of server metrics", "serve", "prometheus_client.parser")
    for family in parser.text_string_to_metric_families(text):
        rank = next((n for n, p in enumerate(PREFIXES) if family.name.startswith(p)), None)
        if rank is None or family.name.endswith("_info"):
            continue
        for sample in family.samples:
            if (kind := _kind(family.type, sample.name)) is not None:
                short: str = sample.name.removeprefix(PREFIXES[rank])
                name = SYNONYMS.get(short, short)
                by_source = sources.setdefault(name, {})
                by_source.setdefault((rank, sample.name), []).append(sample.value)
                kinds[name] = kind
    chosen = {name: by_source[min(by_source)] for name, by_source in sources.items()}
    return {
        name: Sample(kinds[name], sum(values) / (len(values) if name in SHARES else 1))
        for name, values in chosen.items()
    }


def _kind(family_type: str, sample_name: str) -> SampleKind | None:
    if family_type in ("histogram", "summary"):
        ending = sample_name.rpartition("_")[2]
        return {"sum": "sum", "count": "count"}.get(ending)  # type: ignore[return-value]
    if sample_name.endswith("_created"):
        return None
    if family_type == "counter":
        return "counter"
    return "gauge" if family_type in ("gauge", "unknown") else None


class Scraper:
    """Reads `/metrics` of a server, by a thread between `start` and `stop`; `reason` if it has none."""

    def __init__(self, address: Address) -> None:
        self.url = address.url + PATH
        self._address = address
        self._samples: list[dict[str, Sample]] = []
        self._failed = 0
        self.reason: str | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            if not parse_samples(self._text()):
                self.reason = f"{self.url} has no Prometheus metrics"
        except RequestFailed as error:
            answers = "does not answer:" if error.is_unreachable else "answers"
            self.reason = f"{self.url} {answers} {error}"
        except BadInput as error:
            self.reason = str(error)
        except ValueError:
            self.reason = f"{self.url} is not in Prometheus' text format"

    def start(self) -> None:
        self._samples, self._failed = [], 0
        if self.reason is not None:
            return
        self._scrape()
        self._stop.clear()
        self._thread = threading.Thread(target=self._keep_scraping, daemon=True)
        self._thread.start()

    def stop(self) -> tuple[list[dict[str, Sample]], int]:
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


def pass_metrics(scrapes: Sequence[Mapping[str, Sample]], failed: int) -> dict[str, Any] | None:
    """Metrics of one pass; None without two scrapes to compare. Counters are rises from the first scrape to
    the last, gauges have mean and maximum, `means` are those of the observations in each histogram. Other
    clients' requests count too."""
    if len(scrapes) < 2:
        return None
    first, last = scrapes[0], scrapes[-1]
    gauges: dict[str, list[float]] = {}
    for scrape in scrapes:
        for name, sample in scrape.items():
            if sample.kind == "gauge":
                gauges.setdefault(name, []).append(sample.value)
    grown = {
        name: sample.value - first[name].value
        for name, sample in last.items()
        if sample.kind != "gauge" and name in first and sample.value >= first[name].value
    }
    counters = {name: value for name, value in grown.items() if last[name].kind == "counter"}
    stems = [name.removesuffix("_count") for name in grown if last[name].kind == "count"]
    return {
        "num_scrapes": len(scrapes),
        "failed_scrapes": failed,
        "counters": counters,
        "gauges": {
            name: {"mean": sum(values) / len(values), "max": max(values)}
            for name, values in gauges.items()
        },
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
    """`llmopt.server_metrics` of a result: counters' sums over passes, gauges' mean of means and maximum."""
    known = [metrics for metrics in passes if metrics is not None]
    reason = scraper.reason
    if reason is None and not known:
        reason = f"{scraper.url} could not be scraped during the passes"
    return {
        "url": scraper.url,
        "reason": reason,
        "scraped_every_s": EVERY_SECONDS,
        "counters": _over(known, "counters", sum),
        "gauges": _over(
            known,
            "gauges",
            lambda values: {
                "mean": sum(value["mean"] for value in values) / len(values),
                "max": max(value["max"] for value in values),
            },
        ),
        "means": _over(known, "means", lambda values: sum(values) / len(values)),
        "runs": list(passes),
    }


def _over(passes: Sequence[Mapping[str, Any]], part: str, reduce: Any) -> dict[str, Any]:
    values: dict[str, list[Any]] = {}
    for metrics in passes:
        for name, value in metrics[part].items():
            values.setdefault(name, []).append(value)
    return {name: reduce(observed) for name, observed in values.items()}
