"""TLS: a server with a self-signed certificate, its renewal, clients' certificates, and bad files."""

from __future__ import annotations

import os
import re
import shutil
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from llmopt.cli.main import main
from llmopt.engine.server.protocol.server_options import ServerOptions, TlsOptions
from llmopt.engine.server.requests.reload import open_context
from llmopt.quant.base.errors import BadInput

from ....support.certificates import self_signed
from ....support.live_server import RunningServer, eventually, make_engine, running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tls")
    for name in ("first", "second", "client"):
        self_signed(made, name)
    return made


@pytest.fixture
def files(folder: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Certificate and key that a test may replace."""
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    shutil.copy(folder / "first.pem", certificate)
    shutil.copy(folder / "first.key", key)
    return certificate, key


@pytest.fixture
def secure(files: tuple[Path, Path], folder: Path) -> Iterator[RunningServer]:
    tls = TlsOptions(*files, folder / "client.pem", cert_reqs=1, is_refreshed=True)
    with running(make_engine("stories260K"), ServerOptions(tls=tls)) as it:
        yield it


def trusting(*certificates: Path) -> ssl.SSLContext:
    context = ssl.create_default_context()
    for certificate in certificates:
        context.load_verify_locations(certificate)
    return context


def common_name(server: RunningServer, context: ssl.SSLContext) -> str:
    """The name in the certificate that a new connection gets."""
    address = urlsplit(server.url)
    with (
        socket.create_connection((address.hostname or "", address.port or 0), 10) as plug,
        context.wrap_socket(plug, server_hostname=address.hostname) as wrapped,
    ):
        subject: Any = (wrapped.getpeercert() or {})["subject"]
        return subject[0][0][1]


def test_requests_go_over_tls_alone(secure: RunningServer, folder: Path) -> None:
    assert secure.url.startswith("https://")
    context = trusting(folder / "first.pem")
    with httpx.Client(base_url=secure.url, verify=context, trust_env=False, timeout=30) as http:
        answer = http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2})
        assert answer.status_code == 200 and answer.headers["x-request-id"]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{secure.url}/health", trust_env=False, timeout=30)  # nobody vouches for it
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(secure.url.replace("https", "http") + "/health", trust_env=False, timeout=30)


def test_renewed_files_are_read_again(
    secure: RunningServer, files: tuple[Path, Path], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = files
    context = trusting(folder / "first.pem", folder / "second.pem")
    assert common_name(secure, context) == "first"

    def wait_for(*messages: str) -> None:
        secure.event_loop.call_soon_threadsafe(secure.app.state.reloader.reload_all)
        eventually(lambda: all(any(text in line for line in caplog.messages) for text in messages))

    with caplog.at_level("INFO", logger="llmopt"):
        shutil.copy(folder / "second.pem", certificate)  # the key is still the first one's
        wait_for("the key is not the certificate's; the server keeps what it had")
        assert common_name(secure, context) == "first"
        shutil.copy(folder / "second.key", key)
        wait_for("read again")
    assert common_name(secure, context) == "second"


def test_a_client_s_certificate_can_be_required(
    files: tuple[Path, Path], folder: Path, tmp_path: Path
) -> None:
    tls = TlsOptions(*files, folder / "client.pem", cert_reqs=2)
    with running(make_engine("stories260K"), ServerOptions(tls=tls)) as server:
        stranger, known = trusting(folder / "first.pem"), trusting(folder / "first.pem")
        known.load_cert_chain(folder / "client.pem", folder / "client.key")
        answer = httpx.get(f"{server.url}/health", verify=known, trust_env=False, timeout=30)
        assert answer.status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/health", verify=stranger, trust_env=False, timeout=30)


def test_bad_files_are_one_line(folder: Path, tmp_path: Path) -> None:
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("no certificate")
    first, key = folder / "first.pem", folder / "first.key"
    for options, named in (
        (TlsOptions(tmp_path / "none.pem", key), "none.pem: No such file"),
        (TlsOptions(nothing, key), "not a PEM certificate"),
        (TlsOptions(first, nothing), "--ssl-keyfile"),
        (TlsOptions(first, folder / "second.key"), "the key is not the certificate's"),
        (TlsOptions(first), "--ssl-certfile"),
        (TlsOptions(first, key, nothing), "--ssl-ca-certs"),
    ):
        with pytest.raises(BadInput, match=named) as refused:
            open_context(options)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--ssl-keyfile", "x.key"], "--ssl-keyfile needs --ssl-certfile"),
        (["--enable-ssl-refresh"], "--enable-ssl-refresh needs --ssl-certfile"),
        (["--ssl-certfile", os.devnull, "--ssl-cert-reqs", "2"], "needs --ssl-ca-certs"),
        (["--ssl-certfile", os.devnull, "--ssl-cert-reqs", "3"], "0 \\(none\\)"),
        (["--ssl-certfile", os.devnull], "--ssl-certfile"),
    ],
)
def test_bad_options_are_one_line(
    words: list[str], named: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["serve-local", "--port", "0", *words])
    out, err = capfd.readouterr()
    assert (stopped.value.code, out, err.count("\n")) == (2, "", 1)
    assert re.search(named, err)
