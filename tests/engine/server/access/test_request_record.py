"""The record of a request: what it reserves of its key's limits."""

from __future__ import annotations

import pytest
from llmopt.engine.server.protocol.errors import TooMany
from llmopt.engine.server.protocol.server_options import ServerOptions
from llmopt.engine.server.requests.keys import KeyRing
from llmopt.engine.server.requests.request_record import RequestRecord


def test_what_a_request_reserves_others_wait_for() -> None:
    keys = KeyRing(ServerOptions(api_keys=("k",), tpm_per_key=100))
    first, second = (
        RequestRecord("id", "POST", "/v1/embeddings", "", principal=keys.find(b"k"))
        for _ in range(2)
    )
    first.reserve(60, at_least=60)
    with pytest.raises(TooMany):
        second.reserve(60, at_least=60)
    assert first.reservation is not None and second.reservation is None
    first.reservation.settle(60)  # all of it was used
    with pytest.raises(TooMany):
        second.reserve(60, at_least=60)
    assert (first.key, RequestRecord("id", "GET", "/", "").key) == ("api-key-1", None)
