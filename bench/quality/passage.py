"""Evaluation passages: a text cut into windows by a protocol, which defines the scored tokens.

`documents`: documents separated by blank lines, windows without overlap, all but the first token of a window.
`gptq`: WikiText-2 of the GPTQ paper and its followers (Frantar et al., 2023; `datautils.py`, `opt.py`): rows
joined by blank lines, whole windows without overlap, all but the first token of a window.
`strided`: overlapping windows, with scores of the new tokens only ("Perplexity of fixed-length models",
documentation of transformers).
`llama.cpp`: `llama-perplexity`: whole windows without overlap, BOS for the first token, second half scored.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, Literal

from ...base.errors import BadInput
from ...recipes import DATA

EVALUATION_TEXT = DATA / "evaluation.txt"
# Domains of the bundled texts (`domains.py`), with their names for readers.
DOMAINS = {
    "prose": "prose",
    "code": "code",
    "math": "mathematics",
    "chat": "chat",
    "fr": "French",
    "zh": "Chinese",
}
ProtocolName = Literal["documents", "gptq", "strided", "llama.cpp"]
# The papers' window, and `--ctx-size` of llama-perplexity; a model with a shorter context has that window.
PAPER_WINDOW = 2048
LLAMA_CPP_WINDOW = 512


@dataclass(frozen=True, slots=True)
class PassageWindow:
    """Tokens that a model reads as one sequence, from a document with a number. Tokens from `first_scored` on
    are scored, each given the tokens before it in the window; nothing predicts the first token.
    `alternatives` are scored in the last token's place too, after it."""

    token_ids: tuple[int, ...]
    first_scored: int = 1
    document: int = 0
    alternatives: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert 1 <= self.first_scored < len(self.token_ids), "a window scores at least one token"

    @property
    def num_scored(self) -> int:
        return len(self.token_ids) - self.first_scored + len(self.alternatives)


@dataclass(frozen=True, slots=True)
class Passage:
    """Windows over a text, made by a protocol, whose name has its version and whose settings are window and
    stride; the description is one sentence on windows and scored tokens."""

    windows: tuple[PassageWindow, ...]
    source: str
    protocol: str
    description: str
    settings: Mapping[str, int | bool] = field(default_factory=dict)

    @property
    def num_scored(self) -> int:
        return sum(window.num_scored for window in self.windows)

    @property
    def num_tokens(self) -> int:
        return sum(len(window.token_ids) for window in self.windows)

    @property
    def longest(self) -> int:
        return max(len(window.token_ids) for window in self.windows)

    @property
    def sha256(self) -> str:
        """Hash of protocol, settings and tokens: scores of equal hashes are of the same positions."""
        digest = hashlib.sha256(f"{self.protocol} {sorted(self.settings.items())}".encode())
        for window in self.windows:
            ids = (*window.token_ids, *window.alternatives)
            numbers = [len(window.token_ids), window.first_scored, *ids]
            digest.update(struct.pack(f"<{len(numbers)}q", *numbers))
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class ProtocolOptions:
    """A protocol with its settings; None is the protocol's default.

    Raises:
        BadInput: a setting that contradicts the protocol or another setting.
    """

    name: ProtocolName = "documents"
    window: int | None = None
    stride: int | None = None

    def __post_init__(self) -> None:
        shortest = 3 if self.name == "llama.cpp" else 2
        if self.window is not None and self.window < shortest:
            raise BadInput(f"quality window {self.window}: {self.name} needs {shortest} or more")
        if self.stride is not None and self.name != "strided":
            raise BadInput(
                f"quality stride {self.stride} is for the protocol strided, not for {self.name}"
            )

    def window_of(self, max_model_len: int) -> int:
        """Tokens per window for a model of that context. Raises BadInput: a window that exceeds the
        context."""
        if self.window is not None:
            if self.window > max_model_len:
                raise BadInput(
                    f"quality window {self.window} exceeds the model's context of {max_model_len} tokens"
                )
            return self.window
        if self.name == "documents":
            return max_model_len
        default = LLAMA_CPP_WINDOW if self.name == "llama.cpp" else PAPER_WINDOW
        return min(default, max_model_len)


def read_passage(
    tokenizer: Any,
    *,
    max_model_len: int,
    num_tokens: int,
    path: Path = EVALUATION_TEXT,
    options: ProtocolOptions | None = None,
) -> Passage:
    """Windows of a text file by a protocol, over at most `num_tokens` of its tokens. Raises BadInput: no such
    file, not text, or too short for one window."""
    options = options or ProtocolOptions()
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise BadInput(f"quality text {path} is not a file") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"quality text {path} is not UTF-8: byte {error.start}") from error
    window = options.window_of(max_model_len)
    source = _Text(tokenizer, text, path, num_tokens, window, options)
    make: dict[str, Callable[[_Text], Passage]] = {
        "documents": _documents,
        "gptq": _gptq,
        "strided": _strided,
        "llama.cpp": _llama_cpp,
    }
    return make[options.name](source)


