"""Request ids: the client's or a random one, in each response and at the start of the engine's."""

from __future__ import annotations

import pytest

from ....support.live_server import RunningServer

BODY = {"prompt": "Once", "max_tokens": 2}


def test_a_client_s_id_comes_back_and_is_the_response_s(server: RunningServer) -> None:
    with server.http(headers={"X-Request-Id": "job-7:a.b_c"}) as http:
        whole = http.post("/v1/completions", json=BODY)
        assert whole.headers.get_list("x-request-id") == ["job-7:a.b_c"]
        assert whole.json()["id"] == "cmpl-job-7:a.b_c"
        with http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as stream:
            assert stream.headers["x-request-id"] == "job-7:a.b_c"
            assert '"cmpl-job-7:a.b_c"' in stream.read().decode()
        named = http.post("/v1/completions", json={**BODY, "request_id": "mine"})
        assert named.json()["id"] == "cmpl-mine"
        assert named.headers["x-request-id"] == "job-7:a.b_c"


def test_a_request_without_one_gets_a_random_one(server: RunningServer) -> None:
    with server.http() as http:
        first, second = (http.post("/v1/completions", json=BODY) for _ in range(2))
    ids = [first.headers["x-request-id"], second.headers["x-request-id"]]
    assert ids[0] != ids[1] and all(len(one) == 32 for one in ids)
    assert first.json()["id"] == f"cmpl-{ids[0]}"


@pytest.mark.parametrize(
    "bad", ["", "a b", "x" * 129, "a/b", "ü", "a\tb", 'a"b'], ids=lambda bad: bad[:4].encode().hex()
)
def test_an_id_that_is_not_well_formed_is_replaced(server: RunningServer, bad: str) -> None:
    with server.http() as http:
        headers = [(b"x-request-id", bad.encode())]
        given = http.get("/health", headers=headers).headers["x-request-id"]
    assert len(given) == 32 and given.isalnum()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200),
        ("GET", "/nowhere", 404),
        ("PUT", "/v1/completions", 405),
        ("POST", "/v1/completions", 400),
        ("POST", "/v1/messages", 400),
    ],
)
def test_errors_have_an_id_too(server: RunningServer, method: str, path: str, status: int) -> None:
    with server.http() as http:
        answer = http.request(method, path, content=b"{", headers={"X-Request-Id": "e"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (status, "e")


def test_a_refusal_of_the_key_has_an_id(protected_server: RunningServer) -> None:
    with protected_server.http() as http:
        refused = http.get("/v1/models")
    assert refused.status_code == 401 and len(refused.headers["x-request-id"]) == 32


def test_openai_s_client_reads_the_id(server: RunningServer) -> None:
    with server.openai() as client:
        answer = client.completions.create(model="tiny", prompt="Hi", max_tokens=1)
    assert answer._request_id and answer.id == f"cmpl-{answer._request_id}"
