"""Evaluation passages: fixed token ids in windows, with the range of each that is scored."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens that a model reads as one sequence.

    The tokens from `first_scored` on are scored, each given those before it in the window.

    Attributes:
        first_scored: index of the first scored token, from 1: nothing predicts the first token.
        document: number of the document that the window is from; 0 where the text is one.
    """

    token_ids: tuple[int, ...]
    first_scored: int = 1
    document: int = 0

    def __post_init__(self) -> None:
        assert 1 <= self.first_scored < len(self.token_ids), "a window scores at least one token"

    @property
    def num_scored(self) -> int:
        return len(self.token_ids) - self.first_scored


@dataclass(frozen=True, slots=True)
class Passage:
    """Windows over a text, made by a protocol.

    Attributes:
        source: name of the text.
        protocol: name of the protocol, with its version.
        description: one sentence on windows and scored tokens.
        settings: of the protocol, such as window and stride.
    """

    windows: tuple[Window, ...]
    source: str
    protocol: str
    description: str
    settings: Mapping[str, int | bool] = field(default_factory=dict)

    @property
    def num_scored(self) -> int:
        """Number of scored positions."""
        return sum(window.num_scored for window in self.windows)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that a model computes, context included."""
        return sum(len(window.token_ids) for window in self.windows)

    @property
    def longest(self) -> int:
        """Tokens of the longest window."""
        return max(len(window.token_ids) for window in self.windows)

    @property
    def sha256(self) -> str:
        """Of the protocol, its settings and the tokens: scores of equal hashes are of the same positions."""
        digest = hashlib.sha256(f"{self.protocol} {sorted(self.settings.items())}".encode())
        for window in self.windows:
            head = [len(window.token_ids), window.first_scored]
            digest.update(np.asarray([*head, *window.token_ids], dtype="<i8").tobytes())
        return digest.hexdigest()
