"""TLS: a server with a self-signed certificate, clients' certificates, and bad files."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from llmopt.base.errors import BadInput
from llmopt.cli.main import main
from llmopt.engine.server.protocol.server_options import ServerOptions, TlsOptions

from ....support.certificates import self_signed
from ....support.live_server import RunningServer, make_engine, running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tls")
    for name in ("first", "second", "client"):
        self_signed(made, name)
    return made


@pytest.fixture
def secure(folder: Path) -> Iterator[RunningServer]:
    tls = TlsOptions(folder / "first.pem", folder / "first.key", folder / "client.pem", cert_reqs=1)
    with running(make_engine("stories260K"), ServerOptions(tls=tls)) as it:
        yield it


def trusting(*certificates: Path) -> ssl.SSLContext:
    context = ssl.create_default_context()
    for certificate in certificates:
        context.load_verify_locations(certificate)
    return context


def test_requests_go_over_tls_alone(secure: RunningServer, folder: Path) -> None:
    assert secure.url.startswith("https://")
    context = trusting(folder / "first.pem")
    with httpx.Client(base_url=secure.url, verify=context, trust_env=False, timeout=120) as http:
        answer = http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2})
        assert answer.status_code == 200 and answer.headers["x-request-id"]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{secure.url}/health", trust_env=False, timeout=120)  # nobody vouches for it
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(secure.url.replace("https", "http") + "/health", trust_env=False, timeout=120)


def test_a_client_s_certificate_can_be_required(folder: Path) -> None:
    tls = TlsOptions(folder / "first.pem", folder / "first.key", folder / "client.pem", cert_reqs=2)
    with running(make_engine("stories260K"), ServerOptions(tls=tls)) as server:
        stranger, known = trusting(folder / "first.pem"), trusting(folder / "first.pem")
        known.load_cert_chain(folder / "client.pem", folder / "client.key")
        answer = httpx.get(f"{server.url}/health", verify=known, trust_env=False, timeout=120)
        assert answer.status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/health", verify=stranger, trust_env=False, timeout=120)


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
            options.check_files()
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--ssl-keyfile", "x.key"], "--ssl-keyfile needs --ssl-certfile"),
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
