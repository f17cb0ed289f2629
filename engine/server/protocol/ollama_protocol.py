"""Request models of Ollama's API, and their translation into the server's own.

Source: https://github.com/ollama/ollama/blob/main/docs/api.md
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ...base.sampling_params import SamplingParams
from .chat_protocol import MAX_MESSAGES, ChatRequest, chat_call, continued, image_part
from .errors import bad_field
from .generation_protocol import (
    MAX_PROMPTS,
    EmbeddingRequest,
    GenerationRequest,
    TokenId,
    unsupported,
)

_log = logging.getLogger(__name__)


class Options(BaseModel):
    """`options`: sampling. Those of the machine (`num_gpu`, `num_thread` …) have no effect here."""

    model_config = ConfigDict(extra="allow")

    num_predict: int | None = None
    num_ctx: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    mirostat: int | None = None
    tfs_z: float | None = None
    typical_p: float | None = None

    def fields(self, max_model_len: int) -> dict[str, Any]:
        """The fields of a generation request. Raises `ApiError`: an option that would change the result and
        is not supported."""
        for name, neutral in (("mirostat", 0), ("tfs_z", 1)):
            if getattr(self, name) not in (None, neutral):
                raise unsupported(f"options.{name}")
        if self.num_ctx is not None and self.num_ctx != max_model_len:
            text = "num_ctx %d has no effect: the context is %d tokens (--max-model-len)"
            _log.info(text, self.num_ctx, max_model_len)
        same = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty")
        return {
            # Ollama's -1 and -2 are: as many as the context holds.
            "max_tokens": self.num_predict if self.num_predict and self.num_predict > 0 else None,
            "repetition_penalty": 1.0 if self.repeat_last_n == 0 else self.repeat_penalty,
            **{name: getattr(self, name) for name in (*same, "frequency_penalty")},
        }

    @property
    def ignored(self) -> Iterator[str]:
        """Options that were given and have no effect: of penalties the window is the whole sequence."""
        unused = {"num_ctx": (), "typical_p": (1,), "repeat_last_n": (0, -1)}
        for name, neutral in unused.items():
            if getattr(self, name) not in (None, *neutral):
                yield f"options.{name}"
        yield from (f"options.{name}" for name in self.model_extra or ())


MAX_TEMPLATE_CHARACTERS, MAX_FILLED_CHARACTERS, MAX_IFS = 32 << 10, 16 << 20, 32
"""Limits, because a template is filled on the event loop, and may name a long prompt often."""


def filled(template: str, fields: Mapping[str, str]) -> str:
    """Fill a template of Ollama up to the response: variables, and `if` with `else` around them. Raises
    `ApiError`: it has more of Go's language in it, an `if` without its end, or is too long."""
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise bad_field(
            "template", f"{len(template)} characters: at most {MAX_TEMPLATE_CHARACTERS}"
        )
    parts: list[str] = []
    conditions: list[bool] = []
    num_characters = 0
    for text, action in _actions(template):
        parts += [text] if all(conditions) else []
        if action is None:
            break
        match action.split():
            case [".Response"]:
                if all(conditions):
                    return "".join(parts)
            case [str(name)] if name[1:] in fields and name[0] == ".":
                value = fields[name[1:]] if all(conditions) else ""
                parts.append(value)
                num_characters += len(value)
                if num_characters > MAX_FILLED_CHARACTERS:
                    raise bad_field("template", f"more than {MAX_FILLED_CHARACTERS} characters")
            case ["if", str(name)] if name[1:] in (*fields, "Response"):
                conditions.append(bool(fields.get(name[1:])))
                if len(conditions) > MAX_IFS:
                    raise bad_field("template", f"more than {MAX_IFS} ifs in each other")
            case ["else"] if conditions:
                conditions[-1] = not conditions[-1]
            case ["end"] if conditions:
                conditions.pop()
            case _:
                raise bad_field("template", f"{{{{ {action.strip()} }}}} is not supported here")
    if conditions:
        raise bad_field("template", "an if has no end")
    return "".join(parts)


def _actions(template: str) -> Iterator[tuple[str, str | None]]:
    """Actions of a template, each after the text before it, which is trimmed where a `-` says so. The text at
    the end has none."""
    at, is_trimmed = 0, False
    while (begin := template.find("{{", at)) >= 0 and (end := template.find("}}", begin)) >= 0:
        text, action = template[at:begin], template[begin + 2 : end]
        text = text.lstrip() if is_trimmed else text
        text = text.rstrip() if action[:1] == "-" else text
        yield text, action.removeprefix("-").removesuffix("-")
        at, is_trimmed = end + 2, action[-1:] == "-"
    yield template[at:].lstrip() if is_trimmed else template[at:], None


