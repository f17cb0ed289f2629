"""Ollama's API: `/api/chat`, `/api/generate`, `/api/embed`, `/api/tags`, `/api/ps`, `/api/show` and
`/api/version`."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from ....base.errors import BadInput
from ....quant.families.config import has_table_rule, model_shape
from ....quant.families.registry import type_of
from ....quant.model.checkpoint import gguf_file_of
from ...core.engine import Engine
from ...execution.pooling import read_pooling
from ...scheduling.outputs import RequestOutput, TokenLogprobs
from ..parsing.formats import Arguments, CallStart, Event, Parsed, ParsedCall
from ..parsing.parser import OutputFormat
from ..protocol.errors import ApiError, bad_field, ollama_error
from ..protocol.ollama_protocol import (
    EmbedRequest,
    OllamaChat,
    OllamaGenerate,
    OllamaRequest,
    ShowRequest,
    filled,
)
from ..requests.middleware import JsonRoute
from .completions import chat_logprobs
from .conversation import ConversationResponse, prepare
from .pooled import pool
from .service import Asked, ResponseContext, Service, compact_json, note_ignored
from .tokenization import Tokenization


class ModelFacts:
    """The served model and its adapters, as Ollama lists and shows models."""

    def __init__(self, service: Service, engine: Engine) -> None:
        self._service = service
        self._engine = engine
        self._config: Mapping[str, Any] = engine.model_config
        self._num_parameters = _num_parameters(self._config)

    def listed(self) -> dict[str, Any]:
        """The body of `/api/tags`."""
        folders = {self._service.model_name: self._engine.folder, **self._service.adapters}
        models = []
        for name, folder in folders.items():
            paths = sorted(folder.iterdir()) if folder.is_dir() else [folder]
            # An adapter that is loaded is served on when its folder is deleted.
            files = [(path.name, path.stat().st_size) for path in paths if path.is_file()]
            digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()
            size = sum(size for _, size in files)
            entry = {"name": name, "model": name, "modified_at": _changed(folder), "size": size}
            models.append({**entry, "digest": digest, "details": self._details})
        return {"models": models}

    def shown(self) -> dict[str, Any]:
        """The body of `/api/show`."""
        text, family = self._service.text, self._family
        try:
            has_pooling = read_pooling(self._engine.folder) is not None
        except BadInput:
            has_pooling = False
        capabilities = ["embedding" if has_pooling else "completion"]
        capabilities += ["tools"] if text.takes_tools and text.tool_format else []
        capabilities += ["thinking"] if text.reasoning_format else []
        capabilities += ["vision"] if self._service.images.are_taken else []
        return {
            "modelfile": "",
            "parameters": "",
            "template": text.template_text,
            "details": self._details,
            "model_info": {
                "general.architecture": family,
                "general.parameter_count": self._num_parameters,
                f"{family}.context_length": self._service.max_model_len,
            },
            "capabilities": capabilities,
            "modified_at": _changed(self._engine.folder),
        }

    @property
    def _family(self) -> str:
        return type_of(self._config) or "unknown"

    @property
    def _details(self) -> dict[str, Any]:
        quantized = self._config.get("quantization_config") or {}
        dtype = str(self._engine.dtype).removeprefix("torch.")
        count, units = self._num_parameters, ((10**9, "B"), (10**6, "M"), (10**3, "K"))
        size = "unknown" if count is None else str(count)
        if count is not None and count >= 10**3:  # in Ollama's spelling: 134.5M, 8.0B
            size = next(f"{count / unit:.1f}{name}" for unit, name in units if count >= unit)
        return {
            "parent_model": "",
            "format": "gguf" if gguf_file_of(self._engine.folder) else "safetensors",
            "family": self._family,
            "families": [self._family],
            "parameter_size": size,
            "quantization_level": quantized.get("quant_method", dtype),
        }


def _num_parameters(config: Mapping[str, Any]) -> int | None:
    """Number by the planner's table of families; None for another type, which would have to be probed."""
    try:
        raw = dict(config)
        return model_shape(raw).num_parameters if has_table_rule(raw) else None
    except BadInput:
        return None


def _changed(folder: Path) -> str:
    return _written(datetime.fromtimestamp(folder.stat().st_mtime if folder.exists() else 0, UTC))


def _written(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


ID_PREFIX = "ollama-"
Contents = Callable[[Parsed], dict[str, Any]]
"""The fields of an object that hold a piece of the output."""


def message_of(parsed: Parsed) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": parsed.text}
    if parsed.reasoning:
        message["thinking"] = parsed.reasoning
    if parsed.calls:
        message["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": call.value}}
            for call in parsed.calls
        ]
    return {"message": message}


