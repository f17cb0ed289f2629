"""Router of the model endpoints: generation, embeddings, tokenization, abort."""

from __future__ import annotations

import time

from fastapi import APIRouter

from ...engine import Engine
from ...multimodal.media import MediaLimits
from ..loop.loop import EngineLoop
from ..parsing.formats import tool_format
from ..parsing.reasoning import reasoning_format
from ..protocol.scripted_output import ScriptedText
from ..protocol.structure import Constrainer
from ..text.images import PromptImages
from ..text.pooling_tasks import pooling_tasks
from ..text.text import Tokenization
from .abort import abort_router
from .chat import chat_router
from .completions import completions_router
from .generation import Service
from .messages import messages_router
from .responses import responses_router
from .tokens import tokens_router


def open_service(
    engine: Engine,
    loop: EngineLoop,
    model_name: str,
    chat_template: str | None = None,
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
    script: tuple[ScriptedText, ...] = (),
    pooling_type: str | None = None,
    media: MediaLimits | None = None,
) -> Service:
    """Create the state shared by the endpoints.

    Raises:
        BadInput: an unknown parser.
    """
    tools = None if tool_call_parser is None else tool_format(tool_call_parser)
    images = PromptImages(
        engine.images,
        media or MediaLimits(),
        engine.images.reason.replace(str(engine.folder), model_name),
        engine.max_model_len,
    )
    reasoning = None if reasoning_parser is None else reasoning_format(reasoning_parser)
    return Service(
        loop,
        Tokenization(
            engine.tokenizer,
            engine.eos_token_ids,
            engine.max_model_len,
            chat_template,
            tools,
            reasoning,
            takes_images=images.are_taken,
        ),
        Constrainer(engine.tokenizer, engine.vocab_size, engine.eos_token_ids),
        model_name,
        adapters=dict(engine.config.loras),
        created=int(time.time()),
        max_model_len=engine.max_model_len,
        images=images,
        script=script,
        pooling=pooling_tasks(engine, model_name, pooling_type),
    )


def model_router(service: Service, engine: Engine) -> APIRouter:
    router = APIRouter()
    for part in (
        completions_router,
        chat_router,
        responses_router,
        messages_router,
        abort_router,
    ):
        router.include_router(part(service))
    router.include_router(tokens_router(service, engine.vocab_size, engine.max_model_len))
    return router
