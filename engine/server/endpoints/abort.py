"""`POST /abort`: abort a request from another connection."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel

from ..middleware.tenant import tenant_of
from .generation import Service


class AbortRequest(BaseModel):
    """The `id` of a response. A client that sets `request_id` knows it before the response begins."""

    id: str


def abort_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/abort")
    async def abort(body: AbortRequest, request: Request) -> dict[str, object]:
        """Abort a response in flight that came with the same API key; its client receives an error. False if
        there is none with that id."""
        return {"id": body.id, "aborted": service.loop.abort(body.id, tenant_of(request).key)}

    return router
