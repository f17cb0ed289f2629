"""`POST /v1/embeddings`, for checkpoints with a pooling config (sentence-transformers)."""

from __future__ import annotations

import base64
from typing import Any, Literal

import torch
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, field_validator

from ....quant.base.errors import BadInput
from ...engine import Engine
from ...text.pooling import Pooling, read_pooling
from ..observability.request_record import record_of
from ..protocol.errors import ApiError, TooMany
from ..protocol.protocol import Prompt, as_prompts, check_prompt
from .generation import Service


class EmbeddingRequest(BaseModel):
    """Body of `/v1/embeddings`."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    input: str | list[str] | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _is_an_input(cls, value: Any) -> Any:
        return check_prompt(value)

    @property
    def inputs(self) -> list[Prompt]:
        return as_prompts(self.input)


def embeddings_router(service: Service, engine: Engine) -> APIRouter:
    router = APIRouter()
    pooling: Pooling | None = None
    reason = "the checkpoint has no pooling (1_Pooling/config.json)"
    try:
        pooling = read_pooling(engine.folder)
    except BadInput as error:
        reason = str(error)

    @router.post("/v1/embeddings")
    async def create_embeddings(body: EmbeddingRequest, request: Request) -> dict[str, Any]:
        """Embed texts."""
        service.check_model(body.model)
        if pooling is None:
            raise ApiError(
                400,
                f"{service.model_name} gives no embeddings: {reason}",
                param="model",
                code="unsupported_model",
            )
        lora = service.adapter(body.model)
        prompts = await service.text.encode(body.inputs)
        record_of(request).charge(sum(map(len, prompts)))
        data = []
        for index, token_ids in enumerate(prompts):
            vector = await service.loop.run(_Embedding(token_ids, pooling, lora))
            if body.dimensions not in (None, len(vector)):
                raise ApiError(400, f"dimensions: this model has {len(vector)}", param="dimensions")
            encoded = vector.tolist()
            if body.encoding_format == "base64":
                encoded = base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
            data.append({"object": "embedding", "index": index, "embedding": encoded})
        count = sum(map(len, prompts))
        return {
            "object": "list",
            "data": data,
            "model": body.model or service.model_name,
            "usage": {"prompt_tokens": count, "total_tokens": count},
        }

    return router


class _Embedding:
    """Embeds one text on the engine thread. Decode steps run between two texts, not within one."""

    def __init__(self, token_ids: list[int], pooling: Pooling, lora: str | None) -> None:
        self._token_ids = token_ids
        self._pooling = pooling
        self._lora = lora

    def __call__(self, engine: Engine) -> torch.Tensor:
        scheduler, count = engine.scheduler, len(self._token_ids)
        if count <= engine.max_model_len and scheduler.config.max_blocks(count) > (
            scheduler.pool.num_free
        ):
            raise TooMany(
                "the KV cache has too few free blocks for the text now", {"Retry-After": "1"}
            )
        return self._pooling(engine.hidden_states(self._token_ids, self._lora)).cpu()
