"""The FastAPI application around one engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from ..engine import Engine
from .endpoints.generation import Service
from .endpoints.routes import model_router, open_service
from .loop.loop import EngineLoop
from .metrics.exposition import Exposition
from .middleware.guard import Guard
from .page.page import page_router
from .protocol.errors import Unavailable, install
from .protocol.server_options import ServerOptions
from .text.text import PLAIN_TEMPLATE, Tokenization


def create_app(
    engine: Engine,
    *,
    model_name: str,
    options: ServerOptions | None = None,
    chat_template: str | None = None,
    tool_call_parser: str | None = None,
) -> FastAPI:
    """An OpenAI-compatible application that serves `engine` as `model_name`.

    `chat_template` takes the place of the model's own; `tool_call_parser` names the format in which the
    model calls tools, where its template does not show it.

    It starts the engine's thread when it starts up; from then on nothing else may touch `engine`.
    `app.state.loop` is its `EngineLoop`, `app.state.service` what the endpoints share.
    """
    options = options or ServerOptions()
    loop = EngineLoop(engine, options)
    service = open_service(engine, loop, model_name, chat_template, tool_call_parser)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loop.start()
        yield
        loop.stop()
        service.close()

    # Nothing leaves this machine: FastAPI's interactive pages load scripts from elsewhere, and its
    # telemetry could be switched on by an environment variable.
    app = FastAPI(
        title="llmopt",
        version=version("llmopt"),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        telemetry={"auto_configure": False, "tracing": False, "metrics": False, "logs": False},
    )
    app.state.loop, app.state.service, app.state.options = loop, service, options
    install(app)
    app.add_middleware(Guard, options=options, count=loop.metrics.responses)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    app.include_router(model_router(service, engine))
    app.include_router(page_router(loop))
    cards = _model_cards(engine, service)
    exposition = Exposition(engine, loop, model_name)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """200 while the engine serves, 503 after it has failed."""
        if loop.unavailable is not None:
            raise Unavailable(loop.unavailable)
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        """200 once the engine is warm and while it serves, 503 before and after."""
        if not loop.is_ready:
            raise Unavailable(loop.unavailable or "the engine is warming up")
        return {"status": "ready"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(exposition.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def show_version() -> dict[str, str]:
        return {"version": app.version}

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [*cards.values()]}

    @app.get("/v1/models/{name:path}")
    async def show_model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return cards[name]

    return app


def describe_template(text: Tokenization) -> str:
    """Which chat template is in use, in words."""
    return {
        "file": "the given file's",
        "model": "the model's own",
        "plain": "plain, because the model has none",
    }[text.template_source]


def _model_cards(engine: Engine, service: Service) -> dict[str, dict[str, Any]]:
    """The model and, with it as their parent, its adapters, by name."""
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
        for name, folder in engine.config.loras.items()
    }
    return {service.model_name: model, **adapters}