@dataclass(frozen=True, slots=True)
class _Text:
    """A text to be cut into windows of `window` tokens, over at most `num_tokens` of its tokens."""

    tokenizer: Any
    text: str
    path: Path
    num_tokens: int
    window: int
    options: ProtocolOptions

    def encoded(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, verbose=False))

    def whole_windows(self, ids: Sequence[int], *, at_least: int) -> Iterator[tuple[int, ...]]:
        """Windows of exactly `window` tokens, without the rest."""
        if len(ids) < at_least * self.window:
            needed = f"{at_least} windows" if at_least > 1 else "one window"
            raise BadInput(
                f"quality text {self.path} gives {len(ids)} tokens, and {self.options.name} needs {needed} "
                f"of {self.window}: raise --quality-tokens, lower --quality-window, or give a longer "
                "--quality-text"
            )
        for begin in range(0, len(ids) - self.window + 1, self.window):
            yield tuple(ids[begin : begin + self.window])

    def passage(
        self, windows: Sequence[PassageWindow], description: str, **settings: int | bool
    ) -> Passage:
        name = f"{self.options.name} v1"
        settings = {"window": self.window, **settings}
        return Passage(tuple(windows), self.path.name, name, description, settings)


def _documents(source: _Text) -> Passage:
    """Each document is tokenized by itself, with special tokens."""
    windows: list[PassageWindow] = []
    left, window = source.num_tokens, source.window
    for number, document in enumerate(filter(str.strip, source.text.split("\n\n"))):
        ids = source.encoded(document.strip())
        for start in range(0, len(ids), window):
            tokens = tuple(ids[start : start + min(window, left)])
            if len(tokens) < 2:
                continue
            windows.append(PassageWindow(tokens, document=number))
            left -= len(tokens)
        if left < 2:
            break
    if not windows:
        raise BadInput(
            f"quality text {source.path} gives no window of two tokens: nothing to score"
        )
    return source.passage(windows, f"documents by blank line, windows of {window}, no overlap, v1")


def _gptq(source: _Text) -> Passage:
    ids = source.encoded(joined_rows(source.text))[: source.num_tokens]
    windows = [PassageWindow(tokens) for tokens in source.whole_windows(ids, at_least=1)]
    description = (
        f"joined text, whole windows of {source.window}, no overlap, every token but the first of a window, "
        "as in the GPTQ paper"
    )
    return source.passage(windows, description)


def _strided(source: _Text) -> Passage:
    window = source.window
    stride = source.options.stride or max(1, window // 2)
    if stride > window:
        raise BadInput(
            f"quality stride {stride} exceeds the window of {window} tokens: tokens between would be left out"
        )
    ids = source.encoded(joined_rows(source.text))[: source.num_tokens]
    if len(ids) < 2:
        raise BadInput(f"quality text {source.path} gives {len(ids)} tokens: nothing to score")
    windows: list[PassageWindow] = []
    scored = 1  # the first token has no context
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        if end > scored:
            # With a stride as long as the window, the first token of a window has no context either.
            first = max(scored - begin, 1)
            if end - begin > first:
                windows.append(PassageWindow(tuple(ids[begin:end]), first))
            scored = end
        if end == len(ids):
            break
    description = f"joined text, windows of {window} every {stride} tokens, only new tokens scored"
    return source.passage(windows, description, stride=stride)


def _llama_cpp(source: _Text) -> Passage:
    ids = source.encoded(source.text.removesuffix("\n"))[: source.num_tokens]
    bos, window = leading_special_tokens(source.tokenizer), source.window
    windows: list[PassageWindow] = []
    for tokens in source.whole_windows(ids, at_least=2):
        begun = (bos[0], *tokens[1:]) if bos else tokens
        windows.append(PassageWindow(begun, window // 2 + 1))
    description = (
        f"whole windows of {window}, no overlap, {'BOS for the first token, ' if bos else ''}"
        "second half scored, as llama-perplexity"
    )
    return source.passage(windows, description, bos=bool(bos))


def joined_rows(text: str) -> str:
    """Lines joined by blank lines, blank lines kept as empty ones: the rows of the `wikitext` data set of
    Hugging Face, joined as in the code of the GPTQ paper."""
    return "\n\n".join(row if row.strip() else "" for row in StringIO(text))


def leading_special_tokens(tokenizer: Any) -> list[int]:
    """The special tokens that the tokenizer puts before a text, usually BOS or none."""
    plain = list(tokenizer.encode("a", add_special_tokens=False))
    whole = list(tokenizer.encode("a"))
    begins = range(len(whole) - len(plain), -1, -1)
    return next((whole[:n] for n in begins if whole[n : n + len(plain)] == plain), [])
