"""The FastAPI application around one engine: shared state, middleware, routers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from ...base.version import VERSION
from ..core.engine import Engine
from .endpoints.capabilities import Constrainer, PromptImages, default_sampling, pooling_tasks
from .endpoints.completions import add_completions
from .endpoints.messages import add_messages
from .endpoints.ollama import ollama_router
from .endpoints.operations import add_adapters, add_operations, add_tokens
from .endpoints.page import add_page
from .endpoints.pooled import add_pooling
from .endpoints.responses import add_responses
from .endpoints.service import Service
from .endpoints.tokenization import Tokenization
from .parsing.formats import reasoning_format, tool_format
from .protocol.errors import install
from .protocol.server_options import ServerOptions
from .requests.loop import EngineLoop
from .requests.middleware import BodyRoute, HeadMiddleware, RequestMiddleware
from .requests.observe import ObservingMiddleware
from .requests.request_record import KeyRing

EXPOSED_HEADERS = ("x-request-id", "retry-after", "x-ignored-fields")
"""Response headers that a page of an allowed origin may read."""


def create_app(
    engine: Engine,
    *,
    model_name: str,
    options: ServerOptions | None = None,
    chat_template: str | None = None,
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
    pooling_type: str | None = None,
) -> FastAPI:
    """An OpenAI-compatible application that serves `engine` as `model_name`.

    `chat_template` overrides the model's; `tool_call_parser` and `reasoning_parser` name the formats of the
    model's output where they cannot be detected from the template; `pooling_type` is how a checkpoint without
    a pooling config embeds.

    The application's lifespan starts the engine thread; from then on nothing else may touch `engine`.
    `app.state.loop` is the `EngineLoop`, `app.state.service` the endpoints' shared `Service`. Raises
    `BadInput`: an unknown parser.
    """
    options = options or ServerOptions()
    loop = EngineLoop(engine, options)
    reason = engine.images.reason.replace(str(engine.folder), model_name)
    images = PromptImages(engine.images, options.media, reason, engine.max_model_len)
    service = Service(
        loop,
        Tokenization(
            engine.tokenizer,
            engine.eos_token_ids,
            engine.max_model_len,
            chat_template,
            None if tool_call_parser is None else tool_format(tool_call_parser),
            None if reasoning_parser is None else reasoning_format(reasoning_parser),
            takes_images=images.are_taken,
        ),
        Constrainer(engine.tokenizer, engine.vocab_size, engine.eos_token_ids),
        model_name,
        adapters=dict(engine.config.loras),
        created=int(time.time()),
        max_model_len=engine.scheduler.longest_sequence,
        images=images,
        script=options.script,
        pooling=pooling_tasks(engine, model_name, pooling_type),
        default_sampling=default_sampling(engine.folder),
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loop.start()
        try:
            yield
        finally:
            loop.stop()
            service.close()

    # No outbound requests: FastAPI's interactive docs load scripts from a CDN, and its telemetry could
    # be enabled by an environment variable.
    app = FastAPI(
        title="llmopt",
        version=VERSION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        telemetry={"auto_configure": False, "tracing": False, "metrics": False, "logs": False},
    )
    app.state.loop, app.state.service, app.state.options = loop, service, options
    app.router.route_class = BodyRoute
    app.add_middleware(HeadMiddleware)
    install(app)
    app.add_middleware(
        RequestMiddleware,
        options=options,
        keys=KeyRing(options),
        max_model_len=engine.max_model_len,
    )
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    app.add_middleware(ObservingMiddleware, count=loop.metrics.responses)
    for add in (add_completions, add_responses, add_messages, add_pooling):
        add(app, service)
    add_tokens(app, service, engine.vocab_size)
    if options.lora_folders:
        add_adapters(app, service, engine, options)
    app.include_router(ollama_router(service, engine))
    add_page(app, loop, options)
    add_operations(app, engine, loop, service)
    return app


def describe_template(text: Tokenization) -> str:
    """Description of the chat template in use and of the parsers, for the start-up message."""
    source = {
        "file": "the given file's",
        "model": "the model's own",
        "plain": "plain, because the model has none",
    }[text.template_source]
    parsers = [
        f"{what}: {form.name}"
        for what, form in (("tool calls", text.tool_format), ("reasoning", text.reasoning_format))
        if form is not None
    ]
    return "; ".join([source, *parsers])
