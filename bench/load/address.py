"""Server endpoint from `--base-url` and its options; its model, tokenizer, version and GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...base.errors import BadInput
from ...base.extras import import_extra
from ...quant.source.load_processor import load_tokenizer
from ...quant.source.models import is_local, resolve_model
from ..options.options import BenchOptions
from ..options.values import (
    BACKENDS,
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    POOLED,
    POOLING,
    RERANK,
    TRANSFORMERS,
)
from .exchange import Endpoint
from .json_http import JsonClient, RequestFailed

PATHS = {
    COMPLETIONS: "/v1/completions",
    CHAT: "/v1/chat/completions",
    TRANSFORMERS: "/v1/completions",
    EMBEDDINGS: "/v1/embeddings",
    RERANK: "/v1/rerank",
    POOLED: "/pooling",
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
        path: of the endpoint, with the prefix.
        headers: sent with every request.
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
        """Validate the options and build the address.

        Raises:
            BadInput: no URL of http or https, an unknown backend, or a header that would break the request.
        """
        try:
            parts = urlsplit(base_url)
            port = parts.port
        except ValueError as error:
            raise BadInput(f"--base-url {base_url!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadInput(f"--base-url {base_url!r}: write http://HOST:PORT or https://HOST")
        if parts.username is not None:
            raise BadInput("--base-url holds a password: give --api-key or --header instead")
        if backend not in BACKENDS:
            raise BadInput(f"--backend {backend!r}: it is none of {', '.join(BACKENDS)}")
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

    @property
    def is_loopback(self) -> bool:
        """Whether the host is a loopback name or address."""
        host = urlsplit(self.url).hostname or ""
        try:
            return ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    def endpoint(self, timeout: float) -> Endpoint:
        """Host, port, TLS and request head (all headers but Content-Length) for the workers."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        lines = [
            f"POST {self.path} HTTP/1.1",
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        return Endpoint(
            parts.hostname,
            parts.port or {"http": 80, "https": 443}[parts.scheme],
            ("\r\n".join(lines) + "\r\n").encode("utf-8"),
            parts.scheme == "https",
            self.verify_tls,
            timeout,
            self.backend in POOLING,
        )

    def model_card(self) -> dict[str, Any]:
        """The first model of the server's `/v1/models`.

        Raises:
            BadInput: the server is unreachable, or its response is not a list of models.
        """
        url = f"{self.url}/v1/models"
        try:
            card = self.json_client(CARD_SECONDS).get(url)["data"][0]
            if not isinstance(card, dict) or not isinstance(card.get("id"), str):
                raise TypeError
        except RequestFailed as error:
            if error.status is not None:
                raise BadInput(
                    f"{url} answers HTTP {error.status}: give --model, or the right key"
                ) from error
            if error.is_unreachable:
                raise BadInput(f"no server answers at {self.url}: {error}") from error
            raise BadInput(f"{url} gives no list of models: give --model") from error
        except (LookupError, TypeError) as error:
            raise BadInput(f"{url} gives no list of models: give --model") from error
        return card

    def get(self, path: str) -> bytes:
        """The body of a GET with the headers of every request.

        Raises:
            RequestFailed: no answer, another status than 2xx, or no HTTP.
        """
        return self.json_client(CARD_SECONDS).read(self.url + path)

    def json_client(self, timeout: float) -> JsonClient:
        """A client for requests that are not timed."""
        return JsonClient(dict(self.headers), self.verify_tls, timeout)

    @property
    def completions_url(self) -> str:
        """Where prompts are scored and continued: the path of the requests, unless those are chats."""
        if self.path.endswith("/chat/completions"):
            return self.url + PATHS[COMPLETIONS]
        return self.request_url

    @property
    def request_url(self) -> str:
        """The URL of the measured requests."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}{self.path}"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model behind a server, with the tokenizer of its prompts."""

    model: str
    tokenizer_name: str
    tokenizer: Any
    max_model_len: int
    owner: str | None = None

    @property
    def knows_completion_length(self) -> bool:
        """The server is known to read `max_completion_tokens`."""
        return self.owner in KNOWN_OWNERS


def find_served(options: BenchOptions, address: Address) -> ServedModel:
    """Resolve the served model name and its tokenizer.

    Raises:
        BadInput: no `--model` and a server that does not list one, or no tokenizer under any of its names.
    """
    card: dict[str, Any] = {}
    try:
        card = address.model_card()
    except BadInput:
        # With every option set, a failing server shows as failed requests, which are counted.
        if options.model is None:
            raise
    model = options.model or card["id"]
    names = [options.tokenizer] if options.tokenizer else [model, card.get("root")]
    tokenizer_name, folder = find_tokenizer([name for name in names if name], options)
    limit = options.max_model_len or card.get("max_model_len")
    tokenizer = load_tokenizer(folder, trust_remote_code=options.trust_remote_code)
    owner = card.get("owned_by")
    return ServedModel(model, tokenizer_name, tokenizer, limit or DEFAULT_CONTEXT, owner)


def find_tokenizer(names: Sequence[str], options: BenchOptions) -> tuple[str, Path]:
    """(name, folder) of the first of `names` that is a model here. Only a name from the options may be looked
    up on the hub; a name reported by the server is looked up on this machine."""
    for name in names:
        given = name in (options.tokenizer, options.model)
        if is_local(name) or (given and (options.tokenizer or "/" in name)):
            return name, resolve_model(name)
    raise BadInput(
        f"no tokenizer for {' or '.join(map(repr, names))}: give --tokenizer FOLDER, a .gguf file, a bundled "
        "model or a hub id"
    )


def server_facts(address: Address) -> dict[str, str | None]:
    """{`model`, `version`, `gpu`}; None where the server does not say."""
    try:
        card = address.model_card()
    except BadInput:
        card = {}
    root = card.get("root") or card.get("id")
    return {"model": root, "version": server_version(address), "gpu": gpu_of_metrics(address)}


def server_version(address: Address) -> str | None:
    """The server's version by the first path that has one."""
    for path, key in VERSION_PATHS.items():
        try:
            said: Any = json.loads(address.get(path))
        except UNREACHABLE:
            continue
        if isinstance(said, dict) and isinstance(said.get(key), str):
            return said[key]
    return None


def gpu_of_metrics(address: Address) -> str | None:
    """The GPUs named by the labels of the server's Prometheus metrics, sorted."""
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
