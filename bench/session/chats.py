"""Chats on an engine of this process, rendered by the model's template and parsed as the server does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...base.errors import BadInput
from ...engine.base.sampling_params import SamplingParams
from ...engine.server.parsing.formats import HARMONY, Parsed
from ...engine.server.parsing.parser import OutputFormat, OutputParser
from ..quality.chat_items import Chat, ChatAnswer

if TYPE_CHECKING:
    from ...engine.core.engine import Engine


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
