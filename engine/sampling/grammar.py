"""Structured output: grammar-constrained decoding by token bitmasks, through llguidance.

https://github.com/guidance-ai/llguidance compiles JSON schemas, regular expressions and context-free
grammars, and computes the mask of allowed tokens at any point of an output.
"""

from __future__ import annotations

import json
import logging
import textwrap
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from threading import Lock
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer, grammar_from
from llguidance.hf import from_tokenizer

from ...base.errors import BadInput
from .schema_limits import enforceable
from .structural_tag import structural_tag

_log = logging.getLogger(__name__)

WHITESPACE = " ?"
"""Whitespace allowed between JSON tokens. An unbounded pattern would let a model emit whitespace forever."""

REMEMBERED_CHARACTERS = 256 << 10
"""Characters of the grammars whose compilations stay in the cache: 190 kB take 8 MiB."""
_SHARED = ("$defs", "definitions")
MESSAGE_CHARACTERS = 400
MAX_SUBSCHEMAS, SEARCH_SECONDS = 200, 1.0
"""Limits of the search for an error: subschemas compiled, and time after which no other is."""


def json_schema(schema: Mapping[str, Any]) -> str:
    """Grammar of the JSON texts that a schema allows.

    Raises:
        BadInput: the schema is nested too deep.
    """
    defaults: Any = {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=defaults)
    except (ValueError, RecursionError) as error:
        raise BadInput(_one_line(str(error))) from error


def regex(pattern: str) -> str:
    """Grammar of the full matches of a pattern; Rust's syntax, without look-around and back-references."""
    return LLMatcher.grammar_from_regex(pattern)


def choice(texts: Sequence[str]) -> str:
    """Grammar of exactly one of `texts`.

    Raises:
        BadInput: no text, or an empty one.
    """
    if not texts or not all(texts):
        raise BadInput("choice: need at least one text, and no empty one")
    return grammar_from("choice", json.dumps(list(texts)))


def context_free(text: str) -> str:
    """A grammar in llguidance's Lark dialect, or in GBNF or EBNF (`root ::= ...`).

    Raises:
        BadInput: it looks like GBNF and does not parse.
    """
    try:
        return grammar_from("grammar", text)
    except ValueError as error:
        raise BadInput(f"grammar: {_one_line(str(error))}") from error


class GrammarCompiler:
    """Compiles grammars for a tokenizer into token masks; compiled grammars are cached (LRU).

    Raises:
        BadInput: the tokenizer is not one of the `tokenizers` library, or there is no EOS token.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_token_ids: Collection[int]) -> None:
        if not end_token_ids:
            raise BadInput(
                "structured output needs a token that ends a sequence: the model names none"
            )
        try:
            self._tokens: LLTokenizer = from_tokenizer(
                getattr(tokenizer, "whole", tokenizer),  # transformers' own
                n_vocab=vocab_size,
                eos_token=sorted(end_token_ids),
            )
        except ValueError as error:
            raise BadInput(f"structured output needs a fast tokenizer: {error}") from error
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._special = {
            str(token): index
            for index, token in added.items()
            if self._tokens.is_special_token(index)
        }
        self._num_words = -(-vocab_size // 32)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def mask(self, grammar: str, num_sequences: int = 1) -> GrammarMask:
        """The mask of one request with `num_sequences` completions.

        Raises:
            BadInput: the grammar is invalid, or uses what llguidance does not support.
        """
        with self._lock:
            matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = LLMatcher(self._tokens, grammar, log_level=0)
            if matcher.is_error():
                raise BadInput(_one_line(LLMatcher.validate_grammar(grammar, self._tokens)))
        with self._lock:
            self._compiled[grammar] = matcher
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > 1 and sum(map(len, self._compiled)) > REMEMBERED_CHARACTERS:
                self._compiled.popitem(last=False)
        return GrammarMask(matcher.deep_copy(), self._num_words, num_sequences)

    def json_schema_mask(self, schema: Mapping[str, Any], num_sequences: int = 1) -> GrammarMask:
        """Compile a schema to a mask; an error names the JSON pointer of the failing part."""
        schema = enforceable(schema)
        try:
            return self.mask(json_schema(schema), num_sequences)
        except BadInput as error:
            path = self._place_of_error(schema, str(error))
            raise BadInput(f"{path}: {error}" if path else str(error)) from error

    def structural_tag_mask(self, tag: Mapping[str, Any], num_sequences: int = 1) -> GrammarMask:
        """Compile a structural tag to a mask; special tokens of the tokenizer are tokens in its texts."""
        return self.mask(structural_tag(tag, WHITESPACE, self._special), num_sequences)

    def _place_of_error(self, schema: Mapping[str, Any], message: str) -> str:
        """JSON pointer of the smallest subschema that fails with `message`; "" for the whole.

        llguidance does not report it, so every part that could be a schema is compiled separately.
        """
        shared = {key: schema[key] for key in _SHARED if key in schema}
        path, left = "", MAX_SUBSCHEMAS
        deadline = time.monotonic() + SEARCH_SECONDS
        failing: Mapping[str, Any] | None = schema
        message = _cause(message)
        while failing is not None:
            inner, failing = failing, None
            for pointer, part in _parts(inner):
                left -= 1
                if left < 0 or time.monotonic() > deadline:
                    return path
                text = json_schema({**shared, **part})
                if _cause(LLMatcher.validate_grammar(text, self._tokens)) == message:
                    path, failing = path + pointer, part
                    break
        return path


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects directly below the keywords of a schema, with their JSON pointers."""
    # Definitions first: an error in one appears wherever it is referenced.
    for key, value in sorted(schema.items(), key=lambda item: item[0] not in _SHARED):
        name = f"/{_escaped(key)}"
        if isinstance(value, dict):
            yield name, value
            # Keywords that hold schemas by name, such as `properties`.
            for inner, part in value.items():
                if isinstance(part, dict):
                    yield f"{name}/{_escaped(inner)}", part
        elif isinstance(value, list):
            for index, part in enumerate(value):
                if isinstance(part, dict):
                    yield f"{name}/{index}", part


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _cause(message: str) -> str:
    """An error message without the definition that llguidance was processing."""
    return _one_line(message).partition(" while processing ")[0]


