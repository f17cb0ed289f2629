"""`LLM`: the offline inference API, after vLLM's, with beam search.

A beam search is pure policy: from the top-k next tokens of its beams it chooses the beams to extend. The
engine computes them as requests for one token each. What a beam shares with its parent, all but the last
block, is a prefix-cache hit, so that a round computes a few tokens per beam. The rules, of length and of
stopping too, are those of transformers' `generate(num_beams=...)`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..quant.base.errors import BadInput
from ..quant.base.option import keywords
from ..quant.base.progress import Progress, ProgressUpdate, as_progress
from .base.chat_template import Message, for_template, images_of, render_chat, renders_text
from .base.image_input import NO_IMAGES
from .base.sampling_params import MAX_LOGPROBS, SamplingParams
from .config.config import EngineConfig
from .engine import Engine
from .multimodal.open import ImagePrompt, prepare_prompt
from .scheduling.outputs import Completion, GenerationResult, IncrementalDetokenizer, RequestOutput

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

        Raises:
            BadInput: a prompt that can never fit, an unknown adapter, or an image that cannot be read or
                that the model does not take; all prompts are aborted then.
        """
        batch = _as_batch(prompts)
        each = _one_each(params or SamplingParams(), SamplingParams, len(batch), "sampling params")
        adapters = _one_each(lora, str, len(batch), "adapters")
        results: dict[str, GenerationResult] = {}
        shown = as_progress(progress)
        shown.start("generating", sum(one.n for one in each), "completions")
        try:
            for prompt, prompt_params, adapter in zip(batch, each, adapters, strict=True):
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
            chat_template: in place of the model's; a model without one gets a line for each message.
            chat_template_kwargs: variables of the template, such as `enable_thinking`.

        Raises:
            BadInput: as `generate`, or the template refuses the conversation.
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
        as_parts = bool(images) or (takes_images and not renders_text(tokenizer))
        turns = [for_template(message, as_parts=as_parts) for message in talk]
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


def _one_each(given: Any, single: type | tuple[type, ...], count: int, what: str) -> list[Any]:
    """`given` for each prompt: one for all, or a sequence with one per prompt."""
    if given is None or isinstance(given, single):
        return [given] * count
    if len(given) != count:
        raise BadInput(f"{len(given)} {what} for {count} prompts: give one, or one each")
    return list(given)


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Beam search parameters. `length_penalty` and `early_stopping` are those of transformers' `generate`.

    Attributes:
        beam_width: beams that are extended, and hypotheses returned.
        max_tokens: of a hypothesis.
        length_penalty: a hypothesis scores sum of log-probabilities / length ** penalty, so that a larger
            one favours longer hypotheses.
        early_stopping: True ends the search when `beam_width` hypotheses are finished, False when no beam
            can beat the worst of them at its present length, "never" when none can at any length.
        ignore_eos: end-of-sequence tokens do not finish a hypothesis.

    Raises:
        BadInput: a value outside its range.
    """

    beam_width: int
    max_tokens: int = 16
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.beam_width < 1 or self.max_tokens < 1:
            raise BadInput(
                f"beam_width = {self.beam_width}, max_tokens = {self.max_tokens}: need 1 or more"
            )
        if self.early_stopping not in (True, False, "never"):
            raise BadInput(f'early_stopping = {self.early_stopping!r}: need True, False or "never"')


@dataclass(frozen=True, slots=True)
class Beam:
    """An unfinished continuation and the sum of its log-probabilities."""

    token_ids: tuple[int, ...] = ()
    cumulative_logprob: float = 0.0


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished continuation. `score` is its log-probability over length ** length penalty."""

    token_ids: tuple[int, ...]
    cumulative_logprob: float
    score: float
    finish_reason: str


