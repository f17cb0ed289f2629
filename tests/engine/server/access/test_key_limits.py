"""Key file, limits and usage on a running server: what clients get, and what the metrics say of each key."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from llmopt.engine.server.protocol.server_options import ServerOptions
from llmopt.engine.server.requests import keys
from llmopt.engine.server.requests.limits import RateLimits
from prometheus_client.parser import text_string_to_metric_families

from ....support.live_server import RunningServer, eventually, make_engine, running, slow_steps

KEYS = """
keys:
  - {name: root, key: k-root, admin: true}
  - {name: few, key: k-few, rpm: 2}
  - {name: short, key: k-short, tpm: 100}
"""
BODY = {"prompt": [5] * 10, "max_tokens": 4, "ignore_eos": True}


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    path.chmod(0o600)
    return path


@pytest.fixture
def keyed(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    """Stop the minutes: what a limit has left is not a matter of this machine's speed."""
    monkeypatch.setattr(keys, "RateLimits", lambda: RateLimits(clock=lambda: 0.0))
    with running(make_engine("stories260K"), ServerOptions(api_key_file=key_file)) as it:
        yield it


def post(
    server: RunningServer, key: str, path: str = "/v1/completions", **fields
) -> httpx.Response:
    with server.http(headers={"Authorization": f"Bearer k-{key}"}) as http:
        return http.post(path, json={**BODY, **fields})


def usage(server: RunningServer) -> dict[tuple[str, ...], float]:
    """{(metric, key, limit): value} of the metrics by key."""
    with server.http(headers={"x-api-key": "k-root"}) as http:
        text = http.get("/metrics").text
    assert "k-root" not in text and "k-few" not in text
    return {
        (sample.name, sample.labels["key"], sample.labels.get("limit", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("llmopt_api_key_") and sample.name.endswith("_total")
    }


def test_requests_per_minute_with_openai_s_headers(keyed: RunningServer) -> None:
    first, second, refused = (post(keyed, "few") for _ in range(3))
    assert (first.status_code, second.status_code, refused.status_code) == (200, 200, 429)
    for left, answer in (("1", first), ("0", second), ("0", refused)):
        assert answer.headers["x-ratelimit-limit-requests"] == "2"
        assert answer.headers["x-ratelimit-remaining-requests"] == left
        assert answer.headers["x-ratelimit-reset-requests"].endswith("s")
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert post(keyed, "few", "/v1/messages").json()["error"]["type"] == "rate_limit_error"
    assert "x-ratelimit-limit-requests" not in post(keyed, "root").headers
    with keyed.http(headers={"x-api-key": "k-few"}) as http:
        assert http.get("/v1/models").status_code == 200  # reading takes no request


def test_tokens_per_minute_are_reserved_and_corrected(keyed: RunningServer) -> None:
    def left(answer: httpx.Response) -> int:
        return int(answer.headers["x-ratelimit-remaining-tokens"])

    with slow_steps(keyed, 0.01):
        first = post(keyed, "short", max_tokens=60, stop_token_ids=[*range(512)], ignore_eos=False)
        assert first.status_code == 200 and first.json()["usage"]["total_tokens"] <= 12
        # It took 10 + 60 of 100 when it began, and gave back nearly all of them at its end.
        assert left(first) == 30
        second = post(keyed, "short", max_tokens=60)
        assert second.status_code == 200 and 15 <= left(second) <= 32
        refused = post(keyed, "short", max_tokens=60)  # 70 of the second are used
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert "x-should-retry" not in refused.headers
    never = post(keyed, "short", max_tokens=91)
    assert never.status_code == 429 and never.headers["x-should-retry"] == "false"
    bad = post(keyed, "short", max_tokens=-1)
    assert bad.status_code == 400
    entries = usage(keyed)
    assert entries["llmopt_api_key_refused_requests_total", "short", "tokens"] == 2


def test_usage_is_counted_by_the_name_of_the_key(keyed: RunningServer) -> None:
    for name in ("root", "root", "few"):
        assert post(keyed, name).status_code == 200
    with keyed.http() as http:
        assert http.post("/v1/completions", json=BODY).status_code == 401
    # Counted at its end.
    eventually(lambda: usage(keyed)["llmopt_api_key_requests_total", "few", ""] >= 1)
    entries = usage(keyed)
    assert {key for _, key, _ in entries} == {"root", "few", "short"}
    assert entries["llmopt_api_key_prompt_tokens_total", "root", ""] == 20
    assert entries["llmopt_api_key_generation_tokens_total", "root", ""] == 8
    assert entries["llmopt_api_key_generation_tokens_total", "few", ""] == 4
    assert entries["llmopt_api_key_requests_total", "short", ""] == 0


def test_only_an_admin_sees_metrics_and_the_engine(keyed: RunningServer) -> None:
    with keyed.http(headers={"x-api-key": "k-few"}) as http:
        for path in ("/metrics", "/engine/state"):
            refused = http.get(path)
            assert refused.status_code == 403
            assert refused.json()["error"]["code"] == "not_an_admin"
        assert http.get("/version").status_code == 200


def test_a_changed_file_is_in_force_and_a_bad_one_is_not(
    keyed: RunningServer, key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def status(key: str) -> int:
        with keyed.http(headers={"x-api-key": f"k-{key}"}) as http:
            return http.get("/v1/models").status_code

    def wait(key: str, expected: int) -> None:
        eventually(lambda: status(key) == expected)

    assert (status("root"), status("new")) == (200, 401)
    key_file.write_text("keys: [{name: new, key: k-new}]")
    wait("new", 200)  # by its own look at the file
    assert status("root") == 401
    key_file.write_text("keys: [{name: new")
    os.utime(key_file, ns=(1, 1))
    reloader = keyed.app.state.reloader
    keyed.event_loop.call_soon_threadsafe(reloader.reload_all)
    eventually(lambda: any("keeps what it had" in message for message in caplog.messages))
    assert status("new") == 200
    key_file.write_text("keys: [{name: root, key: k-root}]")
    keyed.event_loop.call_soon_threadsafe(reloader.reload_all)
    wait("root", 200)
    assert status("new") == 401
