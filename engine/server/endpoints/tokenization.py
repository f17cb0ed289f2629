"""Server-side tokenization: prompts, chat templates, and the text of single tokens."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from pydantic import BaseModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ....base.errors import BadInput, ContextOverflow
from ...base.chat_template import render_chat, renders_text
from ...base.turns import TurnReader
from ..parsing.formats import (
    ReasoningFormat,
    ToolFormat,
    format_of_template,
    reasoning_of_template,
)
from ..protocol.chat_protocol import ChatMessage, Tool
from ..protocol.errors import bad_field
from ..protocol.generation_protocol import Prompt
from .capabilities import SizedPool

MAX_PAIR_CHARACTERS = 16 << 20
"""Limit of all pairs of a request: the tokenizer has one thread."""

FILL_MARKERS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)
"""Markers of Qwen and CodeGemma, StarCoder, Granite, and DeepSeek (Bavarian et al., arXiv:2207.14255)."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TokenText:
    """Text of a single token, for log-probabilities.

    Attributes:
        name: text within a sequence; `bytes:\\x..` for a part of a character.
        raw: bytes, None if unknown.
        length: characters that it adds to a text, 0 for a special token.
    """

    name: str
    raw: bytes | None
    length: int


SHORT_CHARACTERS, CHUNK_CHARACTERS = 1 << 15, 1 << 16
"""Characters of the texts of a request that do not wait for longer ones, and of the parts of a text whose
tokens are counted before the whole is tokenized."""


