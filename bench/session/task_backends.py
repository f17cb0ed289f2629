"""Task backends: an idle engine in this process, batched, and a server over HTTP. The engine's chats are
rendered by the model's template and parsed as the server does.

A server gives log-probabilities of prompts and completions, as lm-eval's `local-completions` and
`local-chat-completions` take them, with the tokens and windows of its `hf` model.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...base.errors import BadInput
from ...base.progress import Progress, Silent
from ...engine.base.sampling_params import SamplingParams
from ...engine.server.parsing.formats import HARMONY, Parsed
from ...engine.server.parsing.parser import OutputFormat, OutputParser
from ..load.address import CHAT, PATHS, Address, ServedModel
from ..load.json_http import TOKEN_ID, JsonClient, PromptLogprobs, RequestFailed, probe_prompt
from ..load.stream import FINISHED, SHARE_READ
from ..quality.chat_items import Chat, ChatAnswer
from .tasks import TargetScore, TaskGeneration, TaskWindow, before_stops, decode

if TYPE_CHECKING:
    from ...engine.core.engine import Engine
    from ...engine.scheduling.outputs import TokenLogprobs

_log = logging.getLogger(__name__)
# Requests queued in the engine at once: enough for full batches, few enough to poll cheaply.
QUEUED = 256
TOKEN_NAME = re.compile(rf"{TOKEN_ID}(\d+)")
# Fields beyond OpenAI's, sent only where a task sets them.
EXTRA = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "top_p": 1.0}


class EngineBackend:
    """A `TaskBackend` on an engine."""

    sends_messages = False
    chat_form = "chats by the model's template and parser, calls unconstrained"

    def __init__(self, engine: Engine, progress: Progress | None = None) -> None:
        self._engine = engine
        self._progress = progress or Silent()
        self.tokenizer = engine.tokenizer
        self.longest = engine.scheduler.longest_sequence
        slots = engine.stats.kv_blocks_total * engine.scheduler.config.block_size
        self.max_inputs = min(engine.max_model_len, slots)

    def score(self, windows: Sequence[TaskWindow], what: str) -> list[list[TargetScore]]:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        # A request holds the last target and one generated token beyond the inputs of a window.
        fits = [window for window in windows if len(window.inputs) + 2 <= self.longest]
        prompts = [([*window.inputs, window.targets[-1]], params) for window in fits]
        answers = iter(self._complete(prompts, what))
        scored = []
        for window in windows:
            is_short = len(window.inputs) + 2 <= self.longest
            tokens = next(answers)[1] if is_short else self._score_full(window)
            targets = filter(None, tokens[-len(window.targets) :])
            scored.append([TargetScore(token.logprob, token.rank == 1) for token in targets])
        return scored

    def generate(self, requests: Sequence[TaskGeneration], what: str) -> list[str]:
        prompts = [(request.token_ids, request.params) for request in requests]
        answers = self._complete(prompts, what)
        return [
            decode(self.tokenizer, tokens, request.params.stop)
            for (tokens, _, _), request in zip(answers, requests, strict=True)
        ]

    def converse(self, chats: Sequence[Chat], what: str) -> list[ChatAnswer]:
        """Raises BadInput: the template refuses a chat, or it does not fit."""
        rendered = EngineChats(self._engine, self.longest)
        prompts = rendered.prompts(chats)
        answers = self._complete([(prompt.token_ids, prompt.params) for prompt in prompts], what)
        return [
            rendered.answer(prompt, tokens, finish)
            for prompt, (tokens, _, finish) in zip(prompts, answers, strict=True)
        ]

    def _score_full(self, window: TaskWindow) -> list[TokenLogprobs]:
        from ...engine.sampling.sampler import rows_per_slice, sliced_logprobs

        engine = self._engine
        hidden = engine.hidden_states(window.inputs)[-len(window.targets) :]
        logits, num_rows = engine.runner.decoder.logits, rows_per_slice(engine.vocab_size)
        return sliced_logprobs(logits, hidden, window.targets, 0, num_rows)

    def _complete(
        self, prompts: Sequence[tuple[list[int], SamplingParams]], what: str
    ) -> list[tuple[list[int], tuple[TokenLogprobs | None, ...], str]]:
        """New tokens, prompt logprobs and reason of the end of each prompt, batched by the engine."""
        written: list[list[int]] = [[] for _ in prompts]
        scores: list[tuple[TokenLogprobs | None, ...]] = [()] * len(prompts)
        finishes = [""] * len(prompts)
        left, active = deque(enumerate(prompts)), set[str]()
        self._progress.start(what, len(prompts), "requests")
        try:
            while left or active:
                while left and len(active) < QUEUED:
                    number, (tokens, params) = left.popleft()
                    self._engine.add_request(str(number), tokens, params)
                    active.add(str(number))
                for output in self._engine.step():
                    written[int(output.request_id)].extend(output.new_token_ids)
                    if output.prompt_logprobs is not None:
                        scores[int(output.request_id)] = output.prompt_logprobs
                    if output.finish_reason is not None:
                        finishes[int(output.request_id)] = output.finish_reason
                        active.remove(output.request_id)
                        self._progress.advance()
        finally:
            for request_id in active:
                self._engine.abort(request_id)
            self._progress.finish()
        return list(zip(written, scores, finishes, strict=True))


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered chat, with its sampling and how its output is parsed; `takes_tools` is False if the template
    leaves the tools out."""

    token_ids: list[int]
    params: SamplingParams
    form: OutputFormat
    takes_tools: bool