class OllamaRequest(BaseModel):
    """Fields of both a chat and a generation. `keep_alive` has no effect: the model stays."""

    model_config = ConfigDict(extra="allow")

    model: str
    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options = Options()
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: str | float | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def ignored(self) -> list[str]:
        """Fields that were given and have no effect."""
        return [*(self.model_extra or ()), *self.options.ignored]

    def refuse_unsupported(self) -> None:
        """Raise `ApiError` for fields that do not go together."""
        if self.top_logprobs and not self.logprobs:
            raise bad_field("top_logprobs", "only with logprobs = true")

    def fields(self, max_model_len: int) -> dict[str, Any]:
        """The fields of a generation request; raises as `Options.fields`."""
        fields = {"model": self.model, "stream": self.stream, **self.options.fields(max_model_len)}
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            schema = {"name": "format", "schema": self.format}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields

    def chat(self, messages: list[dict[str, Any]], max_model_len: int, tools: Any) -> ChatRequest:
        """A conversation as a chat request. Raises `ApiError`: as `fields`; `ValidationError`: what a chat
        request refuses too."""
        fields = self.fields(max_model_len)
        if isinstance(self.think, str):
            fields["reasoning_effort"] = self.think
        elif self.think is not None:
            fields["chat_template_kwargs"] = {"enable_thinking": self.think, "thinking": self.think}
        scored = {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs}
        chat_fields = {**fields, **scored, "messages": messages, "tools": tools or None}
        return ChatRequest.model_validate(chat_fields | continued(messages))


class OllamaFunction(BaseModel):
    """Name and arguments of a call."""

    name: str
    arguments: dict[str, Any] = {}


class OllamaCall(BaseModel):
    """A call by the assistant."""

    id: str | None = None
    function: OllamaFunction

    def for_chat(self) -> dict[str, Any]:
        arguments = json.dumps(self.function.arguments, ensure_ascii=False)
        return chat_call(self.id, self.function.name, arguments)


class OllamaMessage(BaseModel):
    """A message of a conversation; arguments of calls are objects."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def for_chat(self) -> dict[str, Any]:
        return {
            "role": self.role,
            "content": _with_images(self.content, self.images),
            "reasoning_content": self.thinking,
            "tool_calls": [call.for_chat() for call in self.tool_calls or ()] or None,
            "name": self.tool_name,
            "tool_call_id": self.tool_call_id,
        }


def _with_images(text: str, images: list[str] | None) -> str | list[dict[str, Any]]:
    """A text with images before it, in base64, as a message's content."""
    if not images:
        return text
    parts = [image_part(f"data:image/*;base64,{data}") for data in images]
    return [*parts, {"type": "text", "text": text}]


class OllamaChat(OllamaRequest):
    """Body of `/api/chat`."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES)] = []
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None

    def chat_request(self, max_model_len: int) -> ChatRequest:
        messages = [message.for_chat() for message in self.messages]
        return self.chat(messages, max_model_len, self.tools)


class OllamaGenerate(OllamaRequest):
    """Body of `/api/generate`."""

    prompt: str = ""
    system: str | None = None
    raw: bool = False
    context: list[TokenId] | None = None
    images: list[str] | None = None
    suffix: str | None = None
    template: str | None = None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.images and (self.raw or self.context):
            raise bad_field("images", "only through the chat template: not with raw or context")

    def chat_request(self, max_model_len: int) -> ChatRequest:
        """The prompt as a user's message; raises as `chat`."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        content = _with_images(self.prompt, self.images)
        return self.chat([*system, {"role": "user", "content": content}], max_model_len, None)

    def raw_request(self, max_model_len: int) -> RawRequest:
        num_scored = (self.top_logprobs or 0) if self.logprobs else None
        return RawRequest.model_validate({**self.fields(max_model_len), "num_scored": num_scored})


class RawRequest(GenerationRequest):
    """A prompt without a template. Without a limit, the output may fill the context."""

    num_scored: int | None = None

    def sampling_params(self) -> SamplingParams:
        return self._sampling_params(self.max_tokens, self.num_scored)


class EmbedRequest(BaseModel):
    """Body of `/api/embed`, and of the older `/api/embeddings` with its one `prompt`."""

    model_config = ConfigDict(extra="allow")

    model: str
    input: str | Annotated[list[str], Field(max_length=MAX_PROMPTS)] | None = None
    prompt: str | None = None
    truncate: bool = True
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    options: Options = Options()
    keep_alive: str | float | None = None

    def embedding_request(self, texts: str | list[str]) -> EmbeddingRequest:
        cut = -1 if self.truncate else None
        fields = {"input": texts, "dimensions": self.dimensions, "truncate_prompt_tokens": cut}
        return EmbeddingRequest.model_validate({"model": self.model, **fields})


class ShowRequest(BaseModel):
    """Body of `/api/show`; `name` is the older spelling of `model`."""

    model: str | None = None
    name: str | None = None