class Tokenization:
    """The server's tokenizer: a copy, because the engine thread uses the original. Encoding runs on two
    worker threads, one for long texts, with a copy each, because a call may set the truncation; `tokenizers`
    encodes batches without Python's lock. Decoding single tokens runs on the event loop, and only reads."""

    def __init__(
        self,
        tokenizer: Any,
        end_token_ids: Collection[int] = (),
        max_model_len: int | None = None,
        chat_template: str | None = None,
        tool_format: ToolFormat | None = None,
        reasoning_format: ReasoningFormat | None = None,
        *,
        takes_images: bool = False,
    ) -> None:
        """`max_model_len` bounds the characters of a prompt before tokenization. `chat_template` overrides
        the model's, `tool_format` and `reasoning_format` override the formats detected from the template."""
        self._tokenizer = copy.deepcopy(tokenizer)
        self._max_model_len = max_model_len
        self._longest_token = max(map(len, self._tokenizer.get_vocab()))
        self._template_override = chat_template
        if chat_template is not None:
            self._tokenizer.chat_template = chat_template
        self.tool_format = tool_format or format_of_template(self.template_text)
        self.reasoning_format = reasoning_format or reasoning_of_template(self.template_text)
        self._workers = SizedPool("tokenizer", SHORT_CHARACTERS)
        self._for_long = copy.deepcopy(self._tokenizer)
        self._special = frozenset(self._tokenizer.all_special_ids)
        self._guard = SpecialTexts(self._tokenizer)
        self.special_texts: Sequence[str] = self._guard.texts
        self._prefix_id = self._encode_text("a", 1)[-1]
        self._prefix_text = self.decode([self._prefix_id], skip_special_tokens=False)
        self._texts: dict[int, TokenText] = {}
        # Templates of some image-text models read lists of parts alone.
        self._as_parts = takes_images and not renders_text(self._tokenizer)
        self._reader = TurnReader(self._tokenizer, as_parts=self._as_parts)
        self.stop_texts = tuple(
            self.decode([token], skip_special_tokens=False) for token in end_token_ids
        )

    @property
    def template_source(self) -> str:
        """Source of the chat template: "file", "model", or "plain" (the fallback)."""
        if self._template_override is not None:
            return "file"
        return "model" if self._tokenizer.chat_template else "plain"

    @cached_property
    def fill_markers(self) -> tuple[str, str, str] | None:
        """Tokens around a prefix and a suffix, and before the text between them; None: the model has none."""
        vocabulary = self._tokenizer.get_vocab().keys()
        return next((markers for markers in FILL_MARKERS if vocabulary >= {*markers}), None)

    def filled_in(self, prompt: Prompt, suffix: str) -> str:
        """The prompt for a text between `prompt` and `suffix`. Raises `ApiError`: the model has no tokens for
        it, or the prompt is token ids."""
        if self.fill_markers is None or not isinstance(prompt, str):
            problem = "the model has no tokens for filling in a text before one"
            problem = problem if self.fill_markers is None else "needs a prompt of text"
            raise bad_field("suffix", problem)
        before, after, between = self.fill_markers
        return f"{before}{prompt}{after}{suffix}{between}"

    @property
    def efforts(self) -> tuple[str, ...]:
        """Reasoning efforts that the chat template takes."""
        return self._reader.efforts

    @property
    def takes_tools(self) -> bool:
        return "tools" in self.template_text

    @property
    def template_text(self) -> str:
        """The template text; all of them joined if the model has several by name."""
        template = self._tokenizer.chat_template or ""
        return template if isinstance(template, str) else "\n".join(template.values())

    async def encode(
        self,
        prompts: Sequence[Prompt],
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
    ) -> list[list[int]]:
        """Tokenize prompts, with the special tokens that the tokenizer adds. `max_tokens` truncates them, -1
        to the context length. Raises `ContextOverflow`."""
        limit = self._limit(max_tokens)
        size = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))

        def encode(prompt: Prompt) -> list[int]:
            if not isinstance(prompt, str):
                return list(prompt)[:limit]
            how: dict[str, Any] = {"add_special_tokens": add_special_tokens, "max_tokens": limit}
            return self._encode_text(prompt, size, **how)

        return await self._workers.run(size, lambda: [encode(prompt) for prompt in prompts])

    async def encode_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        template: str | None = None,
        *,
        max_tokens: int | None = None,
    ) -> list[list[int]]:
        """Tokenize pairs of a query and a document, each for one prompt: by the chat template if it has roles
        of these names, else by `template`, else as the tokenizer joins a pair. Raises `BadInput`: too much
        text, because a long query is tokenized with each document."""
        limit = self._limit(max_tokens)
        num_characters = sum(len(query) + len(document) for query, document in pairs)
        if num_characters > MAX_PAIR_CHARACTERS:
            raise BadInput(
                f"{len(pairs)} pairs have {num_characters} characters, at most {MAX_PAIR_CHARACTERS} may"
            )
        how = (num_characters, template, limit)
        return await self._workers.run(
            num_characters, lambda: [self._encode_pair(*pair, *how) for pair in pairs]
        )

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Tokenize a conversation, with the generation prompt unless the template's `options` say otherwise.
        Raises `BadInput`: the model's template rejects the conversation."""
        size = await self._checked_size(messages, tools)

        def encode() -> list[int]:
            text = self._render_chat(messages, tools, options or {})
            # The model's template renders special tokens itself.
            return self._encode_text(text, size, add_special_tokens=self.template_source == "plain")

        return await self._workers.run(size, encode)

    async def render_chat(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool], options: Mapping[str, Any]
    ) -> str:
        """The text of a conversation with images, a placeholder for each. Raises `BadInput`: as
        `encode_chat`, or a model without a chat template."""
        if self.template_source == "plain":
            raise BadInput(
                "messages: the model has no chat template, which says where images stand; give one with "
                "--chat-template"
            )
        return await self._workers.run(
            await self._checked_size(messages, tools),
            # The processor of images tokenizes by itself.
            lambda: self._checked_text(self._render_chat(messages, tools, options, guarded=False)),
        )

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    async def decode_all(self, token_ids: Sequence[int]) -> str:
        decode = partial(self.decode, token_ids, skip_special_tokens=False)
        return await self._workers.run(len(token_ids), decode)

    def token(self, token_id: int) -> TokenText:
        """Text, bytes and length of a token; cached."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._describe(token_id)
        return text

    def close(self) -> None:
        self._workers.close()

    def _limit(self, max_tokens: int | None) -> int | None:
        return self._max_model_len if max_tokens == -1 else max_tokens

    def _encode_pair(
        self, query: str, document: str, size: int, template: str | None, max_tokens: int | None
    ) -> list[int]:
        names = self.template_text
        if all(f'"{role}"' in names or f"'{role}'" in names for role in ("query", "document")):
            turns = [{"role": "query", "content": query}, {"role": "document", "content": document}]
            how = {"tokenize": False, "add_generation_prompt": True}
            text = self._tokenizer.apply_chat_template(turns, **how)
        elif template is not None:
            text = template.replace("{query}", query, 1).replace("{document}", document, 1)
        else:
            for text in (query, document):
                self._checked_text(text)
            tokenizer = self._for_long if size > SHORT_CHARACTERS else self._tokenizer
            return list(tokenizer(query, document, **_truncation(max_tokens)).input_ids)
        return self._encode_text(text, size, add_special_tokens=False, max_tokens=max_tokens)

    def _encode_text(
        self,
        text: str,
        size: int,
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Tokenize one of the texts of a request, which have `size` characters in all."""
        tokenizer = self._for_long if size > SHORT_CHARACTERS else self._tokenizer
        text = self._bounded(tokenizer, self._checked_text(text), max_tokens)
        options = {"add_special_tokens": add_special_tokens, **_truncation(max_tokens)}
        encoded = tokenizer(text, **options)
        ids = list(encoded.input_ids)
        if BREAK not in text or not encoded.is_fast:  # without offsets nothing was broken
            return ids
        spans = zip(ids, encoded[0].offsets, strict=True)
        return [token for token, (begin, end) in spans if text[begin:end] != BREAK]

    def _bounded(self, tokenizer: Any, text: str, max_tokens: int | None) -> str:
        """The text, cut after twice the tokens that truncation keeps. Raises `BadInput`: it has twice the
        tokens of the context, which would take memory for nothing."""
        limit = self._max_model_len if max_tokens is None else max_tokens
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if limit is None or len(text) <= max(2 * limit, CHUNK_CHARACTERS) or backend is None:
            return text
        backend.no_truncation()
        num_tokens = 0
        for end in range(CHUNK_CHARACTERS, len(text) + CHUNK_CHARACTERS, CHUNK_CHARACTERS):
            (encoded,) = backend.encode_batch([text[end - CHUNK_CHARACTERS : end]])
            # Half of them: a token that is cut, and breaks, count several times.
            num_tokens += len(encoded) // 2
            if num_tokens > limit and max_tokens is None:
                raise ContextOverflow(num_tokens, 0, limit, least=True)
            if num_tokens > limit and tokenizer.truncation_side == "right":
                return text[:end]
        return text

    async def _checked_size(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> int:
        """Characters of a conversation. Raises `BadInput`: no prompt of the context has as many."""
        size = 0
        for message in messages:
            texts = (call.function.arguments for call in message.tool_calls or ())
            texts = (message.content, message.reasoning_content, *texts)
            size += sum(len(text) for text in texts if text)
        if tools:
            functions = [tool.function for tool in tools]
            size += await self._workers.run(0, lambda: sum(map(num_characters, functions)))
        self._check_characters(size)
        return size

    def _check_characters(self, size: int) -> None:
        limit = self._max_model_len
        if limit is not None and size > limit * self._longest_token:
            # Tokenizing it could take minutes of a worker thread.
            raise ContextOverflow(limit + 1, 0, limit, least=True)

    def _checked_text(self, text: str) -> str:
        self._check_characters(len(text))
        return text

    def _render_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        options: Mapping[str, Any],
        *,
        guarded: bool = True,
    ) -> str:
        described: Any = [tool.for_template() for tool in tools] or None
        turns = [message.for_template(as_parts=self._as_parts) for message in messages]
        turns = self._reader.read(turns)
        if guarded:
            described = self._guard.broken(described)
            turns = [t if t["role"] == "assistant" else self._guard.broken(t) for t in turns]
        return render_chat(self._tokenizer, turns, {**options, "tools": described})

    def _describe(self, token_id: int) -> TokenText:
        # Decoded after another token, because decoders strip the leading space of the first word.
        text = self.decode([self._prefix_id, token_id], skip_special_tokens=False)
        if text.startswith(self._prefix_text):
            text = text[len(self._prefix_text) :]
        if token_id in self._special:
            return TokenText(text, text.encode(), 0)
        if "\ufffd" not in text:
            return TokenText(text, text.encode(), len(text))
        raw = _raw_bytes(self._tokenizer.convert_ids_to_tokens(token_id))
        if raw is None:
            return TokenText(text, None, len(text))
        name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return TokenText(name, raw, len(text))


