"""Hot reload of files that change, and on SIGHUP; TLS contexts of certificates that are renewed.

A bad new file leaves the old one in force.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....quant.base.errors import BadInput
from ..protocol.server_options import TlsOptions

_log = logging.getLogger(__name__)

INTERVAL_SECONDS = 2.0
"""How often the files are looked at: a few `stat` calls. Volumes of Kubernetes swap symbolic links, which
notifications of the files would miss."""


@dataclass(slots=True)
class Reloadable:
    """Something that is made of files.

    Attributes:
        name: the option and its file, for log lines.
        load: reads and validates the files, on a worker thread; raises `BadInput`.
        apply: puts the result in force, on the event loop.
    """

    name: str
    paths: Sequence[Path]
    load: Callable[[], Any]
    apply: Callable[[Any], None]
    seen: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.seen = self.signature()

    def signature(self) -> list[Any]:
        """Times, sizes and inodes of the files, which change with them."""
        return [_signature(path) for path in self.paths]

    async def reload(self) -> None:
        """Read the files; one log line says how that went."""
        self.seen = self.signature()  # before they are read: a change meanwhile is seen next time
        try:
            value = await asyncio.to_thread(self.load)
            self.apply(value)
        except (BadInput, OSError) as error:
            _log.error("%s; the server keeps what it had", error)
        except Exception:
            _log.exception("%s: not read; the server keeps what it had", self.name)
        else:
            _log.info("%s: read again", self.name)


class Reloader:
    """Watches the files of some `Reloadable`s, and reloads each of them when one of its files changes."""

    def __init__(self) -> None:
        self._items: list[Reloadable] = []
        self._is_asked = asyncio.Event()

    @property
    def has_files(self) -> bool:
        return bool(self._items)

    def add(self, item: Reloadable) -> None:
        self._items.append(item)

    def reload_all(self) -> None:
        """Reload everything now; must be called on the event loop."""
        self._is_asked.set()

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_asked.wait(), INTERVAL_SECONDS)
            is_asked = self._is_asked.is_set()
            self._is_asked.clear()
            for item in self._items:
                if is_asked or item.signature() != item.seen:
                    await item.reload()


def _signature(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


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
