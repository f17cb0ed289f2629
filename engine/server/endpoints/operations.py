"""Operational endpoints: `/health`, `/ready`, `/metrics`, `/version` and `/v1/models`."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from ...engine import Engine
from ..access.key_ring import KeyRing
from ..loop.loop import EngineLoop
from ..metrics.exposition import Exposition
from ..protocol.errors import Unavailable
from ..text.text import PLAIN_TEMPLATE
from .generation import Service


def operations_router(
    engine: Engine, loop: EngineLoop, service: Service, keys: KeyRing
) -> APIRouter:
    """Health probes, metrics and the model cards of the base model and its LoRA adapters."""
    router = APIRouter()
    exposition = Exposition(engine, loop, service.model_name, keys)

    @router.get("/health")
    async def health() -> dict[str, str]:
        """Liveness: 200 while the engine serves, 503 after it has failed or while a step hangs."""
        if loop.unavailable is not None:
            raise Unavailable(loop.unavailable)
        if (seconds := loop.stalled_seconds) is not None:
            raise Unavailable(f"a step has not ended for {seconds:.0f} s: restart the server")
        return {"status": "ok"}

    @router.get("/ready")
    async def ready() -> dict[str, str]:
        """Readiness: 200 once the engine is warm and while it serves, 503 before and after."""
        if not loop.is_ready:
            raise Unavailable(loop.unavailable or "the engine is warming up")
        return {"status": "ready"}

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(exposition.text(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/version")
    async def show_version() -> dict[str, str]:
        return {"version": version("llmopt")}

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [*_model_cards(engine, service).values()]}

    @router.get("/v1/models/{name:path}")
    async def show_model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model_cards(engine, service)[name]

    return router


def _model_cards(engine: Engine, service: Service) -> dict[str, dict[str, Any]]:
    """Model cards by name: the base model, and its adapters with it as their parent."""
    source = service.text.template_source
    model = {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "llmopt",
        "parent": None,
        "root": engine.folder.name,
        "max_model_len": engine.max_model_len,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "chat_template": {"source": source}
        | ({"template": PLAIN_TEMPLATE} if source == "plain" else {}),
    }
    adapters = {
        name: {**model, "id": name, "parent": service.model_name, "root": folder.name}
        for name, folder in service.adapters.items()
    }
    return {service.model_name: model, **adapters}