BREAK = "\ufdd0"
"""A character that no text has: Unicode keeps it for a program's own use."""


class SpecialTexts:
    """Special tokens that a message or a tool spells out, which are text there: `<|im_end|>` ends no turn. A
    break after the first character of each, before the template is rendered, keeps the tokenizer from taking
    it whole; the tokens of breaks are left out of the prompt."""

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        added = {} if backend is None else backend.get_added_tokens_decoder()
        special = (token.content for token in added.values() if token.special)
        self.texts = sorted(text for text in special if len(text) > 1 and BREAK not in text)

    def broken(self, value: Any) -> Any:
        """A message or a tool for the template, with a break in each special token of its texts."""
        if isinstance(value, str):
            for text in self.texts:
                while text in value:  # one may begin within another of the same text
                    value = value.replace(text, f"{text[0]}{BREAK}{text[1:]}")
            return value
        if isinstance(value, dict):
            return {self.broken(key): self.broken(inner) for key, inner in value.items()}
        return [self.broken(inner) for inner in value] if isinstance(value, list) else value


def num_characters(value: Any) -> int:
    """Characters of the texts in a JSON value or a model of one, and one for each other value."""
    size, waiting = 0, [value]
    while waiting:
        match waiting.pop():
            case str() as text:
                size += len(text)
            case dict() as inner:
                waiting += (*inner, *inner.values())
            case list() as inner:
                waiting += inner
            case BaseModel() as model:
                waiting += model.__dict__.values()
            case _:
                size += 1
    return size


def _truncation(max_tokens: int | None) -> dict[str, Any]:
    """Options of the tokenizer, which keeps its special tokens when it truncates."""
    return {} if max_tokens is None else {"truncation": True, "max_length": max_tokens}


def _raw_bytes(token: str) -> bytes | None:
    """Bytes of a token that is not valid UTF-8 by itself, from its vocabulary entry: `<0xE2>` is a byte token
    of SentencePiece; byte-level BPE (GPT-2) maps every byte to a printable character."""
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    if all(character in _BYTE_OF for character in token):
        return bytes(_BYTE_OF[character] for character in token)
    return None


_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}
"""GPT-2's byte alphabet."""