def response_of(parsed: Parsed) -> dict[str, Any]:
    thinking = {"thinking": parsed.reasoning} if parsed.reasoning else {}
    return {"response": parsed.text, **thinking}


class OllamaResponse(ConversationResponse):
    """The output of a request as Ollama's objects, one for each piece of text. Calls come whole. The last
    object, of an empty piece, has the counts, and the durations in nanoseconds."""

    def __init__(
        self,
        context: ResponseContext,
        form: OutputFormat,
        text: Tokenization,
        contents: Contents,
        *,
        has_reasoning: bool,
        gives_context: bool = False,
    ) -> None:
        """`gives_context`: whether the last object has the tokens of prompt and output."""
        super().__init__(context, form, has_reasoning=has_reasoning)
        self._contents, self._gives_context = contents, gives_context
        self._text, self._scored = text, list[Any]()
        self._call: ParsedCall | None = None

    async def document(self) -> dict[str, Any]:
        parsed = await self.parsed()
        self._score(self.completion.logprobs)
        return {**self._object(parsed), **self._ending()}

    def sent(self, output: RequestOutput, events: Sequence[Event]) -> Iterator[bytes]:
        self._score(output.logprobs)
        for piece in self._pieces(events):
            yield _line(self._object(piece))

    def ending(self) -> Iterator[bytes]:
        for piece in self._whole_call():
            yield _line(self._object(piece))
        yield _line({**self._object(Parsed()), **self._ending()})

    def failed(self, error: ApiError) -> bytes:
        return _line(ollama_error(error))

    def _pieces(self, events: Sequence[Event]) -> Iterator[Parsed]:
        """Pieces that can be sent: text and reasoning, and a call once the next one begins."""
        for event in events:
            match event:
                case CallStart(_, call_id, name):
                    yield from self._whole_call()
                    self._call = ParsedCall(call_id, name)
                case Arguments(_, text):
                    assert self._call is not None
                    self._call.arguments += text
                case _:
                    piece = Parsed()
                    piece.add([event])
                    yield piece

    def _whole_call(self) -> Iterator[Parsed]:
        if self._call is not None:
            piece = Parsed()
            piece.calls, self._call = [self._call], None
            yield piece

    def _score(self, scored: Sequence[TokenLogprobs] | None) -> None:
        if scored is not None:
            self._scored += chat_logprobs(self._text, scored)["content"]

    def _object(self, parsed: Parsed) -> dict[str, Any]:
        scored, self._scored = self._scored, []
        return {
            "model": self.context.model,
            "created_at": _written(datetime.now(UTC)),
            **self._contents(parsed),
            **({"logprobs": scored} if scored else {}),
            "done": False,
        }

    def _ending(self) -> dict[str, Any]:
        """Finish reason, and Ollama's counts and durations; `load_duration` is the time in the queue."""
        seconds, job = self.usage.whole()["seconds"], self.context.stream.jobs[0]
        tokens = [*job.token_ids, *self.completion.token_ids]
        return {
            "done": True,
            "done_reason": self.completion.finish_reason,
            **({"context": tokens} if self._gives_context else {}),
            "total_duration": nanoseconds(time.perf_counter() - job.arrival_seconds),
            "load_duration": nanoseconds(seconds["queue"]),
            "prompt_eval_count": self.usage.num_prompt_tokens,
            "prompt_eval_duration": nanoseconds(seconds["prefill"]),
            "eval_count": self.usage.num_output_tokens,
            "eval_duration": nanoseconds(seconds["decode"]),
        }


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _line(fields: dict[str, Any]) -> bytes:
    return compact_json(fields) + b"\n"


API_VERSION = "0.13.4"
"""The release of Ollama whose API this is: clients ask for it to find out what they may send."""


def check(service: Service, body: OllamaRequest, request: Request) -> None:
    """Check model and fields; a tag of `:latest` is dropped from the name."""
    note_ignored(request, body.ignored)
    body.model = known(service, body.model)
    body.refuse_unsupported()
    if body.think and service.text.reasoning_format is None:
        raise ApiError(400, f"{body.model!r} does not support thinking", param="think")


def known(service: Service, name: str | None) -> str:
    """The name of a served model, with or without a tag."""
    name = (name or "").removesuffix(":latest")
    service.check_model(name)
    return name


