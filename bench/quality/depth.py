"""Quality at depth: long documents from a seed, and the distance from a reference by position.

A generated document is a report. Each section lists codes of invented parts, has a passage of the bundled
texts, and repeats codes of earlier sections, which only a token far back tells. The document is read as one
window, and a depth N stands for the positions with N/2 to N tokens before them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from ...base.errors import BadInput
from ...engine.base.units import format_tokens
from ...quant.stream.sources import plain_text
from ..metrics.statistics import mean_interval
from .domains import domain_texts
from .passage import EVALUATION_TEXT, Passage, PassageWindow, leading_special_tokens
from .positions import QualitySeries

PROTOCOL = "depth v1"
SHORTEST_DEPTH = 128
PASSAGE_LETTERS = 600
RECORDS_PER_SECTION = 4
ADJECTIVES = (
    "amber arctic bold copper crimson dusty eager faded golden hollow iron jade lunar misty noble"
)
ADJECTIVES += " olive pale quiet rapid scarlet silent stormy tidal velvet violet wooden"
NOUNS = (
    "anchor badger beacon canyon cedar comet crane delta ember falcon forge harbor heron lantern"
)
NOUNS += " meadow mirror orchid otter pebble quartz raven ridge saddle spruce thistle tunnel valley willow"


@cache
def filler_passages() -> tuple[str, ...]:
    """Pieces of the bundled texts of at most `PASSAGE_LETTERS`, cut at ends of lines or words."""
    texts = [plain_text(text) for texts in domain_texts().values() for text in texts]
    texts += EVALUATION_TEXT.read_text(encoding="utf-8").split("\n\n")
    pieces = []
    for text in texts:
        rest = text.strip()
        while len(rest) > PASSAGE_LETTERS:
            cut = max(rest.rfind(mark, 0, PASSAGE_LETTERS) for mark in ("\n", " "))
            cut = cut if cut > 0 else PASSAGE_LETTERS
            pieces.append(rest[:cut].strip())
            rest = rest[cut:].strip()
        pieces.append(rest)
    return tuple(filter(None, pieces))


def sections(rng: random.Random) -> Iterator[str]:
    names = [f"{first} {second}" for first in ADJECTIVES.split() for second in NOUNS.split()]
    rng.shuffle(names)
    passages = list(filler_passages())
    rng.shuffle(passages)
    known: list[tuple[int, str, int]] = []
    for number in count(1):
        lines = [f"## Section {number}", ""]
        for _ in range(RECORDS_PER_SECTION):
            # Each pass over the names gives them other codes, and their number in the name.
            lap, index = divmod(len(known), len(names))
            name = names[index] + (f" {lap + 1}" if lap else "")
            known.append((number, name, rng.randrange(100_000, 1_000_000)))
            lines.append(f"- The part {name} has the code {known[-1][2]}.")
        lines += ["", passages[number % len(passages)], ""]
        for section, name, code in rng.sample(known, 2):
            lines.append(f"Section {section} gave the part {name} the code {code}.")
        yield "\n".join([*lines, "", ""])


def depth_passage(
    tokenizer: Any, length: int, *, documents: int, seed: int = 0, path: Path | None = None
) -> Passage:
    """A window of `length` tokens for each document; of the text at `path` where there is one. Raises
    BadInput: that text is shorter than a window."""
    if path is None:
        windows = [
            generated_tokens(tokenizer, length, random.Random(f"{seed} {number}"))
            for number in range(documents)
        ]
    else:
        ids = list(tokenizer.encode(path.read_text(encoding="utf-8"), verbose=False))
        windows = [ids[n * length : (n + 1) * length] for n in range(documents)]
        windows = [window for window in windows if len(window) == length]
        if not windows:
            raise BadInput(
                f"--quality-text {path} has {len(ids):,} tokens, and --quality-depth "
                f"{format_tokens(length)} needs as many: give a longer text, or none for generated documents"
            )
    return Passage(
        tuple(PassageWindow(tuple(ids), document=number) for number, ids in enumerate(windows)),
        "generated documents" if path is None else path.name,
        PROTOCOL,
        f"{len(windows)} documents of {length:,} tokens, every token but the first",
        {"depth": length, "seed": seed} if path is None else {"depth": length},
    )


def generated_tokens(tokenizer: Any, length: int, rng: random.Random) -> list[int]:
    ids = leading_special_tokens(tokenizer)
    for section in sections(rng):
        ids += tokenizer.encode(section, add_special_tokens=False, verbose=False)
        if len(ids) >= length:
            break
    return ids[:length]


def bucket_ends(depths: Iterable[int]) -> list[int]:
    """The depths, and the halves of the greatest one down to `SHORTEST_DEPTH`."""
    ends = set(depths)
    half = max(ends)
    while half >= SHORTEST_DEPTH:
        ends.add(half)
        half //= 2
    return sorted(ends)


def depth_label(depth: int) -> str:
    """`32k`, or `3000` without a separator: a part of the key of a score."""
    return format_tokens(depth).replace(",", "")


def by_depth(series: QualitySeries, depths: Sequence[int]) -> dict[str, Any]:
    """KL and top-1 agreement by depth: the mean over the scored tokens with at least half of the depth, and
    less than all of it, before them. None where the series has no distance, or too short windows."""
    position, document = series.needed("position"), series.needed("document")
    columns = {"kl_nats": series.column("kl"), "top1_agreement": series.column("top1")}
    scored = {}
    for end in bucket_ends(depths):
        where = (position >= end // 2) & (position < end)
        parts = {key: column[where] for key, column in columns.items() if column is not None}
        scored[depth_label(end)] = _distance(parts, document[where]) if where.any() else None
    return scored


def _distance(columns: Mapping[str, np.ndarray], document: np.ndarray) -> dict[str, Any] | None:
    """Means over documents of one length, with Student's intervals: documents differ more than their segments
    say, so that a bootstrap of segments would be too sure."""
    if len(columns) < 2:
        return None
    numbers, of = np.unique(document, return_inverse=True)
    counts = np.bincount(of)
    means, intervals = {}, {}
    for key, column in columns.items():
        by_document = np.bincount(of, column.astype(np.float64)) / counts
        means[key] = float(by_document.mean())
        low, high = mean_interval(by_document.tolist()) or (None, None)
        if column.min() == column.max():
            low = high = means[key]
        most = 1.0 if key == "top1_agreement" else math.inf
        intervals[key] = (low and max(low, 0.0), high and min(high, most))
    return {
        "num_tokens": len(document),
        "num_documents": len(numbers),
        **means,
        "intervals": intervals,
    }
