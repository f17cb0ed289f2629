"""The record of a request that generates nothing: its prompt counts for the key's limits and usage."""

from __future__ import annotations

import pytest
from llmopt.engine.server.access.key_ring import KeyRing
from llmopt.engine.server.observability.request_record import RequestRecord
from llmopt.engine.server.protocol.errors import TooMany
from llmopt.engine.server.protocol.server_options import ServerOptions


def test_a_prompt_alone_is_charged() -> None:
    keys = KeyRing(ServerOptions(api_keys=("k",), tpm_per_key=100))
    first, second = (
        RequestRecord("id", "POST", "/v1/embeddings", "", principal=keys.find(b"k"))
        for _ in range(2)
    )
    first.charge(60)
    with pytest.raises(TooMany):
        second.charge(60)
    assert (first.totals().prompt_tokens, second.totals().prompt_tokens) == (60, 0)
    assert first.reservation is not None and second.reservation is None
    first.reservation.settle(60)  # all of it was used
    with pytest.raises(TooMany):
        second.charge(60)
    assert (first.key, RequestRecord("id", "GET", "/", "").key) == ("api-key-1", None)
