"""Structured output: grammar-constrained decoding by token bitmasks, through llguidance.

https://github.com/guidance-ai/llguidance compiles JSON schemas, regular expressions and context-free
grammars, and computes the mask of allowed tokens at any point of an output.
"""

from __future__ import annotations

import json
import logging
import textwrap
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from threading import Lock
from typing import Any

import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer

from ...base.errors import BadInput
from .schema_limits import enforceable, num_states, pointer_token
from .structural_tag import as_lark, structural_tag

_log = logging.getLogger(__name__)

WHITESPACE = " ?"
"""Whitespace allowed between JSON tokens. An unbounded pattern would let a model emit whitespace forever."""

REMEMBERED_CHARACTERS, REMEMBERED_GRAMMARS = 256 << 10, 16
"""Limits of the grammars that stay in the cache. 256 KiB take 45 MiB or less, and a lexer's states, which
grow with the outputs, up to 40 MiB a grammar (2 kB each, by the documentation of `LLParserLimits`)."""
LIMITS = LLParserLimits(max_lexer_states=20_000, verbose_errors=False)
MASK_SECONDS, BURST_SECONDS = 0.05, 0.15
"""Processor time of a request's masks, in the mean for a token of all its sequences and beyond that: an
ambiguous grammar would hold up all other requests."""
_SHARED = ("$defs", "definitions")
MESSAGE_CHARACTERS = 400
MAX_SUBSCHEMAS, SEARCH_SECONDS = 200, 1.0
"""Limits of the search for an error: subschemas compiled, and time after which no other is."""


def json_schema(schema: Mapping[str, Any]) -> str:
    """Grammar of the JSON texts that a schema allows. BadInput: the schema is nested too deep."""
    defaults: Any = {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=defaults)
    except (ValueError, RecursionError) as error:
        raise BadInput(_one_line(str(error))) from error


def regex(pattern: str) -> str:
    """Grammar of the full matches of a pattern; Rust's syntax, without look-around and back-references."""
    return LLMatcher.grammar_from_regex(pattern)


def choice(texts: Sequence[str], added: Mapping[str, int] | None = None) -> str:
    """Grammar of exactly one of `texts`. Where one contains the text of an `added` token, the output may have
    the token or spell it out: llguidance would offer the token, and then refuse it. BadInput: no text, or an
    empty one."""
    if not texts or not all(texts):
        raise BadInput("choice: need at least one text, and no empty one")
    return LLMatcher.grammar_from_lark(
        "start: " + " | ".join(_literal(text, added or {}) for text in texts)
    )


def _literal(text: str, added: Mapping[str, int]) -> str:
    token = max((token for token in added if token in text), key=len, default=None)
    if token is None:
        return json.dumps(text)
    parts = [_literal(part, added) if part else "" for part in text.split(token)]
    return f" (<[{added[token]}]> | {json.dumps(token)}) ".join(parts)


def context_free(text: str) -> str:
    """A grammar in llguidance's Lark dialect, or in GBNF or EBNF; raises as `as_lark`."""
    return LLMatcher.grammar_from_lark(as_lark(text, "grammar"))


