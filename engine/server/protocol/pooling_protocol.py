"""Request models of `/v1/embeddings`, `/v1/score` and `/v1/rerank`: OpenAI's, vLLM's, Jina's and Cohere's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from .generation_protocol import (
    MAX_PROMPTS,
    EngineRequest,
    Prompt,
    Prompts,
    as_prompts,
    refuse_fields,
)

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # Fields that would change the result, with the neutral values that are accepted besides the empty ones.
    "chat_template": (),
    "dimensions": (),
    "embed_dtype": ("float32",),
    "embedding_types": (["float"],),
    "encoding_format": ("float",),
    "endianness": ("native", "little"),
    "instruction": (),
    "max_chunks_per_doc": (),
    "messages": (),
    "mm_processor_kwargs": (),
    "normalize": (True,),
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
        refuse_fields(self.model_extra, _UNSUPPORTED)


class EmbeddingRequest(PoolingRequest):
    """Body of `/v1/embeddings`."""

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None
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
        fields = dict(value)
        for name, others in (
            ("text_1", ("queries", "data_1")),
            ("text_2", ("documents", "data_2")),
        ):
            for other in others:
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
        return [each if isinstance(each, str) else each.text for each in self.documents]


def _as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
