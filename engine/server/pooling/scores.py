"""`/v1/score` and `/v1/rerank`: relevance of texts to each other, by vLLM's, Jina's and Cohere's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request

from ...text.pooling import normalized
from ..endpoints.generation import Service
from ..protocol.pooling_protocol import PoolingRequest, RerankRequest, ScoreRequest
from .pooled import PooledResponse, pool


def scores_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/score")
    @router.post("/score")
    async def create_scores(body: ScoreRequest, request: Request) -> dict[str, Any]:
        """Score pairs of texts: by a reranker's own score, or the cosine of their embeddings."""
        response, scores = await _scores(
            service, request, body, body.pairs, body.use_activation, "score-"
        )
        return {
            "id": response.id,
            "object": "list",
            "created": response.created,
            "model": response.model,
            "data": [
                {"index": index, "object": "score", "score": score}
                for index, score in enumerate(scores)
            ],
            "usage": response.usage,
        }

    @router.post("/v1/rerank")
    @router.post("/v2/rerank")
    @router.post("/rerank")
    async def rerank(body: RerankRequest, request: Request) -> dict[str, Any]:
        """Order documents by their relevance to a query, the most relevant first."""
        texts = body.texts
        pairs = [(body.query, text) for text in texts]
        response, scores = await _scores(
            service, request, body, pairs, body.use_activation, "rerank-"
        )
        order = sorted(range(len(texts)), key=lambda index: (-scores[index], index))
        results = [
            {"index": index, "relevance_score": scores[index]}
            | ({"document": {"text": texts[index]}} if body.return_documents else {})
            for index in order[: body.top_n or None]
        ]
        return {
            "id": response.id,
            "model": response.model,
            "usage": response.usage,
            "results": results,
            "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
        }

    return router


async def _scores(
    service: Service,
    request: Request,
    body: PoolingRequest,
    pairs: Sequence[tuple[str, str]],
    use_activation: bool | None,
    id_prefix: str,
) -> tuple[PooledResponse, list[float]]:
    """The score of each pair."""
    service.check_model(body.model)
    body.refuse_unsupported()
    scorer, limit = service.pooling.scorer(), body.truncate_prompt_tokens
    if scorer is not None:
        prompts = await service.text.encode_pairs(pairs, scorer.template, max_tokens=limit)
        response = await pool(service, request, body, prompts, scorer.pooling, id_prefix)
        return response, [scorer.score(vector, use_activation) for vector in response.vectors]
    params = service.pooling.embedder().params
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    prompts = await service.text.encode(texts, max_tokens=limit)
    response = await pool(service, request, body, prompts, params, id_prefix)
    units = [normalized(vector) for vector in response.arrays]
    vector_of = dict(zip(texts, units, strict=True))
    return response, [float(vector_of[a] @ vector_of[b]) for a, b in pairs]
