"""Authentication, limits and shutdown of `llmopt serve-local`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

if TYPE_CHECKING:
    from ...engine.server.protocol.server_options import ServerOptions


@dataclass(frozen=True, slots=True)
class ProtectionOptions:
    """API keys, CORS origins, size and time limits, queues."""

    PANEL: ClassVar = "Protection"

    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="LLMOPT_API_KEY",
            help="Required API key; repeatable. Default: none.",
        ),
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="Allowed CORS origin, * for all; repeatable. Default: none."),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Allowed Host name of a loopback server, besides localhost; repeatable."),
    ] = None
    max_body: Annotated[str, typer.Option(help="Maximum request body size.")] = "16MiB"
    max_header: Annotated[
        str, typer.Option(help="Maximum size of a request's URL and headers.")
    ] = "32KiB"
    header_timeout: Annotated[
        float, typer.Option(help="Timeout for receiving the head of a request, in seconds.")
    ] = 30.0
    max_connections: Annotated[int, typer.Option(help="Maximum open connections.")] = 1024
    body_timeout: Annotated[
        float, typer.Option(help="Timeout for receiving a request, in seconds.")
    ] = 30.0
    send_timeout: Annotated[
        float, typer.Option(help="Timeout for a client that stops reading, in seconds.")
    ] = 60.0
    max_concurrency_per_key: Annotated[
        int | None,
        typer.Option(
            help="Concurrent requests per API key. Default: no limit. Without keys, clients share it."
        ),
    ] = None
    max_queue_per_key: Annotated[int, typer.Option(help="Queued requests per API key.")] = 0
    max_waiting: Annotated[
        int, typer.Option(help="Maximum waiting sequences in the engine's queue.")
    ] = 4096
    request_timeout: Annotated[float, typer.Option(help="Request timeout in seconds.")] = 3600.0
    step_timeout: Annotated[
        float, typer.Option(help="Age of an engine step from which /health reports it, in seconds.")
    ] = 120.0
    shutdown_delay: Annotated[
        float,
        typer.Option(
            help="Seconds after SIGTERM in which requests are still taken while /ready is 503."
        ),
    ] = 0.0
    drain_seconds: Annotated[
        float,
        typer.Option(help="Seconds to drain requests in flight after Ctrl-C or SIGTERM."),
    ] = 5.0
    admin_api_key: Annotated[
        str | None,
        typer.Option(
            envvar="LLMOPT_ADMIN_API_KEY",
            help="API key that may load adapters and see metrics; others then may not.",
        ),
    ] = None
    allow_runtime_lora_updating: Annotated[
        bool,
        typer.Option(
            "--allow-runtime-lora-updating",
            envvar="LLMOPT_ALLOW_RUNTIME_LORA_UPDATING",
            help="Load and unload LoRA adapters by request; see --max-loras.",
        ),
    ] = False
    allowed_lora_path: Annotated[
        list[Path] | None,
        typer.Option(help="Folder below which adapters may be loaded by request; repeatable."),
    ] = None
    log_prompts: Annotated[
        bool,
        typer.Option("--log-prompts", help="Write requests with their prompts into the log."),
    ] = False

    scripted_output: Annotated[
        str | None,
        typer.Option(
            help="JSON list of {after, text}: a conversation whose prompt has 'after' in it gets 'text'. "
            "For tests of agents."
        ),
    ] = None

    def server_options(self, *, is_loopback: bool) -> ServerOptions:
        """The server's options.

        Raises:
            BadInput: an invalid size, or a number out of range.
        """
        from ...engine.base.units import parse_bytes
        from ...engine.server.protocol.server_options import ServerOptions, read_script

        return ServerOptions(
            api_keys=tuple(self.api_key or ()),
            cors_origins=tuple(self.cors_origin or ()),
            host_names=frozenset(self.allowed_host or ()) if is_loopback else None,
            max_body_bytes=parse_bytes(self.max_body),
            max_header_bytes=parse_bytes(self.max_header),
            header_timeout_seconds=self.header_timeout,
            max_connections=self.max_connections,
            body_timeout_seconds=self.body_timeout,
            send_timeout_seconds=self.send_timeout,
            max_concurrency_per_key=self.max_concurrency_per_key,
            max_queue_per_key=self.max_queue_per_key,
            max_waiting=self.max_waiting,
            request_timeout_seconds=self.request_timeout,
            step_timeout_seconds=self.step_timeout,
            shutdown_delay_seconds=self.shutdown_delay,
            drain_seconds=self.drain_seconds,
            log_prompts=self.log_prompts,
            admin_api_key=self.admin_api_key,
            lora_folders=self._lora_folders(),
            script=read_script(Path(self.scripted_output)) if self.scripted_output else (),
        )

    def _lora_folders(self) -> tuple[Path, ...]:
        from ...quant.base.errors import BadInput

        folders = tuple(self.allowed_lora_path or ())
        if self.allow_runtime_lora_updating != bool(folders):
            raise BadInput(
                "--allow-runtime-lora-updating and --allowed-lora-path go together: adapters are loaded from "
                "below that folder alone"
            )
        return folders
