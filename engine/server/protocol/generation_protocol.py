"""Request models shared by the generation endpoints: OpenAI's fields, vLLM's extra sampling fields, tools.

Those of `/v1/embeddings`, `/v1/score` and `/v1/rerank` too: OpenAI's, vLLM's, Jina's and Cohere's.
Hosted tools of OpenAI's and Anthropic's APIs, such as web search, are left out: requests go on without them.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SkipValidation,
    field_validator,
    model_validator,
)

from ...base.sampling_params import MAX_COMPLETIONS, SamplingParams
from .errors import ApiError
from .structure import StructuredRequest

MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 64, 1024
"""Limits, because each stop string is searched for in every text delta."""

MAX_PROMPTS = 2048

StopString = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
REQUEST_ID = r"[A-Za-z0-9_.:-]{1,128}"

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # Unsupported fields that would change the result, with the neutral values that are accepted besides
    # the empty ones (null, false, "", [], {}).
    **dict.fromkeys(("allowed_token_ids", "audio", "background", "bad_words", "chat_template"), ()),
    **dict.fromkeys(("continue_final_message", "conversation", "documents", "functions"), ()),
    **dict.fromkeys(("grammar", "logits_processors", "previous_response_id", "prompt"), ()),
    **dict.fromkeys(("prompt_embeds", "prompt_logprobs", "thinking_token_budget", "tools"), ()),
    **dict.fromkeys(("truncate_prompt_tokens", "use_beam_search", "web_search_options"), ()),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "reasoning": ({"effort": None}, {"effort": "none"}),
    "tool_choice": ("none", "auto"),
    "truncation": ("disabled", "auto"),
}
_ALWAYS_TRUE = ("add_generation_prompt", "add_special_tokens")
"""Unsupported fields whose neutral value is true."""


class StreamOptions(BaseModel):
    """Usage in a stream: in a final chunk (`include_usage`), or in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class EngineRequest(BaseModel):
    """Fields of every request for the engine. One that is absent or null takes the engine's default.

    Unknown fields are ignored, because clients send many that have no effect here.
    """

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    request_id: Annotated[str, Field(pattern=f"^{REQUEST_ID}$")] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None


class GenerationRequest(StructuredRequest, EngineRequest):
    """Fields shared by the generation endpoints."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(le=2**31 - 1)] | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = None
    n: Annotated[int, Field(ge=1, le=MAX_COMPLETIONS)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is allowed only with stream = true")
        return self

    @property
    def num_completions(self) -> int:
        return self.n or 1

    def refuse_unsupported(self) -> None:
        """Raise `ApiError` for an unsupported field that would change the result."""
        refuse_fields(self.model_extra, _UNSUPPORTED)
        for name in _ALWAYS_TRUE:
            value = (self.model_extra or {}).get(name)
            if value is not None and value is not True:
                raise unsupported(name)

    @abstractmethod
    def sampling_params(self) -> SamplingParams:
        """Raises `BadInput` or `ApiError` for values out of range."""

    def _sampling_params(
        self, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None = None
    ) -> SamplingParams:
        stop: Sequence[str] = [self.stop] if isinstance(self.stop, str) else self.stop or []
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        if self.top_p == 0:  # OpenAI's range begins with 0: the likeliest token alone
            given["top_p"] = 1e-9
        return SamplingParams(
            max_tokens=max_tokens,
            stop=tuple(text for text in stop if text),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            **{name: value for name, value in given.items() if value is not None},
        )


_SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)} & {
    *GenerationRequest.model_fields
} - {"max_tokens", "stop", "stop_token_ids"}
"""Fields of a request that sampling parameters take as they are."""


def refuse_fields(given: Mapping[str, Any] | None, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise `ApiError` for an unsupported field whose value is neither empty nor one of its neutral ones."""
    for name, value in (given or {}).items():
        if value and name in neutral and value not in neutral[name]:
            raise unsupported(name)


def unsupported(name: str) -> ApiError:
    return ApiError(400, f"{name} is not supported", param=name, code="unsupported_parameter")


Prompt = str | list[int]


def _check_prompts(value: Any) -> Any:
    """Validate prompts with one clear message, and once, where each member of the union would be tried."""
    if isinstance(value, list) and value:
        if len(value) > MAX_PROMPTS and not isinstance(value[0], int):
            raise ValueError(f"{MAX_PROMPTS} prompts at most")
        parts = value if all(isinstance(part, list) for part in value) else [value]
        are_ids = all(part and all(type(token) is int for token in part) for part in parts)
        if are_ids or all(isinstance(part, str) for part in value):
            return value
    if isinstance(value, str):
        return value
    raise ValueError("need a string, a list of strings, token ids, or a list of token ids")


Prompts = Annotated[
    SkipValidation[str | list[str] | list[int] | list[list[int]]], BeforeValidator(_check_prompts)
]


