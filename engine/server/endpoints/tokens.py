"""`/tokenize` and `/detokenize`, compatible with vLLM's."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, model_validator

from ..protocol.chat_protocol import Messages, Tool
from ..protocol.errors import ApiError
from ..protocol.protocol import TokenId
from .conversation import render
from .generation import Service


class TokenizeRequest(BaseModel):
    """Body of `/tokenize`: a prompt, or a conversation to render with the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
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


def tokens_router(service: Service, vocab_size: int, max_model_len: int) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """Tokenize a text or a conversation."""
        service.check_model(body.model)
        if body.messages is None:
            assert body.prompt is not None
            (tokens,) = await service.text.encode(
                [body.prompt], add_special_tokens=body.add_special_tokens
            )
        else:
            prompt = await render(
                service,
                body.messages,
                body.tools or (),
                body.chat_template_kwargs,
                add_generation_prompt=body.add_generation_prompt,
            )
            tokens = prompt.token_ids
        names = [service.text.token(token).name for token in tokens]
        return {
            "count": len(tokens),
            "max_model_len": max_model_len,
            "tokens": tokens,
            "token_strs": names if body.return_token_strs else None,
        }

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        """Decode token ids, special tokens included; at most as many as a sequence may have."""
        service.check_model(body.model)
        if len(body.tokens) > max_model_len:
            raise ApiError(
                400,
                f"tokens: {len(body.tokens)} are more than the context length, {max_model_len}",
                param="tokens",
            )
        unknown = next((token for token in body.tokens if token >= vocab_size), None)
        if unknown is not None:
            raise ApiError(
                400, f"token id {unknown} is outside the vocabulary of {vocab_size}", param="tokens"
            )
        return {"prompt": await service.text.decode_all(body.tokens)}

    return router
