"""Operation of `llmopt serve-local`: key file and rate limits, TLS, logs and traces."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, get_args

import typer

if TYPE_CHECKING:
    from ....engine.server.protocol.server_options import ServerOptions, TlsOptions

TLS = "TLS"
LIMITS = "Keys and rate limits"


@dataclass(frozen=True, slots=True)
class OperationOptions:
    """What an operator adds to a server that clients use."""

    PANEL: ClassVar = "Logs and traces"

    log_format: Annotated[str, typer.Option(help="Log lines: text, or json, an object a line.")] = (
        "text"
    )
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            help="Send OpenTelemetry traces to this OTLP/HTTP URL. Needs the extra otel. Default: none."
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="YAML file of API keys with names and limits, read again when it changes.",
            rich_help_panel=LIMITS,
        ),
    ] = None
    rpm_per_key: Annotated[
        int | None,
        typer.Option(
            help="Requests per minute of an API key. Default: no limit.", rich_help_panel=LIMITS
        ),
    ] = None
    tpm_per_key: Annotated[
        int | None,
        typer.Option(
            help="Tokens per minute of an API key, prompts and completions. Default: no limit.",
            rich_help_panel=LIMITS,
        ),
    ] = None
    ssl_certfile: Annotated[
        Path | None,
        typer.Option(help="TLS certificate, PEM. Default: plain HTTP.", rich_help_panel=TLS),
    ] = None
    ssl_keyfile: Annotated[
        Path | None,
        typer.Option(help="Its private key. Default: in the certificate.", rich_help_panel=TLS),
    ] = None
    ssl_ca_certs: Annotated[
        Path | None, typer.Option(help="Authorities of clients' certificates.", rich_help_panel=TLS)
    ] = None
    ssl_cert_reqs: Annotated[
        int,
        typer.Option(
            help="Clients' certificates: 0 not asked for, 1 optional, 2 required.",
            rich_help_panel=TLS,
        ),
    ] = 0
    enable_ssl_refresh: Annotated[
        bool,
        typer.Option(
            "--enable-ssl-refresh/--no-enable-ssl-refresh",
            help="Read the TLS files again when they change.",
            rich_help_panel=TLS,
        ),
    ] = False

    def added_to(self, options: ServerOptions) -> ServerOptions:
        """`options` with these, all checked: files, packages and addresses.

        Raises:
            BadInput: what is wrong with one of them.
        """
        from ....engine.server.access.keys import KeyRing
        from ....engine.server.access.reload import open_context
        from ....engine.server.access.tracing import check_tracing
        from ....engine.server.protocol.server_options import LogFormat
        from ....quant.base.errors import BadInput

        form = next((name for name in get_args(LogFormat) if name == self.log_format), None)
        if form is None:
            raise BadInput(
                f"--log-format {self.log_format}: choose {', '.join(get_args(LogFormat))}"
            )
        options = replace(
            options,
            api_key_file=self.api_key_file,
            rpm_per_key=self.rpm_per_key,
            tpm_per_key=self.tpm_per_key,
            log_format=form,
            otlp_traces_endpoint=self.otlp_traces_endpoint,
            tls=self._tls(),
        )
        if options.otlp_traces_endpoint is not None:
            check_tracing(options.otlp_traces_endpoint)
        if options.tls is not None:
            open_context(options.tls)
        KeyRing(options)
        return options

    def _tls(self) -> TlsOptions | None:
        from ....engine.server.protocol.server_options import TlsOptions
        from ....quant.base.errors import BadInput

        if self.ssl_certfile is not None:
            return TlsOptions(
                self.ssl_certfile,
                self.ssl_keyfile,
                self.ssl_ca_certs,
                self.ssl_cert_reqs,
                self.enable_ssl_refresh,
            )
        others = {
            "--ssl-keyfile": self.ssl_keyfile,
            "--ssl-ca-certs": self.ssl_ca_certs,
            "--ssl-cert-reqs": self.ssl_cert_reqs,
            "--enable-ssl-refresh": self.enable_ssl_refresh,
        }
        for name, value in others.items():
            if value:
                raise BadInput(f"{name} needs --ssl-certfile, the server's certificate")
        return None
