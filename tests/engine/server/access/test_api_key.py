"""API keys: whose a key is, and who is an admin."""

from __future__ import annotations

import pytest
from llmopt.bench.load.address import Address
from llmopt.bench.options.options import BenchOptions
from llmopt.engine.server.protocol.server_options import ServerOptions
from llmopt.engine.server.requests.request_record import KeyRing

from ....support.live_server import make_engine, running


def clients(options: ServerOptions, *secrets: bytes) -> list[tuple[int, str | None, bool] | None]:
    """Number, name and right of the client of each key."""
    ring = KeyRing(options)
    found = [ring.find(secret) for secret in secrets]
    return [c and (c.number, c.key_name, c.is_admin) for c in found]


def test_without_keys_everybody_is_the_same_admin() -> None:
    assert clients(ServerOptions(), b"", b"x") == [(0, None, True)] * 2


def test_several_keys_are_several_clients() -> None:
    options = ServerOptions(api_keys=("k1", "k2"))
    expected = [(0, "api-key-1", True), (1, "api-key-2", True), None, None]
    assert clients(options, b"k1", b"k2", b"k", b"") == expected


def test_only_the_admin_s_key_is_an_admin() -> None:
    apart = ServerOptions(api_keys=("k1",), admin_api_key="root")
    assert clients(apart, b"k1", b"root") == [(0, "api-key-1", False), (1, "admin", True)]
    listed = ServerOptions(api_keys=("k1", "k2"), admin_api_key="k2")
    assert clients(listed, b"k1", b"k2") == [(0, "api-key-1", False), (1, "api-key-2", True)]


def test_a_last_line_feed_is_no_part_of_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ServerOptions(api_keys=("k1\r\n",), admin_api_key="root\n")
    assert clients(options, b"k1", b"root") == [(0, "api-key-1", False), (1, "admin", True)]
    there = {"base_url": "http://127.0.0.1:9"}
    header = ("Authorization", "Bearer k1")
    assert header in Address.of(BenchOptions(**there, api_key="k1\n")).headers
    monkeypatch.setenv("OPENAI_API_KEY", "k1\r\n")
    assert header in Address.of(BenchOptions(**there)).headers


def test_only_an_admin_sees_metrics_and_the_engine() -> None:
    options = ServerOptions(api_keys=("k-few",), admin_api_key="k-root")
    with running(make_engine("stories260K"), options) as server:
        with server.http(headers={"x-api-key": "k-few"}) as http:
            for path in ("/metrics", "/engine/state"):
                refused = http.get(path)
                assert refused.status_code == 403
                assert refused.json()["error"]["code"] == "not_an_admin"
            assert http.get("/version").status_code == 200
        with server.http(headers={"x-api-key": "k-root"}) as http:
            assert http.get("/metrics").status_code == 200
