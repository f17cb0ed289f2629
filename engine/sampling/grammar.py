"""Structured output: grammars that a completion must follow, as token masks, through llguidance.

https://github.com/guidance-ai/llguidance reads JSON schemas, regular expressions and context-free grammars,
and computes for any point in a text which tokens may follow.
"""

from __future__ import annotations

import json
import logging
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer, grammar_from
from llguidance.hf import from_tokenizer

from ...quant.base.errors import BadInput

_log = logging.getLogger(__name__)

WHITESPACE = " ?"
"""Between the parts of a JSON text. More of it would let a model that does not know what to say write it
for ever."""

REMEMBERED_GRAMMARS = 64
_SHARED = ("$defs", "definitions")
MESSAGE_CHARACTERS = 400
MAX_SUBSCHEMAS = 200
"""That are looked at to say which of them is wrong."""


def json_schema(schema: Mapping[str, Any]) -> str:
    """JSON texts that the schema admits."""
    return LLMatcher.grammar_from_json_schema(
        json.dumps(schema), defaults={"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
    )


def json_object() -> str:
    """Any JSON object."""
    return json_schema({"type": "object"})


def regex(pattern: str) -> str:
    """Texts that the whole pattern matches; Rust's syntax, without look-around and back-references."""
    return LLMatcher.grammar_from_regex(pattern)


def choice(texts: Sequence[str]) -> str:
    """One of `texts`.

    Raises:
        BadInput: there is none, or one is empty.
    """
    if not texts or not all(texts):
        raise BadInput("choice: need at least one text, and no empty one")
    return grammar_from("choice", json.dumps(list(texts)))


def context_free(text: str) -> str:
    """A grammar in llguidance's Lark dialect, or in GBNF or EBNF (`root ::= ...`).

    Raises:
        BadInput: it reads as GBNF and is none.
    """
    try:
        return grammar_from("grammar", text)
    except ValueError as error:
        raise BadInput(f"grammar: {_one_line(str(error))}") from error


class GrammarCompiler:
    """Makes token masks of grammars for the tokens of one model.

    Raises:
        BadInput: the tokenizer is not one of the `tokenizers` library, or nothing ends a sequence.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_token_ids: Collection[int]) -> None:
        if not end_token_ids:
            raise BadInput(
                "structured output needs a token that ends a sequence: the model names none"
            )
        try:
            self._tokens: LLTokenizer = from_tokenizer(
                tokenizer, n_vocab=vocab_size, eos_token=sorted(end_token_ids)
            )
        except ValueError as error:
            raise BadInput(f"structured output needs a fast tokenizer: {error}") from error
        self._num_words = -(-vocab_size // 32)
        self._compiled = lru_cache(REMEMBERED_GRAMMARS)(self._compile)

    def mask(self, grammar: str, num_sequences: int = 1) -> GrammarMask:
        """The mask of one request that draws `num_sequences` completions.

        Raises:
            BadInput: the grammar is wrong, or asks for what llguidance does not have.
        """
        return GrammarMask(self._compiled(grammar).deep_copy(), self._num_words, num_sequences)

    def json_schema_mask(self, schema: Mapping[str, Any], num_sequences: int = 1) -> GrammarMask:
        """As `mask`; the error of a wrong schema names the place in it."""
        try:
            return self.mask(json_schema(schema), num_sequences)
        except BadInput as error:
            place = self._place_of_error(schema, str(error))
            raise BadInput(f"{place}: {error}" if place else str(error)) from error

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            raise BadInput(_one_line(LLMatcher.validate_grammar(grammar, self._tokens)))
        return matcher

    def _place_of_error(self, schema: Mapping[str, Any], message: str) -> str:
        """JSON pointer of the smallest subschema that fails with `message`; "" for the whole.

        llguidance does not say it, so every part that could be a schema is compiled by itself.
        """
        shared = {key: schema[key] for key in _SHARED if key in schema}
        place, left = "", MAX_SUBSCHEMAS
        found: Mapping[str, Any] | None = schema
        message = _cause(message)
        while found is not None:
            inner, found = found, None
            for pointer, part in _parts(inner):
                left -= 1
                if left < 0:
                    return place
                text = json_schema({**shared, **part})
                if _cause(LLMatcher.validate_grammar(text, self._tokens)) == message:
                    place, found = place + pointer, part
                    break
        return place


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects directly below the keywords of a schema, with where they lie."""
    # Definitions first: what is wrong in one is wrong wherever it is referred to.
    for key, value in sorted(schema.items(), key=lambda item: item[0] not in _SHARED):
        name = f"/{_escaped(key)}"
        if isinstance(value, dict):
            yield name, value
            # Of keywords that hold schemas by name, such as `properties`.
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
    """A message without the definition that llguidance was in."""
    return _one_line(message).partition(" while processing ")[0]


def _one_line(message: str) -> str:
    """Without what llguidance quotes of a long grammar."""
    return textwrap.shorten(message[:10_000], MESSAGE_CHARACTERS, placeholder=" ...")


class GrammarMask:
    """A token mask that follows a grammar: see `TokenMask`.

    It keeps a reader of the grammar for every completion, with the tokens that it has read. A step goes
    to the reader that has read most of the same tokens; that one goes back over what is not the same (a
    rejected guess) and reads what is new (one token). While there are fewer readers than completions, a
    reader that would have to go back is copied instead: it belongs to another completion.
    """

    def __init__(self, matcher: LLMatcher, num_words: int, num_sequences: int) -> None:
        self._readers = [_Reader(matcher)]
        self._num_words = num_words
        self._num_sequences = num_sequences

    def allowed(self, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
        tokens = list(output)
        reader = max(self._readers, key=lambda one: one.merit(tokens))
        common = reader.num_common(tokens)
        if common < len(reader.tokens) and len(self._readers) < self._num_sequences:
            reader = reader.copy()
            self._readers.append(reader)
        mask = torch.zeros(self._num_words, dtype=torch.int32)
        if reader.move_to(tokens, common):
            reader.matcher.unsafe_compute_mask_ptr(mask.data_ptr(), 4 * self._num_words)
            if reader.matcher.is_error():
                _log.warning("a grammar gave up: %s", _one_line(reader.matcher.get_error()))
        return mask


class _Reader:
    """A matcher and the tokens that it has read. It never reads a token that the grammar refuses."""

    def __init__(self, matcher: LLMatcher, tokens: list[int] | None = None) -> None:
        self.matcher = matcher
        self.tokens = tokens or []

    def copy(self) -> _Reader:
        return _Reader(self.matcher.deep_copy(), [*self.tokens])

    def merit(self, tokens: list[int]) -> tuple[int, int]:
        """More common tokens are better; among equals, less to go back over."""
        common = self.num_common(tokens)
        return common, common - len(self.tokens)

    def num_common(self, tokens: list[int]) -> int:
        """Length of the common beginning."""
        low, high = 0, min(len(tokens), len(self.tokens))
        if self.tokens[:high] == tokens[:high]:
            return high
        while low + 1 < high:
            middle = (low + high) // 2
            same = self.tokens[low:middle] == tokens[low:middle]
            low, high = (middle, high) if same else (low, middle)
        return low

    def move_to(self, tokens: list[int], common: int) -> bool:
        """Go back to the first `common` tokens and read the others; False where the grammar refuses one."""
        behind = len(self.tokens) - common
        if behind:
            self.matcher.rollback(behind)
            del self.tokens[common:]
        new = tokens[common:]
        if not new:
            return True
        num_valid = self.matcher.validate_tokens(new)
        self.matcher.consume_tokens(new[:num_valid])
        self.tokens += new[:num_valid]
        return num_valid == len(new)