class EngineChats:
    """Rendering and parsing of chats by the server's code; calls are not constrained by a grammar."""

    def __init__(self, engine: Engine, longest: int) -> None:
        from ...engine.server.endpoints.capabilities import default_sampling
        from ...engine.server.endpoints.tokenization import Tokenization

        self._longest, self._tokenizer = longest, engine.tokenizer
        self._text = Tokenization(engine.tokenizer, engine.eos_token_ids)
        self._sampling = default_sampling(engine.folder)

    def prompts(self, chats: Sequence[Chat]) -> list[ChatPrompt]:
        """The prompts of all chats. Call it once: it ends the tokenizer's threads; decoding still works.

        Raises BadInput: the template refuses a chat, or a prompt leaves no room for an answer.
        """

        async def rendered() -> list[ChatPrompt]:
            return [await self._prompt(chat) for chat in chats]

        try:
            return asyncio.run(rendered())
        finally:
            self._text.close()

    def answer(self, prompt: ChatPrompt, tokens: Sequence[int], finish: str) -> ChatAnswer:
        text = self._text.decode(tokens, skip_special_tokens=prompt.params.skip_special_tokens)
        parsed = Parsed()
        parsed.add(OutputParser(prompt.form).feed(text, is_last=True))
        calls = tuple((call.name, call.arguments) for call in parsed.calls)
        encode = self._tokenizer.encode
        thought = encode(parsed.reasoning, add_special_tokens=False) if parsed.reasoning else ()
        counts = len(tokens), len(thought)
        return ChatAnswer(parsed.text, parsed.reasoning, calls, finish, *counts, prompt.takes_tools)

    async def _prompt(self, chat: Chat) -> ChatPrompt:
        from ...engine.server.endpoints.conversation import PROMPT_END
        from ...engine.server.protocol.chat_protocol import ChatMessage, Tool

        text = self._text
        messages = [ChatMessage.model_validate(message) for message in chat.messages]
        tools = [Tool.model_validate(tool) for tool in chat.tools]
        options = {"add_generation_prompt": True}
        token_ids = await text.encode_chat(messages, tools, options)
        takes_tools = not tools or token_ids != await text.encode_chat(messages, (), options)
        if (room := self._longest - len(token_ids)) < 1:
            raise BadInput(
                f"a chat of the tasks has {len(token_ids)} tokens, {self._longest} fit with its answer"
            )
        reasoning = text.reasoning_format
        end = text.decode(token_ids[-PROMPT_END:], skip_special_tokens=False)
        form = OutputFormat(
            text.tool_format if tools or text.tool_format is HARMONY else None,
            reasoning,
            reasoning is not None and reasoning.is_begun_by(end),
            {tool.function.name: tool.function.parameters for tool in tools},
            stop_texts=text.stop_texts,
        )
        sampling: dict[str, Any] = {"temperature": 0.0}
        if chat.seed is not None:
            sampling = {**self._sampling, "seed": chat.seed}
        params = SamplingParams(
            max_tokens=min(chat.max_tokens, room),
            skip_special_tokens=not form.needs_special_tokens,
            **sampling,
        )
        return ChatPrompt(token_ids, params, form, takes_tools)