class BeamSearch:
    """The search for one prompt.

    Attributes:
        beams: to be extended, likeliest first; empty once the search is over.
        hypotheses: the best finished ones, best first.
    """

    def __init__(self, params: BeamSearchParams, eos_token_ids: frozenset[int]) -> None:
        self._params = params
        self._eos = frozenset() if params.ignore_eos else eos_token_ids
        self.beams: list[Beam] = [Beam()]
        self.hypotheses: list[Hypothesis] = []

    @property
    def num_candidates(self) -> int:
        """Top-k tokens of each beam that `advance` needs.

        Each beam may end in each of the EOS tokens; `beam_width` unfinished candidates must remain.
        """
        return max(2, 1 + len(self._eos)) * self._params.beam_width

    def advance(self, likeliest: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Extend each beam by its likeliest tokens, given as (token, log-probability), best first."""
        params, width = self._params, self._params.beam_width
        extended = [
            Beam((*beam.token_ids, token), beam.cumulative_logprob + logprob)
            for beam, tokens in zip(self.beams, likeliest, strict=True)
            for token, logprob in tokens
        ]
        extended.sort(key=lambda beam: beam.cumulative_logprob, reverse=True)
        del extended[self.num_candidates :]
        length = len(extended[0].token_ids)
        is_last = length == params.max_tokens
        # Only the best `beam_width` may finish; the others are there so that enough unfinished remain.
        ended = [
            self._finished(beam) for beam in extended[:width] if is_last or self._is_ended(beam)
        ]
        self.hypotheses = sorted(
            [*self.hypotheses, *ended], key=lambda hypothesis: hypothesis.score, reverse=True
        )[:width]
        self.beams = [] if is_last else [b for b in extended if not self._is_ended(b)][:width]
        if self.beams and len(self.hypotheses) == width and not self._can_improve(length):
            self.beams = []

    def _is_ended(self, beam: Beam) -> bool:
        return beam.token_ids[-1] in self._eos

    def _finished(self, beam: Beam) -> Hypothesis:
        score = beam.cumulative_logprob / len(beam.token_ids) ** self._params.length_penalty
        reason = "stop" if self._is_ended(beam) else "length"
        return Hypothesis(beam.token_ids, beam.cumulative_logprob, score, reason)

    def _can_improve(self, length: int) -> bool:
        """Whether the best beam may still become better than the worst of a full set of hypotheses."""
        params = self._params
        if params.early_stopping is True:
            return False
        if params.early_stopping == "never" and params.length_penalty > 0.0:
            length = params.max_tokens
        best = self.beams[0].cumulative_logprob / length**params.length_penalty
        return best > self.hypotheses[-1].score


@dataclass(frozen=True, slots=True)
class BeamSearchResult:
    """A prompt and its hypotheses with their texts, best first."""

    prompt_token_ids: list[int]
    hypotheses: list[Hypothesis]
    texts: list[str]


def beam_search(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: BeamSearchParams,
    lora: str | None = None,
) -> list[BeamSearchResult]:
    """Search for all prompts together, on an engine without other requests.

    `lora` is the name of the adapter.

    Raises:
        BadInput: a prompt that can never fit, or a width that needs more logprobs than the engine returns.
    """
    searches = [BeamSearch(params, engine.eos_token_ids) for _ in prompts]
    _check(engine, prompts, params, BeamSearch(params, engine.eos_token_ids).num_candidates)
    while any(search.beams for search in searches):
        top_tokens = _likeliest(engine, prompts, searches, lora)
        for index, search in enumerate(searches):
            if search.beams:
                names = [f"beam-{index}-{n}" for n in range(len(search.beams))]
                search.advance([top_tokens[name] for name in names])
    return [
        BeamSearchResult(
            list(prompt),
            search.hypotheses,
            [_text(engine, prompt, hypothesis.token_ids) for hypothesis in search.hypotheses],
        )
        for prompt, search in zip(prompts, searches, strict=True)
    ]


def _check(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: BeamSearchParams,
    num_candidates: int,
) -> None:
    if num_candidates > min(MAX_LOGPROBS, engine.vocab_size):
        raise BadInput(
            f"beam_width = {params.beam_width} needs the {num_candidates} likeliest tokens of a beam: "
            f"at most {min(MAX_LOGPROBS, engine.vocab_size)} can be had"
        )
    longest = max(map(len, prompts), default=0)
    if longest + params.max_tokens > engine.scheduler.longest_sequence:
        raise BadInput(
            f"{longest} prompt tokens and {params.max_tokens} new ones exceed the longest sequence of "
            f"{engine.scheduler.longest_sequence} tokens that fits"
        )


def _likeliest(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    searches: Sequence[BeamSearch],
    lora: str | None,
) -> Mapping[str, Sequence[tuple[int, float]]]:
    """The likeliest next tokens of every beam of every search, by `beam-{search}-{beam}`."""
    top_tokens: dict[str, Sequence[tuple[int, float]]] = {}
    request_ids: list[str] = []
    try:
        for index, (prompt, search) in enumerate(zip(prompts, searches, strict=True)):
            params = SamplingParams(
                max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=search.num_candidates
            )
            for number, beam in enumerate(search.beams):
                request_ids.append(f"beam-{index}-{number}")
                token_ids = [*prompt, *beam.token_ids]
                engine.add_request(request_ids[-1], token_ids, params, lora=lora)
        while engine.has_unfinished():
            for output in engine.step():
                assert output.logprobs is not None
                top_tokens[output.request_id] = output.logprobs[0].top
    finally:
        for request_id in request_ids:
            engine.abort(request_id)
    return top_tokens


def _text(engine: Engine, prompt: Sequence[int], token_ids: Sequence[int]) -> str:
    detokenizer = IncrementalDetokenizer(engine.tokenizer, list(prompt), skip_special_tokens=True)
    return detokenizer.feed(list(token_ids)) + detokenizer.flush()
