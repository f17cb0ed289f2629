"""Stored responses, for `previous_response_id`: the newest ones, up to a number of bytes."""

from __future__ import annotations

import json
import uuid
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

    turns: Sequence[dict[str, Any]]
    document: dict[str, Any]
    num_bytes: int


class ResponseStore:
    """Responses by tenant and id, which a client may choose. The oldest are dropped first."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._responses: OrderedDict[tuple[Tenant, str], StoredResponse] = OrderedDict()
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def put(
        self, tenant: Tenant, turns: Sequence[dict[str, Any]], document: dict[str, Any]
    ) -> None:
        """Store a response; one that is larger than the store, as turns with many images may be, is dropped
        in place of all others."""
        size = len(json.dumps([turns, document]))
        place = (tenant, document["id"])
        self._drop(place)
        if size > self._max_bytes:
            return
        self._responses[place] = StoredResponse(turns, document, size)
        self._num_bytes += size
        while self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._responses)))

    def prefix(self, tenant: Tenant, request_id: str) -> str:
        """What a response's id has before the request's: more than `resp_` where that id is taken, for a
        client may send one `X-Request-Id` with several turns."""
        if (tenant, f"resp_{request_id}") not in self._responses:
            return "resp_"
        return f"resp_{uuid.uuid4().hex[:16]}_"

    def get(self, tenant: Tenant, response_id: str) -> StoredResponse:
        """A response; ApiError 404 where there is none of that id, or no longer."""
        stored = self._responses.get((tenant, response_id))
        if stored is None:
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
        self._drop((tenant, response_id))

    def _drop(self, place: tuple[Tenant, str]) -> None:
        if (stored := self._responses.pop(place, None)) is not None:
            self._num_bytes -= stored.num_bytes