class GrammarCompiler:
    """Compiles grammars for a tokenizer into token masks; compiled grammars are cached (LRU). BadInput: the
    tokenizer is not one of the `tokenizers` library, or there is no EOS token."""

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
        self._ends = [text for text, token in self._special.items() if token in end_token_ids]
        self._num_words = -(-vocab_size // 32)
        self._compiled: OrderedDict[str, tuple[LLMatcher, int]] = OrderedDict()
        self._lock = Lock()

    def mask(self, grammar: str, num_sequences: int = 1, num_states: int = 0) -> GrammarMask:
        """The mask of one request with `num_sequences` completions. `num_states` of the grammar's automata
        take as much memory as twice as many characters. BadInput: the grammar is invalid, or uses what
        llguidance does not support."""
        with self._lock:
            matcher, _ = self._compiled.get(grammar, (None, 0))
        if matcher is None:
            matcher = LLMatcher(self._tokens, grammar, log_level=0, limits=LIMITS)
            if matcher.is_error():
                message = LLMatcher.validate_grammar(grammar, self._tokens, limits=LIMITS)
                raise BadInput(_one_line(message))
        with self._lock:
            self._compiled[grammar] = matcher, len(grammar) + 2 * num_states
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > 1 and (
                sum(weight for _, weight in self._compiled.values()) > REMEMBERED_CHARACTERS
                or len(self._compiled) > REMEMBERED_GRAMMARS
            ):
                self._compiled.popitem(last=False)
        return GrammarMask(matcher.deep_copy(), self._num_words, num_sequences)

    def json_schema_mask(self, schema: Mapping[str, Any], num_sequences: int = 1) -> GrammarMask:
        """Compile a schema to a mask; an error names the JSON pointer of the failing part."""
        schema = enforceable(schema)
        try:
            return self.mask(json_schema(schema), num_sequences, num_states(schema))
        except BadInput as error:
            path = self._place_of_error(schema, str(error))
            raise BadInput(f"{path}: {error}" if path else str(error)) from error

    def choice_mask(self, texts: Sequence[str], num_sequences: int = 1) -> GrammarMask:
        """Compile a choice of texts to a mask; raises as `mask` and `choice`, and where a text contains a
        token that ends the output."""
        added = {text: token for text, token in self._special.items() if text not in self._ends}
        if end := next((end for end in self._ends for text in texts if end in text), None):
            raise BadInput(f"choice: {end} in a text ends the output")
        return self.mask(choice(texts, added), num_sequences)

    def structural_tag_mask(self, tag: Mapping[str, Any], num_sequences: int = 1) -> GrammarMask:
        """Compile a structural tag to a mask; special tokens of the tokenizer are tokens in its texts."""
        schemas = [
            form["json_schema"] for form in tag.get("rules", {}).values() if "json_schema" in form
        ]
        grammar = structural_tag(tag, WHITESPACE, self._special)
        return self.mask(grammar, num_sequences, sum(map(num_states, schemas)))

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
        name = f"/{pointer_token(key)}"
        if isinstance(value, dict):
            yield name, value
            # Keywords that hold schemas by name, such as `properties`.
            for inner, part in value.items():
                if isinstance(part, dict):
                    yield f"{name}/{pointer_token(inner)}", part
        elif isinstance(value, list):
            for index, part in enumerate(value):
                if isinstance(part, dict):
                    yield f"{name}/{index}", part


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
    rolled back: it belongs to another completion. Completions of equal tokens share a mask.

    Attributes:
        failure: why no token is allowed any more, though the grammar would; None while it works.
    """

    def __init__(self, matcher: LLMatcher, num_words: int, num_sequences: int) -> None:
        self._states = [_MatcherState(matcher)]
        self._num_words = num_words
        self._num_sequences = num_sequences
        self._shared: dict[tuple[int, ...], torch.Tensor] = {}
        self._seconds, self._longest = 0.0, 0
        self.failure: str | None = None

    def allowed(self, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
        tokens = list(output)
        mask = self._shared.get(tuple(tokens))
        if mask is None:
            mask = torch.zeros(self._num_words, dtype=torch.int32)
            if self.failure is None:
                self._fill(mask, tokens)
            if len(self._shared) >= self._num_sequences:
                self._shared.clear()
            self._shared[tuple(tokens)] = mask
        return mask

    def _fill(self, mask: torch.Tensor, tokens: list[int]) -> None:
        began = time.thread_time()
        # The longest common prefix; among equals, the fewest tokens to roll back.
        state = max(self._states, key=lambda s: (s.num_common(tokens), -len(s.tokens)))
        common = state.num_common(tokens)
        if common < len(state.tokens) and len(self._states) < self._num_sequences:
            state = state.copy()
            self._states.append(state)
        if state.move_to(tokens, common):
            state.matcher.unsafe_compute_mask_ptr(mask.data_ptr(), 4 * self._num_words)
            if state.matcher.is_error():
                self.failure = f"the grammar is too complex: {_one_line(state.matcher.get_error())}"
        self._seconds += time.thread_time() - began
        self._longest = max(self._longest, len(tokens) + 1)
        if self._seconds > BURST_SECONDS + MASK_SECONDS * self._longest:
            self.failure = "the grammar takes too long for each token: simplify it, or lower n"
        if self.failure is not None:
            _log.warning("a grammar failed: %s", self.failure)


class _MatcherState:
    """A matcher and the tokens that it has consumed, all of which the grammar allows."""

    def __init__(self, matcher: LLMatcher, tokens: list[int] | None = None) -> None:
        self.matcher = matcher
        self.tokens = tokens or []

    def copy(self) -> _MatcherState:
        return _MatcherState(self.matcher.deep_copy(), [*self.tokens])

    def num_common(self, tokens: list[int]) -> int:
        most = min(len(tokens), len(self.tokens))
        if self.tokens[:most] == tokens[:most]:
            return most
        return bisect_left(range(most), True, key=lambda n: self.tokens[: n + 1] != tokens[: n + 1])

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