async def answer(service: Service, body: OllamaChat | OllamaGenerate, request: Request) -> Response:
    if isinstance(body, OllamaGenerate) and _is_plain(service, body):
        arrival_seconds = time.perf_counter()
        plain = body.raw_request(service.max_model_len)
        service.check(plain)
        params = await service.params(request, plain, plain.constraint())
        prompts = await service.text.encode([_plain_prompt(service, body)])
        prepared = Asked(request, plain, params, prompts, ID_PREFIX, arrival_seconds)
        form = OutputFormat()
    else:
        chat = await service.off_loop(request, partial(body.chat_request, service.max_model_len))
        prepared, form = await prepare(service, request, chat, ID_PREFIX)
    contents, how = message_of, {"has_reasoning": body.think is not False}
    if isinstance(body, OllamaGenerate):
        contents, how["gives_context"] = response_of, not body.raw
        prepared.prompts[0][:0] = body.context or []

    def generation(context: ResponseContext) -> OllamaResponse:
        return OllamaResponse(context, form, service.text, contents, **how)

    return await service.respond(prepared, generation, "application/x-ndjson")


def _is_plain(service: Service, body: OllamaGenerate) -> bool:
    """True if the prompt stands as it is: raw, or because the model has no template to put it in."""
    if (body.suffix or body.template) and body.images:
        raise bad_field("images", "only through the chat template: not with suffix or template")
    is_plain = service.text.template_source == "plain" and not (body.system or body.images)
    return body.raw or is_plain or bool(body.suffix or body.template)


def _plain_prompt(service: Service, body: OllamaGenerate) -> str:
    """The prompt as the request's own template has it, or with the suffix that is to follow the answer."""
    if body.template and not body.raw:
        fields = {"System": body.system, "Prompt": body.prompt, "Suffix": body.suffix}
        return filled(body.template, {name: text or "" for name, text in fields.items()})
    if not body.suffix:
        return body.prompt
    return service.text.filled_in(body.prompt, body.suffix)


async def embedded(service: Service, request: Request, body: EmbedRequest) -> dict[str, Any]:
    """The embeddings of texts, in Ollama's shape."""
    begun = time.perf_counter()
    note_ignored(request, [*(body.model_extra or ()), *body.options.ignored])
    body.model = known(service, body.model)
    pooling = service.pooling.embedder()
    if body.prompt is None:  # Ollama's newer endpoint has unit vectors of every model
        pooling = replace(pooling, normalize=True)
    embedding = body.embedding_request(body.input or [])
    prompts = await service.text.encode(
        embedding.inputs, max_tokens=embedding.truncate_prompt_tokens
    )
    pooled = await pool(service, request, embedding, prompts, pooling.params, ID_PREFIX)
    vectors = [pooling.embedding(vector, body.dimensions).tolist() for vector in pooled.vectors]
    return {
        "model": body.model,
        "embeddings": vectors,
        "total_duration": nanoseconds(time.perf_counter() - begun),
        "load_duration": 0,
        "prompt_eval_count": pooled.usage["prompt_tokens"],
    }


def ollama_router(service: Service, engine: Engine) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)
    facts = ModelFacts(service, engine)

    @router.post("/api/chat", response_model=None)
    async def ollama_chat(body: OllamaChat, request: Request) -> Response:
        """Generate the next message of a conversation."""
        check(service, body, request)
        if not body.messages:
            return _loaded(body, {"message": {"role": "assistant", "content": ""}})
        return await answer(service, body, request)

    @router.post("/api/generate", response_model=None)
    async def ollama_generate(body: OllamaGenerate, request: Request) -> Response:
        """Answer a prompt."""
        check(service, body, request)
        if not (body.prompt or body.context or body.images):
            return _loaded(body, {"response": ""})
        return await answer(service, body, request)

    @router.post("/api/embed")
    async def ollama_embed(body: EmbedRequest, request: Request) -> dict[str, Any]:
        """Embed texts."""
        if body.input is None:
            raise bad_field("input", "need a text, or a list of texts")
        if not body.input:
            return {"model": known(service, body.model), "embeddings": []}
        return await embedded(service, request, body)

    @router.post("/api/embeddings")
    async def ollama_embeddings(body: EmbedRequest, request: Request) -> dict[str, Any]:
        """Embed a prompt, in the older form."""
        if not body.prompt:
            return {"embedding": []}
        body.input = body.prompt
        return {"embedding": (await embedded(service, request, body))["embeddings"][0]}

    @router.get("/api/tags")
    @router.get("/api/ps")
    async def ollama_tags() -> dict[str, Any]:
        """The served model and its adapters, which are all loaded."""
        return facts.listed()

    @router.post("/api/show")
    async def ollama_show(body: ShowRequest) -> dict[str, Any]:
        """Facts of a model."""
        known(service, body.model or body.name)
        return facts.shown()

    @router.get("/api/version")
    async def ollama_version() -> dict[str, str]:
        return {"version": API_VERSION}

    return router


def _loaded(body: OllamaRequest, empty: dict[str, Any]) -> Response:
    fields = {"model": body.model, "created_at": _written(datetime.now(UTC)), **empty}
    return JSONResponse({**fields, "done": True, "done_reason": "load"})
