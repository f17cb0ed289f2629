"""HTTP download of media from allowed hosts, connected to the address that was checked."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any
from urllib.parse import urljoin

import httpcore
import httpx

from ...base.errors import BadInput, first_line

MAX_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_GLOBAL_UNICAST = IPv6Network("2000::/3")
"""Addresses of the internet: `is_global` is also true of compatible and site-local IPv6 addresses."""
_ELSEWHERE = tuple(
    ip_network(name) for name in ("192.0.0.0/24", "192.88.99.0/24", "2002::/16", "2001::/32")
)
"""Addresses of protocols and relays that Python counts as global; IPv6's may carry private IPv4 ones."""
_HEADERS = [("Accept", "image/*"), ("Accept-Encoding", "identity"), ("User-Agent", "llmopt")]

Address = IPv4Address | IPv6Address


@dataclass(frozen=True, slots=True)
class RemoteMedia:
    """Downloads from the hosts that `domains` names, and from no private address that it does not name.
    Redirects are checked like the first URL. A name is resolved once, and the socket connects to the address
    that was checked."""

    domains: frozenset[str]
    max_bytes: int
    timeout_seconds: float

    def fetch(self, url: str) -> bytes:
        """The bytes at `url`. BadInput: a forbidden host, its error, too many bytes or seconds."""
        deadline = time.monotonic() + self.timeout_seconds
        for _ in range(MAX_REDIRECTS + 1):
            target = self._checked(url)
            try:
                answer = self._get(target, deadline)
            except (httpcore.TimeoutException, TimeoutError) as error:
                raise BadInput(
                    f"{target.host} did not send the image within {self.timeout_seconds:g} s"
                ) from error
            except (OSError, ssl.SSLError, httpcore.NetworkError, httpcore.ProtocolError) as error:
                reason = first_line(error)
                raise BadInput(f"cannot fetch an image from {target.host}: {reason}") from error
            if isinstance(answer, bytes):
                return answer
            url = urljoin(str(target), answer)
        raise BadInput(f"an image's URL has more than {MAX_REDIRECTS} redirects")

    def _checked(self, url: str) -> httpx.URL:
        try:
            target = httpx.URL(url.strip())
        except (httpx.InvalidURL, ValueError) as error:
            raise BadInput(f"an image's URL is not valid: {error}") from error
        if target.scheme not in ("http", "https") or not target.host or target.userinfo:
            raise BadInput("an image's URL is http(s)://host/..., without a user")
        if target.host.rstrip(".") not in {name.lower() for name in self.domains}:
            raise BadInput(
                f"images from {target.host} are not allowed: send a data URL, or start the server with "
                f"--allowed-media-domains {target.host}"
            )
        return target

    def _get(self, url: httpx.URL, deadline: float) -> bytes | str:
        backend = _CheckedBackend(self.domains, deadline)
        with (
            httpcore.ConnectionPool(network_backend=backend, max_connections=1) as pool,
            pool.stream("GET", str(url), headers=_HEADERS) as response,
        ):
            headers = httpx.Headers(response.headers)
            if response.status in _REDIRECTS and "location" in headers:
                return headers["location"]
            if response.status != 200:
                raise BadInput(f"{url.host} answers {response.status} to the request for an image")
            return self._body(response.iter_stream(), headers)

    def _body(self, chunks: Iterable[bytes], headers: httpx.Headers) -> bytes:
        length = headers.get("content-length", "0")
        too_long = BadInput(f"an image has more than {self.max_bytes} bytes (--max-image-bytes)")
        if length.isdecimal() and int(length) > self.max_bytes:
            raise too_long
        body = bytearray()
        for chunk in chunks:
            body += chunk
            if len(body) > self.max_bytes:
                raise too_long
        return bytes(body)


class _CheckedBackend(httpcore.NetworkBackend):
    """Connects to an address that was checked; what is left until the deadline is every timeout."""

    def __init__(self, domains: frozenset[str], deadline: float) -> None:
        self._domains, self._deadline = domains, deadline
        self._backend = httpcore.SyncBackend()

    def connect_tcp(self, host: str, port: int, *_: Any, **__: Any) -> httpcore.NetworkStream:
        address = checked_address(host, port, self._domains)
        stream = self._backend.connect_tcp(str(address), port, timeout=_left(self._deadline))
        return _DeadlineStream(stream, self._deadline)


class _DeadlineStream(httpcore.NetworkStream):
    """A stream whose reads and writes share one deadline: a host that drips bytes does not extend it."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: float) -> None:
        self._stream, self._deadline = stream, deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left(self._deadline))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _left(self._deadline))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        secured = self._stream.start_tls(ssl_context, server_hostname, _left(self._deadline))
        return _DeadlineStream(secured, self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def checked_address(host: str, port: int, domains: frozenset[str]) -> Address:
    """An address to connect to. BadInput: the host is unknown, or one of its addresses is not public."""
    name = host.strip("[]")
    try:
        return _public(ip_address(name), name) if name not in domains else ip_address(name)
    except ValueError:
        pass
    try:
        answers = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise BadInput(f"the host {name} of an image is unknown") from error
    addresses = [ip_address(str(answer[4][0]).partition("%")[0]) for answer in answers]
    for address in addresses:
        _public(address, name)
    return addresses[0]


def _public(address: Address, host: str) -> Address:
    plain = getattr(address, "ipv4_mapped", None) or address
    is_elsewhere = any(plain in network for network in _ELSEWHERE) or (
        plain.version == 6 and plain not in _GLOBAL_UNICAST
    )
    if not plain.is_global or plain.is_multicast or is_elsewhere:
        raise BadInput(f"the host {host} of an image has an address that is not public")
    return address


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
