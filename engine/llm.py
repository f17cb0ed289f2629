"""`LLM`: the offline inference API, after vLLM's."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..quant.base.errors import BadInput
from .base.image_input import NO_IMAGES
from .base.sampling_params import SamplingParams
from .beam_search import BeamSearchParams, BeamSearchResult, beam_search
from .config.config import EngineConfig
from .config.option import keywords
from .engine import Engine
from .multimodal.open import ImagePrompt, prepare_prompt
from .scheduling.outputs import Completion, GenerationResult, RequestOutput

Prompt = str | Sequence[int] | ImagePrompt | Mapping[str, Any]


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
        """Complete prompts together; results come in the prompts' order.

        A prompt is text, token ids, or with images a mapping `{"prompt": text, "images": [...]}` (or
        "prompt_token_ids"): each image a PIL image, a path or a data URL, and in the text one placeholder
        for each, as the model's chat template writes it.

        `params` and `lora` (an adapter's name) are for all prompts, or sequences with one per prompt.

        Raises:
            BadInput: a prompt that can never fit, an unknown adapter, or an image that cannot be read or
                that the model does not take; all prompts are aborted then.
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
        batch = []
        for prompt in _as_batch(prompts):
            if isinstance(prompt, Mapping):
                raise BadInput("beam search takes no images: give text or token ids")
            batch.append(self.engine.encode(prompt) if isinstance(prompt, str) else list(prompt))
        return beam_search(self.engine, batch, params, lora)

    def _add(self, prompt: Prompt, params: SamplingParams, lora: str | None) -> GenerationResult:
        request_id = f"llm-{self._next_id}"
        self._next_id += 1
        arrival = time.perf_counter()
        images = NO_IMAGES
        if isinstance(prompt, Mapping):
            prepared = prepare_prompt(prompt, self.engine.images)
            text, token_ids, images = prompt.get("prompt"), prepared.token_ids, prepared.images
        elif isinstance(prompt, str):
            text, token_ids = prompt, self.engine.encode(prompt)
        else:
            text, token_ids = None, list(prompt)
        self.engine.add_request(
            request_id, token_ids, params, arrival_seconds=arrival, lora=lora, images=images
        )
        completions = [Completion(index) for index in range(params.n)]
        return GenerationResult(request_id, text, token_ids, completions)


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        single: Any = prompts
        return [single]
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
