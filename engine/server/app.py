"""The FastAPI application around one engine."""

from __future__ import annotations

import hmac
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ..engine import Engine
from .chat import chat_router
from .completions import completions_router
from .errors import ApiError, Unavailable, error_response, install
from .generation import Service
from .loop import EngineLoop
from .text import PLAIN_TEMPLATE, Tokenization


class ApiKeyGuard:
    """Lets only requests with `Authorization: Bearer KEY` through; `/health` is open, for probes."""

    OPEN_PATHS = frozenset({"/health"})

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self.OPEN_PATHS:
            given = Headers(scope=scope).get("authorization", "").encode()
            if not hmac.compare_digest(given, self._expected):
                refusal = ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
                response = error_response(refusal, {"WWW-Authenticate": "Bearer"})
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


def create_app(engine: Engine, *, model_name: str, api_key: str | None = None) -> FastAPI:
    """An OpenAI-compatible application that serves `engine` as `model_name`.

    It starts the engine's thread when it starts up; from then on nothing else may touch `engine`.
    `app.state.loop` is its `EngineLoop`, `app.state.service` what the endpoints share.
    """
    loop = EngineLoop(engine)
    service = Service(
        loop,
        Tokenization(engine.tokenizer),
        model_name,
        adapters=frozenset(engine.config.loras),
        created=int(time.time()),
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loop.start()
        yield
        loop.stop()
        service.text.close()

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
    app.state.loop, app.state.service = loop, service
    install(app)
    if api_key is not None:
        app.add_middleware(ApiKeyGuard, key=api_key)
    app.include_router(completions_router(service))
    app.include_router(chat_router(service))
    cards = _model_cards(engine, service)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """200 while the engine serves, 503 after it has failed."""
        if loop.unavailable is not None:
            raise Unavailable(loop.unavailable)
        return {"status": "ok"}

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
    return "the model's own" if text.has_own_template else "plain, because the model has none"


def _model_cards(engine: Engine, service: Service) -> dict[str, dict[str, Any]]:
    """The model and, with it as their parent, its adapters, by name."""
    own = service.text.has_own_template
    model = {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "llmopt",
        "parent": None,
        "root": engine.folder.name,
        "max_model_len": engine.max_model_len,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "chat_template": {"source": "model" if own else "plain"}
        | ({} if own else {"template": PLAIN_TEMPLATE}),
    }
    adapters = {
        name: {**model, "id": name, "parent": service.model_name, "root": folder.name}
        for name, folder in engine.config.loras.items()
    }
    return {service.model_name: model, **adapters}
