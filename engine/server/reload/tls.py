"""TLS: the server's certificate and key, and the check of clients' certificates; vLLM's options."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from ....quant.base.errors import BadInput
from .reloader import Reloadable


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


def open_context(options: TlsOptions) -> ssl.SSLContext:
    """The context of the server's connections: TLS 1.2 or later.

    Raises:
        BadInput: a file cannot be read, is not of its kind, or the key is another certificate's.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.VerifyMode(options.cert_reqs)
    _load(context, options)
    return context


def reloadable_context(options: TlsOptions, context: ssl.SSLContext) -> Reloadable:
    """Renewed files for later handshakes. They are tried in a context of their own first: between the
    certificate and its key a renewal leaves a pair that does not match."""
    return Reloadable(
        f"--ssl-certfile {options.certfile}",
        options.paths,
        lambda: open_context(options),
        lambda _: _load(context, options),
    )


def _load(context: ssl.SSLContext, options: TlsOptions) -> None:
    for path in options.paths:
        try:
            path.open("rb").close()
        except OSError as error:
            raise BadInput(f"TLS: cannot read {path}: {error.strerror}") from error
    try:
        # A password: without one OpenSSL would ask for it on the terminal.
        context.load_cert_chain(options.certfile, options.keyfile, password="")
    except (ssl.SSLError, ValueError) as error:
        pair = (
            options.certfile
            if options.keyfile is None
            else f"{options.certfile}, --ssl-keyfile {options.keyfile}"
        )
        raise BadInput(f"--ssl-certfile {pair}: {_reason(error)}") from error
    if options.ca_certs is not None:
        try:
            context.load_verify_locations(options.ca_certs)
        except ssl.SSLError as error:
            raise BadInput(f"--ssl-ca-certs {options.ca_certs}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None)  # none of errors in PEM
    if reason == "KEY_VALUES_MISMATCH":
        return "the key is not the certificate's"
    if reason in (None, "NO_START_LINE", "NO_CERTIFICATE_OR_CRL_FOUND"):
        return "not a PEM certificate and a key without a password"
    return reason.lower().replace("_", " ")
