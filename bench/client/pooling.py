"""Embedding, rerank and pooling requests, under vLLM's backend names: one response, no tokens, only E2EL."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ...quant.base.errors import BadInput
from ..workloads.workload import WorkloadItem
from .answer import Answer

EMBEDDINGS, RERANK, POOLING = "openai-embeddings", "vllm-rerank", "vllm-pooling"
PATHS = {EMBEDDINGS: "/v1/embeddings", RERANK: "/v1/rerank", POOLING: "/pooling"}


def batches(
    items: Sequence[WorkloadItem], backend: str, batch_size: int
) -> list[tuple[WorkloadItem, ...]]:
    """The items of each request: `batch_size` inputs; of a rerank a query and that many documents.

    The last request may have fewer, but a rerank has a document.

    Raises:
        BadInput: too few prompts for one request.
    """
    size = batch_size + (backend == RERANK)
    groups = [tuple(items[start : start + size]) for start in range(0, len(items), size)]
    groups = [group for group in groups if len(group) > (backend == RERANK)]
    if not groups:
        raise BadInput(f"--backend {backend} needs 2 prompts or more: a query and a document")
    return groups


def read_pooled(chunks: Sequence[tuple[float, bytes]]) -> Answer:
    """Parse a response with embeddings, scores or pooled states; it has no tokens."""
    body = b"".join(data for _, data in chunks)
    answer = Answer()
    try:
        document = json.loads(body)
        results = document["results"] if "results" in document else document["data"]
        answer.num_results = len(results)
        usage = document.get("usage") or {}
    except (ValueError, LookupError, TypeError, AttributeError):
        excerpt = body[:120].decode("utf-8", "replace")
        answer.error = f"the answer has neither data nor results: {excerpt}"
        return answer
    answer.prompt_tokens = usage.get("prompt_tokens") or usage.get("total_tokens")
    answer.times, answer.texts, answer.tokens = [chunks[-1][0]], [""], [0]
    return answer
