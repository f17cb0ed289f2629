"""Multiple-choice items over the bundled held-out texts, as the tasks cloze_stories and cloze_prose in
recipes/data: `python -m tools.quality_items`. The same texts give the same bytes.

An item is the sentences before a word, the word, and three other words of the same text.
"""

from __future__ import annotations

import json
import lzma
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmopt.bench.quality.domains import domain_texts
from llmopt.bench.quality.passage import EVALUATION_TEXT
from llmopt.quant.stream.sources import plain_text
from llmopt.recipes import DATA

CHOICES = 4
MIN_CONTEXT = 140  # characters
# A word that no reader could guess from what kind of word it is; shorter ones are mostly grammar.
WORD = re.compile(r"(?<=[a-z,] )[a-z]{4,}(?=[ .,!?;\n])")
SENTENCE = re.compile(r'(?<=[.!?])["”]?\s+')
GRAMMAR = frozenset(
    """about after again also because been before being both could does down each even every from have having
    here into just like many more most much must never once only other over said same should some soon such
    than that their them then there these they this those though through together under until upon very want
    wanted were what when where which while will with would your""".split()  # noqa: SIM905
)


def items_of(text: str, source: str, most: int) -> Iterator[dict[str, Any]]:
    """At most `most` items over a text, spread over it."""
    found = [match for match in WORD.finditer(text) if match[0] not in GRAMMAR]
    usable = [match for match in found if match.start() >= MIN_CONTEXT]
    words = sorted({match[0] for match in found})
    step = max(1.0, len(usable) / most)
    for place in range(min(most, len(usable))):
        match = usable[int(place * step)]
        rng = random.Random(f"{source} {match.start()}")
        others = [word for word in words if word[:4] != match[0][:4]]
        if len(others) < CHOICES - 1:
            continue
        # Words with the same ending first: those that fit the grammar.
        alike = [word for word in others if word[-2:] == match[0][-2:]]
        wrong = rng.sample(alike, min(CHOICES - 1, len(alike)))
        wrong += rng.sample(
            [word for word in others if word not in wrong], CHOICES - 1 - len(wrong)
        )
        choices = [match[0], *wrong]
        rng.shuffle(choices)
        yield {
            "source": source,
            "context": context_of(text[: match.start()]),
            "choices": choices,
            "answer": choices.index(match[0]),
        }


def context_of(before: str) -> str:
    """The last whole sentences of `before` with at least `MIN_CONTEXT` characters, without trailing space."""
    begins = [0, *(match.end() for match in SENTENCE.finditer(before))]
    begin = max(begin for begin in begins if len(before) - begin >= MIN_CONTEXT or begin == 0)
    return before[begin:].rstrip()


def tasks() -> Mapping[str, Sequence[dict[str, Any]]]:
    """The items of each task."""
    stories = filter(str.strip, EVALUATION_TEXT.read_text(encoding="utf-8").split("\n\n"))
    texts = domain_texts()
    return {
        "cloze_stories": [
            item
            for number, story in enumerate(stories)
            for item in items_of(story.strip(), f"story {number}", 8)
        ],
        "cloze_prose": [
            item
            for domain, most in (("prose", 24), ("chat", 12))
            for number, text in enumerate(texts[domain])
            for item in items_of(plain_text(text), f"{domain} {number}", most)
        ],
    }


def main(folder: Path = DATA) -> None:
    for name, items in tasks().items():
        lines = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)
        packed = lzma.compress(lines.encode(), preset=9 | lzma.PRESET_EXTREME)
        (folder / f"{name}.jsonl.xz").write_bytes(packed)
        print(f"{name}: {len(items)} items, {len(packed):,} bytes")


if __name__ == "__main__":
    main()
