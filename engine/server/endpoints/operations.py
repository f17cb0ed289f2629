"""Operational endpoints: health, metrics, models, LoRA adapters, abort, and vLLM's tokenization."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, Field, model_validator

from ....base.version import VERSION
from ....quant.convert.adapter import CONFIG_NAME, WEIGHTS_NAME
from ...base.chat_template import PLAIN_TEMPLATE
from ...core.engine import Engine
from ..protocol.chat_protocol import Messages, PromptEnd, Tool
from ..protocol.errors import ApiError, Unavailable, bad_field
from ..protocol.generation_protocol import TokenId, refuse_fields
from ..protocol.server_options import ServerOptions
from ..requests.loop import EngineLoop
from ..requests.metrics import exposition
from ..requests.request_record import record_of
from .conversation import render
from .service import Service


class AbortRequest(BaseModel):
    """The `id` of a response. A client that sets `request_id` knows it before the response begins."""

    id: str


def add_operations(app: FastAPI, engine: Engine, loop: EngineLoop, service: Service) -> None:
    """Health probes, metrics and the model cards of the base model and its LoRA adapters."""
    registry = exposition(engine, loop.metrics, lambda: loop.is_ready, service.model_name)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Liveness: 200 while the engine serves, 503 after it has failed or while a step hangs."""
        if loop.unavailable is not None:
            raise Unavailable(loop.unavailable)
        if (seconds := loop.stalled_seconds) is not None:
            raise Unavailable(f"a step has not ended for {seconds:.0f} s: restart the server")
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        """Readiness: 200 once the engine is warm and while it serves, 503 else."""
        await health()
        if not loop.is_ready:
            raise Unavailable(
                "the server is stopping" if loop.is_draining else "the engine is warming up"
            )
        return {"status": "ready"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def show_version() -> dict[str, str]:
        return {"version": VERSION}

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [*_model_cards(engine, service).values()]}

    @app.get("/v1/models/{name:path}")
    async def show_model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model_cards(engine, service)[name]

    @app.post("/abort")
    async def abort(body: AbortRequest, request: Request) -> dict[str, object]:
        """Abort a response in flight that came with the same API key; its client receives an error. False if
        there is none with that id."""
        return {"id": body.id, "aborted": service.loop.abort(body.id, record_of(request).tenant)}


def _model_cards(engine: Engine, service: Service) -> dict[str, dict[str, Any]]:
    """Model cards by name: the base model, and its adapters with it as their parent."""
    source = service.text.template_source
    plain = {"template": PLAIN_TEMPLATE} if source == "plain" else {}
    model = {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "llmopt",
        "parent": None,
        "root": engine.folder.name,
        "max_model_len": service.max_model_len,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "input_modalities": ["text", "image"] if service.images.are_taken else ["text"],
        "chat_template": {"source": source, **plain},
    }
    adapters = {
        name: {**model, "id": name, "parent": service.model_name, "root": folder.name}
        for name, folder in service.adapters.items()
    }
    return {service.model_name: model, **adapters}


AdapterName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:/-]{0,127}$")]


class LoadAdapterRequest(BaseModel):
    """Body of `/v1/load_lora_adapter`; `load_inplace` replaces an adapter of that name."""

    model_config = ConfigDict(extra="forbid")

    lora_name: AdapterName
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False


class UnloadAdapterRequest(BaseModel):
    """Body of `/v1/unload_lora_adapter`. vLLM's `lora_int_id` is accepted and not needed."""

    model_config = ConfigDict(extra="forbid")

    lora_name: AdapterName
    lora_int_id: int | None = None


def add_adapters(app: FastAPI, service: Service, engine: Engine, options: ServerOptions) -> None:
    """The endpoints, for a server that has folders of adapters."""
    changing = asyncio.Lock()

    @app.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
    async def load_lora_adapter(body: LoadAdapterRequest) -> str:
        """Load a LoRA adapter from a folder below --allowed-lora-path, and serve it as a model."""
        name = body.lora_name
        folder = allowed_folder(body.lora_path, options.lora_folders)
        async with changing:
            if name == service.model_name or (name in service.adapters and not body.load_inplace):
                raise bad_field("lora_name", f"{name!r} is served already: unload it first")
            weights = await asyncio.to_thread(engine.loras.read, folder)
            how = {"load_inplace": body.load_inplace}
            await service.loop.run(lambda engine: engine.load_lora(name, folder, weights, **how))
            service.adapters[name] = folder
        return f"Success: LoRA adapter '{name}' added successfully."

    @app.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
    async def unload_lora_adapter(body: UnloadAdapterRequest) -> str:
        """Unload a LoRA adapter. Requests that use it go on with it to their end."""
        name = body.lora_name
        async with changing:
            if name not in service.adapters:
                problem = f"no adapter {name!r}"
                raise ApiError(404, problem, param="lora_name", code="model_not_found")
            await service.loop.run(lambda engine: engine.unload_lora(name))
            del service.adapters[name]
        return f"Success: LoRA adapter '{name}' removed successfully."


def allowed_folder(path: str, roots: Sequence[Path]) -> Path:
    """The folder of a request's path, which is relative to the first of `roots`, or absolute. Raises
    `ApiError`: it is not below one of `roots`, whether it exists or not. Links are followed before the check,
    also those of the adapter's files."""
    refusal = bad_field("lora_path", "not a folder below --allowed-lora-path")
    try:
        folder = Path(roots[0], path).resolve()
        allowed = [root.resolve() for root in roots]
        paths = [folder, *((folder / name).resolve() for name in (CONFIG_NAME, WEIGHTS_NAME))]
    except (OSError, ValueError, RuntimeError) as error:
        raise refusal from error
    is_below = all(any(path.is_relative_to(root) for root in allowed) for path in paths)
    if not (is_below and folder.is_dir()):
        raise refusal
    return folder


class TokenizeRequest(PromptEnd):
    """Body of `/tokenize`: a prompt, or a conversation to render with the chat template."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _is_one_thing(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give a prompt or messages")
        return self


class DetokenizeRequest(BaseModel):
    """Body of `/detokenize`."""

    model: str | None = None
    tokens: list[TokenId]


def add_tokens(app: FastAPI, service: Service, vocab_size: int) -> None:
    max_model_len = service.max_model_len

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """Tokenize a text or a conversation."""
        service.check_model(body.model)
        refuse_fields(body.model_extra, {"chat_template": (), "mm_processor_kwargs": ()})
        if body.messages is None:
            assert body.prompt is not None
            special = {"add_special_tokens": body.add_special_tokens}
            (tokens,) = await service.text.encode([body.prompt], **special)
        else:
            options = {**body.prompt_end, **(body.chat_template_kwargs or {})}
            tokens = (await render(service, body.messages, body.tools or (), options)).token_ids
        names = [service.text.token(token).name for token in tokens]
        counts = {"count": len(tokens), "max_model_len": max_model_len}
        return {**counts, "tokens": tokens, "token_strs": names if body.return_token_strs else None}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        """Decode token ids, special tokens included; at most as many as a sequence may have."""
        service.check_model(body.model)
        if len(body.tokens) > max_model_len:
            problem = f"{len(body.tokens)} are more than the context length, {max_model_len}"
            raise bad_field("tokens", problem)
        unknown = next((token for token in body.tokens if token >= vocab_size), None)
        if unknown is not None:
            problem = f"token id {unknown} is outside the vocabulary of {vocab_size}"
            raise ApiError(400, problem, param="tokens")
        return {"prompt": await service.text.decode_all(body.tokens)}
