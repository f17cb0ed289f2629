"""`POST /v1/embeddings`: pooled hidden states of texts, batched by the scheduler beside generation."""

from __future__ import annotations

import base64
from typing import Any

from fastapi import APIRouter, Request

from ...text.pooling import Vector
from ..endpoints.generation import Service
from ..protocol.pooling_protocol import EmbeddingRequest
from .pooled import pool


def embeddings_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/embeddings")
    async def create_embeddings(body: EmbeddingRequest, request: Request) -> dict[str, Any]:
        """Embed texts."""
        service.check_model(body.model)
        body.refuse_unsupported()
        pooling = service.pooling.embedder()
        prompts = await service.text.encode(
            body.inputs,
            add_special_tokens=body.add_special_tokens,
            max_tokens=body.truncate_prompt_tokens,
        )
        response = await pool(service, request, body, prompts, pooling.params, "embd-")
        vectors = [pooling.embedding(vector, body.dimensions) for vector in response.vectors]
        return {
            "id": response.id,
            "object": "list",
            "created": response.created,
            "model": response.model,
            "data": [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": _encoded(vector, body.encoding_format),
                }
                for index, vector in enumerate(vectors)
            ],
            "usage": response.usage,
        }

    return router


def _encoded(vector: Vector, encoding: str) -> str | list[float]:
    """Little-endian float32 as base64, or numbers."""
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
