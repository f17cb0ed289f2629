"""Pooled prompts of one HTTP request: jobs of the engine's scheduler, batched with everything else there."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fastapi import Request

from ...base.pooling_params import PoolingParams
from ...base.sampling_params import SamplingParams
from ...text.pooling import Vector
from ..endpoints.generation import CLIENT_GONE, Service, unless_disconnected
from ..loop.stream import Job, OutputStream
from ..middleware.tenant import tenant_of
from ..observability.request_record import record_of
from ..protocol.errors import ApiError
from ..protocol.pooling_protocol import PoolingRequest

_NOTHING = SamplingParams(max_tokens=1)


@dataclass(slots=True)
class PooledResponse:
    """The pooled vectors of one HTTP request, and what its response says of it."""

    id: str
    model: str
    num_prompt_tokens: int
    created: int = field(default_factory=lambda: int(time.time()))
    vectors: list[tuple[float, ...]] = field(default_factory=list)
    num_cached_tokens: int = 0

    @property
    def arrays(self) -> list[Vector]:
        return [np.asarray(vector, dtype=np.float32) for vector in self.vectors]

    @property
    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "total_tokens": self.num_prompt_tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


async def pool(
    service: Service,
    request: Request,
    body: PoolingRequest,
    prompts: Sequence[Sequence[int]],
    pooling: PoolingParams,
    id_prefix: str,
) -> PooledResponse:
    """The vector of each prompt. A client that leaves frees what they hold.

    Raises:
        ApiError, BadInput: a prompt that cannot fit, a full queue, a failed step, a client that left.
    """
    arrival_seconds = time.perf_counter()
    tenant, name = tenant_of(request), body.model or service.model_name
    record = record_of(request)
    response_id = f"{id_prefix}{body.request_id or record.request_id}"
    num_tokens = sum(map(len, prompts))
    record.reserve(num_tokens, at_least=num_tokens)
    jobs = [
        Job(
            f"{response_id}/{uuid.uuid4().hex}/{index}",
            token_ids,
            _NOTHING,
            arrival_seconds,
            service.adapter(name),
            body.priority or 0,
            tenant.cache_salt(body.cache_salt),
            tenant.key,
            pooling,
        )
        for index, token_ids in enumerate(prompts)
    ]
    response = PooledResponse(response_id, name, num_tokens)
    stream = await service.loop.submit(jobs)
    record.begin(response_id, name, None, stream)
    try:
        if await unless_disconnected(request, _collect(stream, response)) is None:
            raise ApiError(CLIENT_GONE, "the client has left")
    finally:
        stream.close()
    return response


async def _collect(stream: OutputStream, response: PooledResponse) -> PooledResponse:
    by_id: dict[str, tuple[float, ...]] = {}
    async for output in stream:
        assert output.pooled is not None
        by_id[output.request_id] = output.pooled
        response.num_cached_tokens += output.num_cached_tokens
    response.vectors = [by_id[job.request_id] for job in stream.jobs]
    return response
