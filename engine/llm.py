"""`LLM`: the offline inference API, after vLLM's."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..quant.base.errors import BadInput
from .base.sampling_params import SamplingParams
from .beam_search import BeamSearchParams, BeamSearchResult, beam_search
from .config.config import EngineConfig
from .config.option import keywords
from .engine import Engine
from .scheduling.outputs import Completion, GenerationResult, RequestOutput

Prompt = str | Sequence[int]


class LLM:
    """Offline inference. `options` are the fields of `EngineConfig`, as values or as strings ("4GiB").

    >>> llm = LLM("stories3M", dtype="float32")
    >>> llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=8))[0].text
    """

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        self.engine = Engine(EngineConfig(model=model, **keywords(EngineConfig, options)))
        self._next_id = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora: str | Sequence[str | None] | None = None,
    ) -> list[GenerationResult]:
        """Complete prompts (text or token ids) together; results come in the prompts' order.

        `params` and `lora` (an adapter's name) are for all prompts, or sequences with one per prompt.

        Raises:
            BadInput: a prompt that can never fit or an unknown adapter; all prompts are
                aborted then.
        """
        batch = _as_batch(prompts)
        each = _as_params(params, len(batch))
        adapters = _as_adapters(lora, len(batch))
        results: dict[str, GenerationResult] = {}
        try:
            for prompt, prompt_params, adapter in zip(batch, each, adapters, strict=True):
                result = self._add(prompt, prompt_params, adapter)
                results[result.request_id] = result
            while self.engine.has_unfinished():
                for output in self.engine.step():
                    result = results[output.request_id]
                    result.completions[output.index].extend(output)
                    if output.prompt_logprobs is not None:
                        result.prompt_logprobs = output.prompt_logprobs
        finally:
            for request_id in results:
                self.engine.abort(request_id)
        return list(results.values())

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, lora: str | None = None
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding the delta of each step; closing the iterator aborts the request."""
        request_id = self._add(prompt, params or SamplingParams(), lora).request_id
        try:
            while self.engine.has_unfinished():
                for output in self.engine.step():
                    if output.request_id == request_id:
                        yield output
        finally:
            self.engine.abort(request_id)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        lora: str | None = None,
    ) -> list[BeamSearchResult]:
        """Beam search; results come in the prompts' order.

        `lora` is the name of the adapter.

        Raises:
            BadInput: a prompt that can never fit, or a width that is too large.
        """
        batch = [
            self.engine.encode(prompt) if isinstance(prompt, str) else list(prompt)
            for prompt in _as_batch(prompts)
        ]
        return beam_search(self.engine, batch, params, lora)

    def _add(self, prompt: Prompt, params: SamplingParams, lora: str | None) -> GenerationResult:
        request_id = f"llm-{self._next_id}"
        self._next_id += 1
        text = prompt if isinstance(prompt, str) else None
        token_ids = self.engine.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self.engine.add_request(
            request_id, token_ids, params, arrival_seconds=time.perf_counter(), lora=lora
        )
        completions = [Completion(index) for index in range(params.n)]
        return GenerationResult(request_id, text, token_ids, completions)


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]
    return items


def _as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise BadInput(f"{len(params)} sampling params for {count} prompts: give one, or one each")
    return list(params)


def _as_adapters(lora: str | Sequence[str | None] | None, count: int) -> list[str | None]:
    if lora is None or isinstance(lora, str):
        return [lora] * count
    if len(lora) != count:
        raise BadInput(f"{len(lora)} adapters for {count} prompts: give one, or one each")
    return list(lora)
