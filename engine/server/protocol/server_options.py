"""What a server lets its clients do, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass

from ....quant.base.errors import BadInput

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Limits of the server around the engine; those of the engine are in `EngineConfig`.

    Attributes:
        api_keys: a client shows one of them; none asks for none.
        cors_origins: origins of web pages that may call the server; `*` is every page.
        host_names: by which clients may call the server; None for any. Addresses and `localhost` always do.
            A name of somebody else's that leads to this machine turns their pages into pages of ours, which
            no rule of CORS stops.
        max_body_bytes, max_header_bytes: of one request.
        body_timeout_seconds: within which a request has arrived.
        max_concurrency_per_key: requests of one key at once, None for no limit. Without keys all clients
            share one.
        max_queue_per_key: requests beyond those that wait for their turn, before more are refused.
        max_waiting: sequences that wait in the engine's queue, before more are refused.
        request_timeout_seconds: from the arrival of a request to the end of its answer.
        drain_seconds: how long requests in flight may go on after the signal to stop.
        log_prompts: write the bodies of requests into the log.
    """

    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    host_names: frozenset[str] | None = None
    max_body_bytes: int = 16 * MIB
    max_header_bytes: int = 32 << 10
    body_timeout_seconds: float = 30.0
    max_concurrency_per_key: int | None = None
    max_queue_per_key: int = 0
    max_waiting: int = 4096
    request_timeout_seconds: float = 3600.0
    drain_seconds: float = 5.0
    log_prompts: bool = False

    def __post_init__(self) -> None:
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or key != key.strip():
                raise BadInput("an API key is empty or has characters that no header can carry")
        for origin in self.cors_origins:
            scheme, separator, rest = origin.partition("://")
            if origin != "*" and (not separator or not scheme or not rest or "/" in rest):
                raise BadInput(
                    f"--cors-origin {origin!r}: give an origin such as https://example.org, or *"
                )
        for name, (option, least) in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise BadInput(f"{option} {value:g}: at least {least}")


_LEAST = {
    "max_body_bytes": ("--max-body", 1),
    "max_header_bytes": ("--max-header", 1),
    "body_timeout_seconds": ("--body-timeout", 1),
    "max_concurrency_per_key": ("--max-concurrency-per-key", 1),
    "max_queue_per_key": ("--max-queue-per-key", 0),
    "max_waiting": ("--max-waiting", 0),
    "request_timeout_seconds": ("--request-timeout", 1),
    "drain_seconds": ("--drain-seconds", 0),
}