class ServedBackend:
    """A `TaskBackend` over HTTP; with chat the server's template applies, to generation tasks alone."""

    chat_form = "chats by the server's template and parser"

    def __init__(
        self,
        client: JsonClient,
        address: Address,
        served: ServedModel,
        *,
        backend: str,
        concurrency: int,
        progress: Progress | None = None,
    ) -> None:
        self._client, self._address, self._served = client, address, served
        self._concurrency = concurrency
        self._progress = progress or Silent()
        self._scoring: PromptLogprobs | None = None
        self.sends_messages = backend == CHAT
        self.tokenizer: Any = served.tokenizer
        self.longest = served.max_model_len
        # A prompt holds the last target too, and servers want room for a generated token.
        self.max_inputs = served.max_model_len - 2

    def score(self, windows: Sequence[TaskWindow], what: str) -> list[list[TargetScore]]:
        """Raises `NoPromptLogprobs` where the server gives none, `RequestFailed` where a request fails."""
        if self.sends_messages:
            raise BadInput(
                "chats have no log-probabilities of a prompt: score the task with --backend openai"
            )
        if self._scoring is None:
            self._scoring = PromptLogprobs.probed(
                self._client,
                self._address.completions_url,
                self._served.model,
                probe_prompt(self.tokenizer),
                num_top=1,
                concurrency=self._concurrency,
            )
        prompts = [[*window.inputs, window.targets[-1]] for window in windows]
        scores = []
        with progressing(self._progress, what, len(windows)):
            for window, tokens in zip(windows, self._scoring.scores(prompts), strict=True):
                of_targets = tokens[-len(window.targets) :]
                scores.append([TargetScore(token.logprob, token.is_greedy) for token in of_targets])
                self._progress.advance()
        return scores

    def generate(self, requests: Sequence[TaskGeneration], what: str) -> list[str]:
        """Raises `RequestFailed` where a request fails, the server reads prompts in part, or half of the
        answers end within their reasoning."""
        url = self._address.request_url if self.sends_messages else self._address.completions_url
        bodies = [self._body(request) for request in requests]
        texts, num_read, num_unfinished = [], 0, 0
        with progressing(self._progress, what, len(bodies)):
            answers = self._answers(url, bodies)
            for request, answer in zip(requests, answers, strict=True):
                texts.append(self._text(answer, request.params.stop))
                num_unfinished += not texts[-1] and _ends_in_reasoning(answer)
                num_read = max(num_read, (answer.get("usage") or {}).get("prompt_tokens") or 0)
                self._progress.advance()
        if num_unfinished:
            problem = (
                f"{num_unfinished} of {len(texts)} answers ended within their reasoning: serve the model "
                "with thinking off"
            )
            if 2 * num_unfinished >= len(texts):
                raise RequestFailed(problem)
            _log.warning("%s; they count as wrong", problem)
        longest = max(map(self._num_tokens, requests), default=0)
        if 0 < num_read < SHARE_READ * longest:
            raise RequestFailed(
                f"the server read at most {num_read:,} of {longest:,} tokens of a prompt: it cuts prompts "
                "silently, so raise its context"
            )
        return texts

    def _num_tokens(self, request: TaskGeneration) -> int:
        """Tokens of a prompt; of messages those of their texts, without the template's."""
        texts = [str(message["content"]) for message in request.messages or ()]
        return len(request.token_ids) or sum(
            len(self.tokenizer.encode(text, add_special_tokens=False)) for text in texts
        )

    def converse(self, chats: Sequence[Chat], what: str) -> list[ChatAnswer]:
        """Raises `RequestFailed` where a request fails, other than for its tools."""
        url = self._address.url + PATHS[CHAT]
        takes_tools = not chats or not chats[0].tools or self._takes_tools(url, chats[0])
        bodies = [self._chat_body(chat, with_tools=takes_tools) for chat in chats]
        answers = []
        with progressing(self._progress, what, len(bodies)):
            for answer in self._answers(url, bodies):
                try:
                    answers.append(self._counted(ChatAnswer.of(answer, takes_tools)))
                except (LookupError, TypeError, AttributeError) as error:
                    raise BadInput("an answer of the server is no chat completion") from error
                self._progress.advance()
        return answers

    def _answers(self, url: str, bodies: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Answers in order. Raises `RequestFailed` for one that the server gave up, whose text is a part."""
        for answer in self._client.post_each(url, bodies, self._concurrency):
            for choice in answer.get("choices") or ():
                reason = choice.get("finish_reason") if isinstance(choice, dict) else None
                if reason and reason not in FINISHED:
                    raise RequestFailed(f"the answer ended with finish_reason {reason!r}")
            yield answer

    def _takes_tools(self, url: str, chat: Chat) -> bool:
        """False if the server refuses tools, or if they add nothing to the prompt."""
        bodies = [
            self._chat_body(chat, with_tools=shown) | {"max_tokens": 1} for shown in (True, False)
        ]
        try:
            usages = [self._client.post_again(url, body).get("usage") for body in bodies]
        except RequestFailed as error:
            if error.status in (None, 401, 403, 429):
                raise
            return False
        shown, hidden = ((usage or {}).get("prompt_tokens") for usage in usages)
        return shown is None or hidden is None or shown > hidden

    def _counted(self, answer: ChatAnswer) -> ChatAnswer:
        """The answer with the tokens that the server does not count, by the tokenizer."""
        counts = {"num_tokens": answer.reasoning + answer.text, "num_reasoning": answer.reasoning}
        own = {
            name: len(self.tokenizer.encode(text, add_special_tokens=False))
            for name, text in counts.items()
            if text and not getattr(answer, name)
        }
        return replace(answer, **own)

    def _chat_body(self, chat: Chat, *, with_tools: bool = True) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self._served.model, "max_tokens": chat.max_tokens}
        # Without a temperature a server samples as the model recommends.
        body |= {"temperature": 0} if chat.seed is None else {"seed": chat.seed}
        if with_tools and chat.tools:
            body |= {"tools": list(chat.tools), "tool_choice": "auto"}
        return body | {"messages": list(chat.messages)}

    def _body(self, request: TaskGeneration) -> dict[str, Any]:
        params = request.params
        body: dict[str, Any] = {"model": self._served.model, "temperature": params.temperature}
        body["seed"] = params.seed
        for name, usual in EXTRA.items():
            if (value := getattr(params, name)) != usual:
                body[name] = value
        if params.stop:  # OpenAI's limit is four; the text is cut at every one of them here
            body["stop"] = list(params.stop[:4])
        if request.messages is not None:
            limit = {"max_tokens": params.max_tokens}
            return body | limit | {"messages": request.messages}
        # The ids of the new tokens are decoded here as in process; a server without them gives their text.
        ids = {"logprobs": 0, "return_tokens_as_token_ids": True}
        return body | ids | {"prompt": request.token_ids, "max_tokens": params.max_tokens}

    def _text(self, answer: dict[str, Any], stops: Sequence[str]) -> str:
        try:
            choice = answer["choices"][0]
            if "message" in choice:
                return before_stops(choice["message"].get("content") or "", stops)
            names = (choice.get("logprobs") or {}).get("tokens") or []
            ids = [TOKEN_NAME.fullmatch(name) for name in names]
            if ids and all(ids):
                return decode(self.tokenizer, [int(match[1]) for match in ids if match], stops)
            return before_stops(choice["text"], stops)
        except (LookupError, TypeError, AttributeError) as error:
            raise BadInput("an answer of the server is no completion") from error


def _ends_in_reasoning(answer: dict[str, Any]) -> bool:
    choice = answer["choices"][0]
    message = choice.get("message") or {}
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    return choice.get("finish_reason") == "length" and bool(thoughts)


@contextmanager
def progressing(progress: Progress, what: str, count: int) -> Iterator[None]:
    """A progress bar over `count` requests, which ends with an error too."""
    progress.start(what, count, "requests")
    try:
        yield
    finally:
        progress.finish()