class CompletionRequest(GenerationRequest):
    """Body of `/v1/completions`.

    `prompt_logprobs`, `return_tokens_as_token_ids`, and a `max_tokens` of 0 with `echo` are vLLM's.
    """

    prompt: Prompts
    suffix: str | None = None
    # Clients of chats send false for no log-probabilities.
    logprobs: Annotated[int | None, BeforeValidator(lambda n: None if n is False else n)] = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def prompts(self) -> list[Prompt]:
        return as_prompts(self.prompt)

    @property
    def only_echoes(self) -> bool:
        """True if the choices are the prompt alone. The engine still samples a token, which is dropped."""
        return bool(self.echo) and self.max_tokens == 0

    def sampling_params(self) -> SamplingParams:
        if self.stream and self.best_of is not None and self.best_of > self.num_completions:
            problem = "best_of is known at the end only: it cannot be streamed"
            raise ApiError(400, problem, param="best_of")
        if self.stream and self.prompt_logprobs is not None:
            problem = "prompt_logprobs is for whole responses: no stream"
            raise ApiError(400, problem, param="prompt_logprobs")
        max_tokens = 16 if self.max_tokens is None else self.max_tokens
        echoed = self.logprobs if self.echo else None
        wanted = [number for number in (echoed, self.prompt_logprobs) if number is not None]
        max_tokens = 1 if self.only_echoes else max_tokens
        params = self._sampling_params(max_tokens, self.logprobs, max(wanted, default=None))
        return replace(params, best_of=self.best_of)


def as_prompts(value: str | list[str] | list[int] | list[list[int]]) -> list[Prompt]:
    if isinstance(value, str):
        return [value]
    batch: list[Any] = value
    return [batch] if isinstance(batch[0], int) else batch


_log = logging.getLogger(__name__)

CLIENT_KINDS = (None, "function", "namespace", "custom")
"""Types of tools that a client defines and runs. Vendors add to the others with each release, so that these
are not listed."""


def client_tools(*served: str | None) -> BeforeValidator:
    """Validator of a list of tools: leaves out the hosted ones, refuses others not of the types `served`."""

    def without_hosted(tools: Any) -> Any:
        if not isinstance(tools, list):
            return tools
        kept: list[Any] = []
        for tool in tools:
            if is_hosted(tool):
                if _log_skipped.cache_info().currsize < MAX_LOGGED_KINDS:
                    _log_skipped(tool["type"][:64])
            elif isinstance(tool, dict) and tool.get("type") not in served:
                types = " and ".join(kind for kind in served if kind is not None)
                problem = f"tools of type {tool.get('type')!r} are not supported"
                raise ValueError(f"{problem}: {types} only")
            else:
                kept.append(tool)
        return kept

    return BeforeValidator(without_hosted)


def is_hosted(tool: Any) -> bool:
    """True if the vendor defines the tool, by its type."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind not in CLIENT_KINDS


MAX_LOGGED_KINDS = 64


@lru_cache(maxsize=MAX_LOGGED_KINDS)
def _log_skipped(kind: str) -> None:
    """Log once for each type, because an agent sends its tools with every request."""
    _log.warning("tools of type %r are hosted by their vendor: requests go on without them", kind)


_UNPOOLED: dict[str, tuple[Any, ...]] = {
    # Fields that would change the result, with the neutral values that are accepted besides the empty ones.
    **dict.fromkeys(("chat_template", "dimensions", "instruction", "max_chunks_per_doc"), ()),
    **dict.fromkeys(("max_tokens_per_doc", "max_tokens_per_query"), ()),
    **dict.fromkeys(("messages", "mm_processor_kwargs"), ()),
    "embed_dtype": ("float32",),
    "embedding_types": (["float"],),
    "encoding_format": ("float",),
    "endianness": ("native", "little"),
    "rank_fields": (["text"],),
    "task": ("embed",),
}


class PoolingRequest(EngineRequest):
    """Fields shared by the endpoints that pool prompts."""

    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _keeps_a_token(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("1 or more, or -1 for the context length")
        return value

    def refuse_unsupported(self) -> None:
        """Raise `ApiError` for an unsupported field that would change the result."""
        refuse_fields(self.model_extra, _UNPOOLED)


class EmbeddingRequest(PoolingRequest):
    """Body of `/v1/embeddings`."""

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    normalize: bool | None = None
    add_special_tokens: bool = True
    user: str | None = None

    @property
    def inputs(self) -> list[Prompt]:
        return as_prompts(self.input)


Texts = str | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]


class ScoreRequest(PoolingRequest):
    """Body of `/v1/score`: texts one to one, one to many, or pair by pair."""

    text_1: Texts
    text_2: Texts
    use_activation: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _newer_names(cls, value: Any) -> Any:
        """vLLM's other names of the two."""
        if not isinstance(value, dict):
            return value
        fields, pairs = dict(value), (("text_1", "queries"), ("text_1", "data_1"))
        for name, other in (*pairs, ("text_2", "documents"), ("text_2", "data_2")):
            if name not in fields and other in fields:
                fields[name] = fields.pop(other)
        return fields

    @model_validator(mode="after")
    def _are_pairs(self) -> ScoreRequest:
        first, second = len(_as_list(self.text_1)), len(_as_list(self.text_2))
        if first not in (1, second):
            raise ValueError(f"{first} and {second} texts: give 1 and 1, 1 and N, or N and N")
        return self

    @property
    def pairs(self) -> list[tuple[str, str]]:
        first, second = _as_list(self.text_1), _as_list(self.text_2)
        return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))


class TextDocument(BaseModel):
    """A document as an object."""

    model_config = ConfigDict(extra="forbid")

    text: str


class RerankRequest(PoolingRequest):
    """Body of `/v1/rerank`; without `top_n`, or with 0, all documents are returned."""

    query: str
    documents: Annotated[list[str | TextDocument], Field(min_length=1, max_length=MAX_PROMPTS)]
    top_n: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    return_documents: bool = True
    use_activation: bool | None = None

    @property
    def texts(self) -> list[str]:
        return [text if isinstance(text, str) else text.text for text in self.documents]


def _as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
