"""`/v1/embeddings`, `/v1/score` and `/v1/rerank`: pooled prompts, batched by the scheduler with generation.

The shapes are OpenAI's, vLLM's, Jina's and Cohere's.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from fastapi import FastAPI, Request

from ...base.sampling_params import PoolingParams, SamplingParams
from ...execution.pooling import normalized
from ...scheduling.outputs import RequestOutput
from ..protocol.errors import ApiError
from ..protocol.generation_protocol import (
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from .service import CLIENT_GONE, Asked, ResponseContext, Service, unless_disconnected

_NOTHING = SamplingParams(max_tokens=1)


@dataclass(slots=True)
class PooledResponse:
    """The pooled vectors of one HTTP request, and what its response says of it."""

    context: ResponseContext
    vectors: list[tuple[float, ...]]
    num_cached_tokens: int

    @property
    def usage(self) -> dict[str, Any]:
        num_tokens = sum(len(job.token_ids) for job in self.context.stream.jobs)
        return {
            "prompt_tokens": num_tokens,
            "total_tokens": num_tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }

    def listed(self, data: list[dict[str, Any]]) -> dict[str, Any]:
        """OpenAI's list of results."""
        return {
            "id": self.context.id,
            "object": "list",
            "created": self.context.created,
            "model": self.context.model,
            "data": data,
            "usage": self.usage,
        }


async def pool(
    service: Service,
    request: Request,
    body: PoolingRequest,
    prompts: list[list[int]],
    pooling: PoolingParams,
    id_prefix: str,
) -> PooledResponse:
    """The vector of each prompt. A client that leaves frees what they hold. Raises `ApiError` or `BadInput`:
    a prompt that cannot fit, a full queue, a failed step, a client that left."""
    prepared = Asked(
        request, body, _NOTHING, prompts, id_prefix, time.perf_counter(), pooling=pooling
    )
    context = await service.submit(prepared)

    async def collected() -> dict[str, RequestOutput]:
        return {output.request_id: output async for output in context.stream}

    try:
        outputs = await unless_disconnected(request, collected())
    finally:
        context.stream.close()
    if outputs is None:
        raise ApiError(CLIENT_GONE, "the client has left")
    vectors = [outputs[job.request_id].pooled or () for job in context.stream.jobs]
    return PooledResponse(context, vectors, sum(o.num_cached_tokens for o in outputs.values()))


def add_pooling(app: FastAPI, service: Service) -> None:
    @app.post("/v1/embeddings")
    async def create_embeddings(body: EmbeddingRequest, request: Request) -> dict[str, Any]:
        """Embed texts."""
        service.check(body, request)
        pooling = service.pooling.embedder()
        if body.normalize is not None:
            pooling = replace(pooling, normalize=body.normalize)
        how: dict[str, Any] = {
            "add_special_tokens": body.add_special_tokens,
            "max_tokens": body.truncate_prompt_tokens,
        }
        prompts = await service.text.encode(body.inputs, **how)
        response = await pool(service, request, body, prompts, pooling.params, "embd-")
        data = []
        for index, pooled in enumerate(response.vectors):
            vector = pooling.embedding(pooled, body.dimensions)
            embedding: str | list[float] = vector.tolist()
            if body.encoding_format == "base64":
                embedding = base64.b64encode(vector.astype("<f4").tobytes()).decode()
            data.append({"object": "embedding", "index": index, "embedding": embedding})
        return response.listed(data)

    @app.post("/v1/score")
    @app.post("/score")
    async def create_scores(body: ScoreRequest, request: Request) -> dict[str, Any]:
        """Score pairs of texts: by a reranker's own score, or the cosine of their embeddings."""
        response, scores = await _scores(service, request, body, body.pairs, "score-")
        data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
        return response.listed(data)

    @app.post("/v1/rerank")
    @app.post("/v2/rerank")
    @app.post("/rerank")
    async def rerank(body: RerankRequest, request: Request) -> dict[str, Any]:
        """Order documents by their relevance to a query, the most relevant first."""
        texts = body.texts
        pairs = [(body.query, text) for text in texts]
        response, scores = await _scores(service, request, body, pairs, "rerank-")
        order = sorted(range(len(texts)), key=lambda index: (-scores[index], index))
        results = [
            {"index": index, "relevance_score": scores[index]}
            | ({"document": {"text": texts[index]}} if body.return_documents else {})
            for index in order[: body.top_n or None]
        ]
        return {
            "id": response.context.id,
            "model": response.context.model,
            "usage": response.usage,
            "results": results,
            "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
        }


async def _scores(
    service: Service,
    request: Request,
    body: ScoreRequest | RerankRequest,
    pairs: Sequence[tuple[str, str]],
    id_prefix: str,
) -> tuple[PooledResponse, list[float]]:
    service.check(body, request)
    scorer, limit = service.pooling.scorer(), body.truncate_prompt_tokens
    if scorer is not None:
        prompts = await service.text.encode_pairs(pairs, scorer.template, max_tokens=limit)
        response = await pool(service, request, body, prompts, scorer.pooling, id_prefix)
        return response, [scorer.score(vector, body.use_activation) for vector in response.vectors]
    params = service.pooling.embedder().params
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    prompts = await service.text.encode(texts, max_tokens=limit)
    response = await pool(service, request, body, prompts, params, id_prefix)
    units = [normalized(np.asarray(vector, dtype=np.float32)) for vector in response.vectors]
    vector_of = dict(zip(texts, units, strict=True))
    return response, [float(vector_of[a] @ vector_of[b]) for a, b in pairs]
