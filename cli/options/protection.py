"""Who may ask `llmopt serve-local` for how much, and how the server ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

if TYPE_CHECKING:
    from ...engine.server.protocol.server_options import ServerOptions


@dataclass(frozen=True, slots=True)
class ProtectionOptions:
    """Keys, origins, sizes, times and queues."""

    PANEL: ClassVar = "Protection"

    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="LLMOPT_API_KEY",
            help="Ask clients for this key; repeatable. Default: ask for none.",
        ),
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="A web origin whose pages may call the server, * for all; repeatable. Default: none."
        ),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="A name by which clients may call a server of the loopback, beside localhost; repeatable."
        ),
    ] = None
    max_body: Annotated[str, typer.Option(help="Size of a request's body.")] = "16MiB"
    max_header: Annotated[str, typer.Option(help="Size of a request's address and headers.")] = (
        "32KiB"
    )
    body_timeout: Annotated[float, typer.Option(help="Seconds in which a request must arrive.")] = (
        30.0
    )
    max_concurrency_per_key: Annotated[
        int | None,
        typer.Option(
            help="Requests of one key at once. Default: no limit. Without keys all clients share one."
        ),
    ] = None
    max_queue_per_key: Annotated[
        int, typer.Option(help="Requests of one key that wait for their turn.")
    ] = 0
    max_waiting: Annotated[int, typer.Option(help="Sequences that wait in the engine's queue.")] = (
        4096
    )
    request_timeout: Annotated[float, typer.Option(help="Seconds that an answer may take.")] = (
        3600.0
    )
    drain_seconds: Annotated[
        float,
        typer.Option(help="How long requests in flight may go on after Ctrl-C or SIGTERM."),
    ] = 5.0
    log_prompts: Annotated[
        bool,
        typer.Option("--log-prompts", help="Write requests with their prompts into the log."),
    ] = False

    def server_options(self, *, is_loopback: bool) -> ServerOptions:
        """What the server is told.

        Raises:
            BadInput: a size that is none, or a number out of its limits.
        """
        from ...engine.base.units import parse_bytes
        from ...engine.server.protocol.server_options import ServerOptions

        return ServerOptions(
            api_keys=tuple(self.api_key or ()),
            cors_origins=tuple(self.cors_origin or ()),
            host_names=frozenset(self.allowed_host or ()) if is_loopback else None,
            max_body_bytes=parse_bytes(self.max_body),
            max_header_bytes=parse_bytes(self.max_header),
            body_timeout_seconds=self.body_timeout,
            max_concurrency_per_key=self.max_concurrency_per_key,
            max_queue_per_key=self.max_queue_per_key,
            max_waiting=self.max_waiting,
            request_timeout_seconds=self.request_timeout,
            drain_seconds=self.drain_seconds,
            log_prompts=self.log_prompts,
        )
