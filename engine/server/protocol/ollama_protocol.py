"""Request models of Ollama's API, and their translation into the server's own.

Source: https://github.com/ollama/ollama/blob/main/docs/api.md
"""

from __future__ import annotations

import json
import logging
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ...base.sampling_params import SamplingParams
from .chat_protocol import MAX_MESSAGES, ChatRequest, chat_call, image_part
from .errors import bad_field
from .generation_protocol import GenerationRequest, TokenId, unsupported

_log = logging.getLogger(__name__)

_UNSUPPORTED = ("logprobs", "suffix", "template", "top_logprobs")


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
        """The fields of a generation request.

        Raises:
            ApiError: an option that would change the result and is not supported.
        """
        neutral = {"mirostat": 0, "tfs_z": 1, "typical_p": 1, "repeat_last_n": -1}
        for name, value in neutral.items():
            if getattr(self, name) not in (None, value):
                raise unsupported(f"options.{name}")
        if self.num_ctx is not None and self.num_ctx != max_model_len:
            _log.info(
                "num_ctx %d has no effect: the context is %d tokens (--max-model-len)",
                self.num_ctx,
                max_model_len,
            )
        # Ollama's -1 and -2 are: as many as the context holds.
        limit = self.num_predict if self.num_predict and self.num_predict > 0 else None
        names = ("temperature", "top_p", "min_p", "seed", "stop")
        penalties = ("presence_penalty", "frequency_penalty")
        return {
            "max_tokens": limit,
            "top_k": self.top_k or None,
            "repetition_penalty": self.repeat_penalty,
            **{name: getattr(self, name) for name in (*names, *penalties)},
        }


class OllamaRequest(BaseModel):
    """Fields of both a chat and a generation. `keep_alive` has no effect: the model stays."""

    model_config = ConfigDict(extra="allow")

    model: str
    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options = Options()
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: str | float | None = None

    def refuse_unsupported(self) -> None:
        """Raise `ApiError` for a field that would change the result."""
        for name in _UNSUPPORTED:
            if (self.model_extra or {}).get(name):
                raise unsupported(name)

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
        """A conversation as a chat request.

        Raises:
            ApiError: as `fields`.
            ValidationError: what a chat request refuses too.
        """
        fields = self.fields(max_model_len)
        if isinstance(self.think, str):
            fields["reasoning_effort"] = self.think
        elif self.think is not None:
            fields["chat_template_kwargs"] = {
                "enable_thinking": self.think,
                "thinking": self.think,
            }
        return ChatRequest.model_validate({**fields, "messages": messages, "tools": tools or None})


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
        """The message as the chat endpoint takes it."""
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
        """Translate into a chat request; raises as `chat`."""
        messages = [message.for_chat() for message in self.messages]
        return self.chat(messages, max_model_len, self.tools)


class OllamaGenerate(OllamaRequest):
    """Body of `/api/generate`."""

    prompt: str = ""
    system: str | None = None
    raw: bool = False
    context: list[TokenId] | None = None
    images: list[str] | None = None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.images and (self.raw or self.context):
            problem = "only through the chat template: not with raw or context"
            raise bad_field("images", problem)

    def chat_request(self, max_model_len: int) -> ChatRequest:
        """The prompt as a user's message; raises as `chat`."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        content = _with_images(self.prompt, self.images)
        messages = [*system, {"role": "user", "content": content}]
        return self.chat(messages, max_model_len, None)

    def raw_request(self, max_model_len: int) -> RawRequest:
        """The prompt as it is; raises as `fields`."""
        return RawRequest.model_validate(self.fields(max_model_len))


class RawRequest(GenerationRequest):
    """A prompt without a template. Without a limit, the output may fill the context."""

    def sampling_params(self) -> SamplingParams:
        return self._sampling_params(self.max_tokens, None)


class ShowRequest(BaseModel):
    """Body of `/api/show`; `name` is the older spelling of `model`."""

    model: str | None = None
    name: str | None = None