def _one_line(message: str) -> str:
    """One line of at most `MESSAGE_CHARACTERS`: llguidance quotes long grammars."""
    return textwrap.shorten(message[:10_000], MESSAGE_CHARACTERS, placeholder=" ...")


class GrammarMask:
    """`TokenMask` of a grammar.

    It keeps a matcher state per completion, with the tokens that it has consumed. Each call takes the state
    with the longest common prefix, rolls it back over tokens that differ (rejected draft tokens) and consumes
    the new ones (usually one). While there are fewer states than completions, a state is copied instead of
    rolled back: it belongs to another completion.
    """

    def __init__(self, matcher: LLMatcher, num_words: int, num_sequences: int) -> None:
        self._states = [_MatcherState(matcher)]
        self._num_words = num_words
        self._num_sequences = num_sequences

    def allowed(self, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
        tokens = list(output)
        state = max(self._states, key=lambda state: state.merit(tokens))
        common = state.num_common(tokens)
        if common < len(state.tokens) and len(self._states) < self._num_sequences:
            state = state.copy()
            self._states.append(state)
        mask = torch.zeros(self._num_words, dtype=torch.int32)
        if state.move_to(tokens, common):
            state.matcher.unsafe_compute_mask_ptr(mask.data_ptr(), 4 * self._num_words)
            if state.matcher.is_error():
                _log.warning("grammar matcher failed: %s", _one_line(state.matcher.get_error()))
        return mask


class _MatcherState:
    """A matcher and the tokens that it has consumed, all of which the grammar allows."""

    def __init__(self, matcher: LLMatcher, tokens: list[int] | None = None) -> None:
        self.matcher = matcher
        self.tokens = tokens or []

    def copy(self) -> _MatcherState:
        return _MatcherState(self.matcher.deep_copy(), [*self.tokens])

    def merit(self, tokens: list[int]) -> tuple[int, int]:
        """Longer common prefixes are better; among equals, fewer tokens to roll back."""
        common = self.num_common(tokens)
        return common, common - len(self.tokens)

    def num_common(self, tokens: list[int]) -> int:
        """Length of the common prefix."""
        low, high = 0, min(len(tokens), len(self.tokens))
        if self.tokens[:high] == tokens[:high]:
            return high
        while low + 1 < high:
            middle = (low + high) // 2
            same = self.tokens[low:middle] == tokens[low:middle]
            low, high = (middle, high) if same else (low, middle)
        return low

    def move_to(self, tokens: list[int], common: int) -> bool:
        """Roll back to the first `common` tokens, consume the rest; False where the grammar rejects one."""
        surplus = len(self.tokens) - common
        if surplus:
            self.matcher.rollback(surplus)
            del self.tokens[common:]
        new = tokens[common:]
        if not new:
            return True
        num_valid = self.matcher.validate_tokens(new)
        self.matcher.consume_tokens(new[:num_valid])
        self.tokens += new[:num_valid]
        return num_valid == len(new)
