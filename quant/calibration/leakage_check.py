"""What is wrong with calibration texts without anybody noticing: repeats, and the evaluation's own words."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..base.errors import BadInput

_Document = TypeVar("_Document")
SHARED_WORDS = 24  # a run of so many words in both texts is no accident


def deduplicate(
    documents: Sequence[_Document], text_of: Callable[[_Document], str]
) -> list[_Document]:
    """The documents in order, without those whose words came before."""
    seen: set[bytes] = set()
    kept = []
    for document in documents:
        digest = hashlib.sha256(" ".join(text_of(document).split()).encode()).digest()
        if digest not in seen:
            seen.add(digest)
            kept.append(document)
    return kept


def check_leakage(name: str, texts: Sequence[str], against: str, evaluation: Sequence[str]) -> None:
    """Raise BadInput where a text shares a run of words with a text that quality is measured on.

    Args:
        name, against: how the message calls the two sources.
        evaluation: texts of which no run of `SHARED_WORDS` words (or the whole text, if it is shorter)
            may be found in `texts`.
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
    """How many documents have how many tokens, by powers of two: `{"65-128": 3, ...}`."""
    powers = Counter(max(length - 1, 0).bit_length() for length in lengths)
    return {
        f"{(1 << power - 1) + 1 if power else 0}-{1 << power}": powers[power]
        for power in sorted(powers)
    }
