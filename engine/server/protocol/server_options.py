"""Server options: authentication, limits, timeouts, shutdown, TLS, and outputs that a script dictates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ....quant.base.errors import BadInput
from ...multimodal.media import MediaLimits

MIB = 1 << 20
LogFormat = Literal["text", "json"]


@dataclass(frozen=True, slots=True)
class ScriptedText:
    """The text of an output whose prompt has `after` in it, later than any other entry's."""

    after: str
    text: str


def read_script(path: Path) -> tuple[ScriptedText, ...]:
    """A script from a JSON file: a list of objects with `after` and `text`.

    Raises:
        BadInput: no such file, or something else in it.
    """
    try:
        entries = json.loads(path.read_text())
        return tuple(ScriptedText(str(entry["after"]), str(entry["text"])) for entry in entries)
    except OSError as error:
        raise BadInput(f"--scripted-output {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise BadInput(
            f"--scripted-output {path}: write a JSON list of objects with after and text"
        ) from error


def scripted_text(script: Sequence[ScriptedText], prompt: str) -> str | None:
    """The text for a prompt; None where no entry fits."""
    places = [(prompt.rfind(entry.after), entry) for entry in script]
    place, entry = max(places, key=lambda pair: pair[0], default=(-1, None))
    return entry.text if entry is not None and place >= 0 else None


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """Files of PEM, as vLLM's `--ssl-...` options name them.

    Attributes:
        certfile: certificate, with its chain.
        keyfile: private key; None: it is in `certfile`.
        ca_certs: authorities whose certificates clients may have.
        cert_reqs: 0: clients need no certificate; 1: one that is given is checked; 2: they need one
            (`ssl.VerifyMode`).
        is_refreshed: whether changed files are read again.
    """

    certfile: Path
    keyfile: Path | None = None
    ca_certs: Path | None = None
    cert_reqs: int = 0
    is_refreshed: bool = False

    def __post_init__(self) -> None:
        if self.cert_reqs not in (0, 1, 2):
            raise BadInput(
                f"--ssl-cert-reqs {self.cert_reqs}: 0 (none), 1 (optional) or 2 (required)"
            )
        if self.cert_reqs and self.ca_certs is None:
            raise BadInput(
                f"--ssl-cert-reqs {self.cert_reqs} needs --ssl-ca-certs, whose certificates to accept"
            )

    @property
    def paths(self) -> tuple[Path, ...]:
        files = (self.certfile, self.keyfile, self.ca_certs)
        return tuple(path for path in files if path is not None)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of the HTTP server; those of the engine are in `EngineConfig`.

    Attributes:
        api_keys: accepted API keys; no authentication without these and a key file.
        api_key_file: YAML file of keys with names and limits, read again when it changes.
        rpm_per_key, tpm_per_key: requests and tokens per minute of keys that have no limits of their own,
            None for no limit. Without keys all clients share one.
        cors_origins: web origins allowed by CORS; `*` allows all.
        host_names: allowed names in the Host header; None for any. Addresses and `localhost` are always
            allowed. Guards against DNS rebinding, which CORS does not stop.
        max_body_bytes, max_header_bytes: of one request.
        header_timeout_seconds: limit for receiving a request's head, from the connection or its first byte.
        max_connections: open connections; more get 503.
        body_timeout_seconds: limit for receiving a request's body.
        send_timeout_seconds: how long a client may take nothing of a response that it is sent.
        max_concurrency_per_key: concurrent requests per API key, None for no limit. Without keys all
            clients share one limit.
        max_queue_per_key: requests per key that may wait beyond that limit; more get 429.
        max_waiting: sequences that may wait in the engine's queue; more get 429.
        request_timeout_seconds: from the arrival of a request to the end of its response.
        step_timeout_seconds: age of an engine step from which `/health` answers 503.
        shutdown_delay_seconds: how long requests are still taken after the stop signal, `/ready` being 503.
        drain_seconds: how long requests in flight may go on after that.
        log_prompts: log request bodies.
        log_format: `text`, or `json` for one object a line.
        otlp_traces_endpoint: OTLP/HTTP URL that gets a span for each request; None for no traces.
        tls: certificate and key; None for plain HTTP.
        admin_api_key: the key, beside `api_keys` or one of them, that may change what is served and see
            metrics, beside the admins of the key file; None lets all of `api_keys`.
        lora_folders: folders below which adapters may be loaded at runtime; empty for no loading.
        script: texts that conversations must generate, for tests of agents.
        media: limits of images that clients send, and hosts that they may name.
    """

    api_keys: tuple[str, ...] = ()
    api_key_file: Path | None = None
    rpm_per_key: int | None = None
    tpm_per_key: int | None = None
    cors_origins: tuple[str, ...] = ()
    host_names: frozenset[str] | None = None
    max_body_bytes: int = 16 * MIB
    max_header_bytes: int = 32 << 10
    header_timeout_seconds: float = 30.0
    max_connections: int = 1024
    body_timeout_seconds: float = 30.0
    send_timeout_seconds: float = 60.0
    max_concurrency_per_key: int | None = None
    max_queue_per_key: int = 0
    max_waiting: int = 4096
    request_timeout_seconds: float = 3600.0
    step_timeout_seconds: float = 120.0
    shutdown_delay_seconds: float = 0.0
    drain_seconds: float = 5.0
    log_prompts: bool = False
    log_format: LogFormat = "text"
    otlp_traces_endpoint: str | None = None
    tls: TlsOptions | None = None
    admin_api_key: str | None = None
    lora_folders: tuple[Path, ...] = ()
    script: tuple[ScriptedText, ...] = ()
    media: MediaLimits = field(default_factory=MediaLimits)

    def __post_init__(self) -> None:
        admin = self.admin_api_key
        for key in self.api_keys if admin is None else (*self.api_keys, admin):
            if not key or not key.isascii() or not key.isprintable() or key != key.strip():
                raise BadInput("an API key is empty or has characters that no header can carry")
        if admin is not None and not self.requires_key:
            raise BadInput("--admin-api-key: give --api-key too, for everybody else")
        if self.lora_folders and self.api_keys and admin is None:
            raise BadInput(
                "--allow-runtime-lora-updating with --api-key: --admin-api-key names the key that may"
            )
        for folder in self.lora_folders:
            if not folder.is_dir():
                raise BadInput(f"--allowed-lora-path {folder} is not a folder")
        for origin in self.cors_origins:
            scheme, separator, rest = origin.partition("://")
            if origin != "*" and (not separator or not scheme or not rest or "/" in rest):
                raise BadInput(
                    f"--cors-origin {origin!r}: give an origin such as https://example.org, or *"
                )
        for name, (option, minimum) in _MINIMUMS.items():
            value = getattr(self, name)
            if value is not None and not value >= minimum:
                raise BadInput(f"{option} {value:g}: at least {minimum}")

    @property
    def requires_key(self) -> bool:
        """Whether requests need an API key."""
        return bool(self.api_keys) or self.api_key_file is not None


_MINIMUMS = {
    "rpm_per_key": ("--rpm-per-key", 1),
    "tpm_per_key": ("--tpm-per-key", 1),
    "max_body_bytes": ("--max-body", 1),
    "max_header_bytes": ("--max-header", 1),
    "header_timeout_seconds": ("--header-timeout", 1),
    "max_connections": ("--max-connections", 1),
    "body_timeout_seconds": ("--body-timeout", 1),
    "send_timeout_seconds": ("--send-timeout", 1),
    "max_concurrency_per_key": ("--max-concurrency-per-key", 1),
    "max_queue_per_key": ("--max-queue-per-key", 0),
    "max_waiting": ("--max-waiting", 0),
    "request_timeout_seconds": ("--request-timeout", 1),
    "step_timeout_seconds": ("--step-timeout", 1),
    "shutdown_delay_seconds": ("--shutdown-delay", 0),
    "drain_seconds": ("--drain-seconds", 0),
}
