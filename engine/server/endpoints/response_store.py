"""Stored responses, for `previous_response_id`: the newest ones, up to a number of bytes."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..middleware.tenant import Tenant
from ..protocol.errors import ApiError

MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the conversation up to it without instructions."""

    tenant: Tenant
    turns: Sequence[dict[str, Any]]
    document: dict[str, Any]
    num_bytes: int


class ResponseStore:
    """Responses by id. The oldest are dropped first; each tenant sees its own."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def put(
        self, tenant: Tenant, turns: Sequence[dict[str, Any]], document: dict[str, Any]
    ) -> None:
        """Store a response."""
        size = len(json.dumps([turns, document]))
        self._drop(document["id"])
        self._responses[document["id"]] = StoredResponse(tenant, turns, document, size)
        self._num_bytes += size
        while self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._responses)))

    def get(self, tenant: Tenant, response_id: str) -> StoredResponse:
        """A response; ApiError 404 where there is none of that id, or no longer."""
        stored = self._responses.get(response_id)
        if stored is None or stored.tenant != tenant:
            raise ApiError(
                404,
                f"no response {response_id!r}: it was not stored, or is no longer",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return stored

    def delete(self, tenant: Tenant, response_id: str) -> None:
        """Drop a response; raises as `get`."""
        self.get(tenant, response_id)
        self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        if (stored := self._responses.pop(response_id, None)) is not None:
            self._num_bytes -= stored.num_bytes
