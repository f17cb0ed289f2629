"""Downloads of pictures: allowed hosts alone, public addresses, redirects, deadlines and byte limits."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpcore
import pytest
from llmopt.base.errors import BadInput
from llmopt.engine.base.image_input import MediaLimits
from llmopt.engine.multimodal.media import load_image
from llmopt.engine.multimodal.remote import RemoteMedia, checked_address

from ...support.pictures import encoded, picture

PICTURE = encoded(picture())
HERE = frozenset(["127.0.0.1"])


class Host(BaseHTTPRequestHandler):
    """A host of pictures, good and bad."""

    protocol_version = "HTTP/1.1"
    released = threading.Event()

    def do_GET(self) -> None:
        match self.path.split("?")[0]:
            case "/picture.png":
                self._send(200, PICTURE)
            case "/moved":
                self.send_response(302)
                self.send_header("Location", self.path.partition("?")[2] or "/picture.png")
                self.send_header("Content-Length", "0")
                self.end_headers()
            case "/drip":
                self.send_response(200)
                self.end_headers()
                while not self.released.wait(0.05):
                    self.wfile.write(b"x")
            case "/long":
                self.send_response(200)
                self.send_header("Content-Length", "900000000")
                self.end_headers()
            case "/endless":
                self.send_response(200)
                self.end_headers()
                while not self.released.is_set():
                    self.wfile.write(bytes(1 << 16))
            case _:
                self._send(404, b"")

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Host)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    Host.released.set()
    server.shutdown()
    server.server_close()


def test_a_named_host_gives_pictures_also_behind_a_redirect(host: str) -> None:
    limits = MediaLimits(allowed_domains=HERE)
    for path in ("/picture.png", "/moved", f"/moved?{host}/moved"):
        assert load_image(host + path, limits).tobytes() == picture().tobytes()


def test_no_host_is_allowed_by_default(host: str) -> None:
    with pytest.raises(BadInput, match=r"--allowed-media-domains 127\.0\.0\.1"):
        load_image(f"{host}/picture.png", MediaLimits())


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/nothing", "answers 404"),
        ("/long", "more than 65536 bytes"),
        ("/endless", "more than 65536 bytes"),
        ("/drip", "did not send the image within 0.4 s"),
        ("/moved?http://10.0.0.1/picture.png", "images from 10.0.0.1 are not allowed"),
        ("/moved?http://localhost/picture.png", "images from localhost are not allowed"),
        ("/moved?file:///etc/passwd", "http"),
        ("/moved?/moved?/moved?/moved", "redirects"),
    ],
)
def test_hosts_that_misbehave_are_left(host: str, path: str, reason: str) -> None:
    if path.endswith("/moved"):
        path = f"/moved?{host}/moved?{host}/moved?{host}/moved?{host}/moved"
    with pytest.raises(BadInput, match=reason) as refusal:
        RemoteMedia(HERE, 1 << 16, 0.4 if path == "/drip" else 120).fetch(host + path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "169.254.169.254",
        "192.168.0.1",
        "100.64.0.1",
        "192.0.0.8",
        "192.88.99.1",
        "0.0.0.0",
        "224.0.0.1",
        "::1",
        "fe80::1",
        "fd00::1",
        "::ffff:127.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::1",
        "::127.0.0.1",
        "::ffff:0:7f00:1",
        "fec0::1",
    ],
)
def test_names_of_private_addresses_are_refused(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(*_: object, **__: object) -> list[tuple[object, ...]]:
        return [(0, 0, 0, "", (known, 80)) for known in ("93.184.216.34", address)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(BadInput, match="not public"):
        RemoteMedia(frozenset(["pictures.test"]), 1 << 16, 1.0).fetch("http://pictures.test/a.png")


def test_other_spellings_of_loopback_are_refused() -> None:
    for name in ("2130706433", "0x7f.1", "127.1", "localhost"):
        with pytest.raises(BadInput, match=r"not public|unknown"):
            checked_address(name, 80, frozenset([name]) - HERE)


def test_the_socket_connects_to_the_address_that_was_checked(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second resolution would lead to another address: there is none."""
    answers = iter(["93.184.216.34", "127.0.0.1"])
    asked: list[str] = []
    connected: list[str] = []
    port = int(host.rpartition(":")[2])
    connect = httpcore.SyncBackend.connect_tcp

    def resolve(name: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        asked.append(name)
        return [(0, 0, 0, "", (next(answers), 80))]

    def to_this_host(
        self: httpcore.SyncBackend, address: str, port: int, timeout: float
    ) -> httpcore.NetworkStream:
        connected.append(address)
        monkeypatch.undo()
        return connect(self, "127.0.0.1", port, timeout)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(httpcore.SyncBackend, "connect_tcp", to_this_host)
    media = RemoteMedia(frozenset(["pictures.test"]), 1 << 16, 5.0)
    assert media.fetch(f"http://pictures.test:{port}/picture.png") == PICTURE
    assert asked == ["pictures.test"] and connected == ["93.184.216.34"]


def test_a_silent_host_ends_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(BadInput, match="did not send"):
            RemoteMedia(HERE, 1 << 16, 0.2).fetch(f"http://127.0.0.1:{port}/a.png")


@pytest.mark.parametrize(
    "url",
    ["http://user@127.0.0.1/", "http:///a.png", "http://", "http://[::1/", "http://127.0.0.1:x/"],
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(BadInput):
        RemoteMedia(HERE, 1 << 16, 1.0).fetch(url)
