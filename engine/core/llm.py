"""`LLM`: the offline inference API, after vLLM's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...base.errors import BadInput
from ...base.option import keywords
from ...base.progress import Progress, ProgressUpdate, as_progress
from ..base.chat_template import Message, for_template, images_of, render_chat, renders_text
from ..base.image_input import NO_IMAGES
from ..base.sampling_params import SamplingParams
from ..base.turns import TurnReader
from ..config.config import EngineConfig
from ..multimodal.open import ImagePrompt, prepare_prompt
from ..scheduling.outputs import Completion, GenerationResult, RequestOutput
from .engine import Engine

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
        progress: Progress | Callable[[ProgressUpdate], None] | None = None,
    ) -> list[GenerationResult]:
        """Complete prompts together; results come in the prompts' order.

        A prompt is text, token ids, or with images a mapping `{"prompt": text, "images": [...]}` (or
        "prompt_token_ids"): each image a PIL image, a path or a data URL, and in the text one placeholder
        for each, as the model's chat template writes it.

        `params` and `lora` (an adapter's name) are for all prompts, or sequences with one per prompt;
        `progress` counts finished completions.

        Raises BadInput: a prompt that can never fit, an unknown adapter, or an image that cannot be read or
        that the model does not take; all prompts are aborted then.
        """
        batch = _as_batch(prompts)
        params_of_prompts = _one_each(
            params or SamplingParams(), SamplingParams, len(batch), "sampling params"
        )
        adapters = _one_each(lora, str, len(batch), "adapters")
        results: dict[str, GenerationResult] = {}
        shown = as_progress(progress)
        shown.start("generating", sum(own.n for own in params_of_prompts), "completions")
        try:
            for prompt, prompt_params, adapter in zip(
                batch, params_of_prompts, adapters, strict=True
            ):
                result = self._add(prompt, prompt_params, adapter)
                results[result.request_id] = result
            while self.engine.has_unfinished():
                for output in self.engine.step():
                    result = results[output.request_id]
                    result.completions[output.index].extend(output)
                    if output.finish_reason is not None:
                        shown.advance()
                    if output.prompt_logprobs is not None:
                        result.prompt_logprobs = output.prompt_logprobs
        finally:
            for request_id in results:
                self.engine.abort(request_id)
        shown.finish()
        return list(results.values())

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora: str | Sequence[str | None] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: Progress | Callable[[ProgressUpdate], None] | None = None,
    ) -> list[GenerationResult]:
        """Answer a conversation, or several together, by the model's chat template.

        A message is `{"role": "user", "content": ...}`, its content a text, or a list of parts: texts
        (`{"type": "text", "text": ...}`) and images (`{"type": "image_url", "image_url": {"url": ...}}`, or
        `{"type": "image", "image": ...}` with a PIL image, a path or a data URL).

        Args:
            tools: descriptions of functions, for the template.
            chat_template: replaces the model's; a model without one gets a line for each message.
            chat_template_kwargs: variables of the template, such as `enable_thinking`.

        Raises BadInput as `generate`, and where the template refuses the conversation.
        """
        single: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        options = {**(chat_template_kwargs or {}), "tools": tools}
        prompts = [self._chat_prompt(talk, options, chat_template) for talk in single]
        return self.generate(prompts, params, lora=lora, progress=progress)

    def _chat_prompt(
        self, talk: Sequence[Message], options: Mapping[str, Any], template: str | None
    ) -> Prompt:
        tokenizer = self.engine.tokenizer
        images = [source for message in talk for source in images_of(message)]
        # Templates of some image-text models read lists of parts alone.
        takes_images = self.engine.images.processor is not None
        reads_parts = takes_images and not renders_text(tokenizer)
        turns = [for_template(message, as_parts=bool(images) or reads_parts) for message in talk]
        turns = TurnReader(tokenizer, template, as_parts=reads_parts).read(turns)
        text = render_chat(tokenizer, turns, options, template=template)
        # A model's template writes the special tokens itself.
        is_plain = template is None and not tokenizer.chat_template
        token_ids = list(tokenizer.encode(text, add_special_tokens=is_plain))
        return {"prompt_token_ids": token_ids, "images": images} if images else token_ids

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
    items: list[Any] = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
    is_token_ids = bool(items) and all(isinstance(item, int) for item in items)
    return [items] if is_token_ids else items


def _one_each(given: Any, single: type | tuple[type, ...], count: int, what: str) -> list[Any]:
    """`given` for each prompt: one for all, or a sequence with one per prompt."""
    if given is None or isinstance(given, single):
        return [given] * count
    if len(given) != count:
        raise BadInput(f"{len(given)} {what} for {count} prompts: give one, or one each")
    return list(given)
