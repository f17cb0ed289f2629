"""Calibration data checks: duplicates, and leakage of evaluation text (shared n-grams)."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..base.errors import BadInput

_Document = TypeVar("_Document")
SHARED_WORDS = 24  # a shared n-gram of this length is no accident


def deduplicate(
    documents: Sequence[_Document], text_of: Callable[[_Document], str]
) -> list[_Document]:
    """The documents in order, without duplicates (compared by their words)."""
    seen: set[bytes] = set()
    kept = []
    for document in documents:
        digest = hashlib.sha256(" ".join(text_of(document).split()).encode()).digest()
        if digest not in seen:
            seen.add(digest)
            kept.append(document)
    return kept


def check_leakage(name: str, texts: Sequence[str], against: str, evaluation: Sequence[str]) -> None:
    """Raise BadInput where a calibration text shares an n-gram of words with an evaluation text.

    Args:
        name, against: names of the two sources in the message.
        evaluation: texts of which no `SHARED_WORDS`-gram of words (or the whole text, if it is shorter)
            may occur in `texts`.
    """
    where = {run: number for number, text in enumerate(evaluation, 1) for run in _runs(text)}
    for number, text in enumerate(texts, 1):
        for run in _runs(text):
            if run in where:
                words = " ".join(run[:8])
                raise BadInput(
                    f"calibration data {name} overlaps with the evaluation text {against}: text {number} "
                    f"and text {where[run]} there both have {words!r} …; measure on other text, or "
                    "calibrate on other text"
                )


def _runs(text: str) -> list[tuple[str, ...]]:
    words = text.split()
    length = min(SHARED_WORDS, len(words))
    return [tuple(words[i : i + length]) for i in range(len(words) - length + 1)] if words else []


def length_histogram(lengths: Sequence[int]) -> dict[str, int]:
    """Histogram of tokens per document, by powers of two: `{"65-128": 3, ...}`."""
    powers = Counter(max(length - 1, 0).bit_length() for length in lengths)
    return {
        f"{(1 << power - 1) + 1 if power else 0}-{1 << power}": powers[power]
        for power in sorted(powers)
    }
