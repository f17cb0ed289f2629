"""`POST /abort`: end a response from another connection."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel

from .generation import Service


class AbortRequest(BaseModel):
    """The `id` of a response. Clients that cannot know it yet choose its end by `request_id`."""

    id: str


def abort_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/abort")
    async def abort(body: AbortRequest) -> dict[str, object]:
        """End a response in flight; its own client is told so. False where there is none."""
        return {"id": body.id, "aborted": service.loop.abort(body.id)}

    return router
