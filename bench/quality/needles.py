"""Needles: questions on long documents that only a line of them answers, from a seed, scored exactly.

The four kinds of RULER (Hsieh et al., 2024, https://arxiv.org/abs/2404.06654): one fact (`single`), one of
several alike (`multi_key`), a chain of assignments (`tracking`), and the most frequent words (`aggregation`).
A document holds a needle of each kind, so that its four questions share one prefill. The first answers of the
asked form have to be the expected ones, in any order.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .chat_items import TaskScoring
from .depth import depth_label, sections

NEEDLES, METRIC, VERSION = "needles", "exact_match", 1.0
KINDS = ("single", "multi_key", "tracking", "aggregation")
# Below, the needles alone would fill the document.
SHORTEST = 1024
NUM_KEYS, NUM_HOPS, NUM_FREQUENT, NUM_RARE, REPEATS = 6, 4, 3, 5, 5
# Tokens of a question with its template, and of its answer: a base model's line, a chat's reply.
QUESTION_TOKENS, ANSWER_TOKENS, REPLY_TOKENS = 160, 64, 256
SEVEN_DIGITS = r"(?<!\d)\d{7}(?!\d)"
CONSONANTS = "BCDFGHJKLMNPQRSTVWXZ"
INTRODUCTION = (
    "Facts are hidden in the following report. Remember them: the question at its end is on them."
)


@dataclass(frozen=True, slots=True)
class Needle:
    """Lines of a document, and the question that they answer. `lead` begins the answer of a model that
    completes; `form` is the pattern of an answer."""

    kind: str
    lines: tuple[str, ...]
    question: str
    lead: str
    form: str
    expected: tuple[str, ...]

    def is_right(self, text: str) -> bool:
        """True if the first answers in a text, after any reasoning, are the expected ones."""
        answer = re.sub(r"(?<=\d),(?=\d{3})", "", text.rpartition("</think>")[2])
        answers = dict.fromkeys(re.findall(self.form, answer))
        return set(list(answers)[: len(self.expected)]) == set(self.expected)


@dataclass(frozen=True, slots=True)
class NeedleItem:
    """A question on a document of about `depth` tokens."""

    depth: int
    number: int
    document: str
    needle: Needle

    @property
    def prompt(self) -> str:
        return f"{self.message}\n{self.needle.lead}"

    @property
    def message(self) -> str:
        return f"{INTRODUCTION}\n\n{self.document}\n\n{self.needle.question}"


def needles_of(rng: random.Random) -> tuple[Needle, ...]:
    return tuple(make(rng) for make in (_single, _multi_key, _tracking, _aggregation))


def _single(rng: random.Random) -> Needle:
    secret = rng.randrange(1_000_000, 10_000_000)
    return Needle(
        "single",
        (f"The special archive number is: {secret}.",),
        "What is the special archive number in the report? Answer with the number alone.",
        "The special archive number in the report is:",
        SEVEN_DIGITS,
        (str(secret),),
    )


def _multi_key(rng: random.Random) -> Needle:
    keys = _distinct(rng, NUM_KEYS, lambda: "".join(rng.choices("abdeiklmnoprstu", k=8)))
    values = dict(zip(keys, rng.sample(range(1_000_000, 10_000_000), NUM_KEYS), strict=True))
    return Needle(
        "multi_key",
        tuple(f"One of the magic numbers for {key} is: {value}." for key, value in values.items()),
        f"What is the magic number for {keys[-1]} in the report? Answer with the number alone.",
        f"The magic number for {keys[-1]} in the report is:",
        SEVEN_DIGITS,
        (str(values[keys[-1]]),),
    )


def _tracking(rng: random.Random) -> Needle:
    names = _distinct(rng, 2 * NUM_HOPS, lambda: "".join(rng.choices(CONSONANTS, k=5)))
    chain, other = names[: NUM_HOPS + 1], names[NUM_HOPS + 1 :]
    value, decoy = rng.sample(range(10_000, 100_000), 2)
    return Needle(
        "tracking",
        (*_assignments(chain, value), *_assignments(other, decoy)),
        f"Which {len(chain)} variables have the value {value} in the report? Answer with their names alone.",
        f"The {len(chain)} variables with the value {value} in the report are:",
        rf"\b[{CONSONANTS}]{{5}}\b",
        tuple(chain),
    )


def _aggregation(rng: random.Random) -> Needle:
    parts = ("bcdfghjk", "2345678", "mnpqrstv", "mnpqrstv", "2345678")
    entries = _distinct(rng, NUM_FREQUENT + NUM_RARE, lambda: "".join(map(rng.choice, parts)))
    frequent = entries[:NUM_FREQUENT]
    logged = frequent * REPEATS + entries[NUM_FREQUENT:]
    rng.shuffle(logged)
    count = f"{NUM_FREQUENT} most frequent log entries"
    return Needle(
        "aggregation",
        tuple(f"Log entry: {word}." for word in logged),
        f"Which words are the {count} of the report? Answer with the words alone.",
        f"The {count} of the report are:",
        r"\b[a-z]\d[a-z]{2}\d\b",
        tuple(frequent),
    )


def _assignments(names: Sequence[str], value: int) -> Iterator[str]:
    yield f"VAR {names[0]} = {value}"
    for before, name in pairwise(names):
        yield f"VAR {name} = VAR {before}"


def _distinct(rng: random.Random, count: int, draw: Callable[[], str]) -> list[str]:
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn[draw()] = None
    return list(drawn)


def needle_items(
    tokenizer: Any, depths: Sequence[int], *, documents: int, seed: int = 0
) -> list[NeedleItem]:
    """The items of every depth from `SHORTEST` on, those of a document together."""
    items = []
    for depth in depths:
        for number in range(documents if depth >= SHORTEST else 0):
            rng = random.Random(f"{seed} {depth} {number}")
            needles = needles_of(rng)
            document = _hidden(tokenizer, depth - QUESTION_TOKENS - REPLY_TOKENS, needles, rng)
            items += [NeedleItem(depth, number, document, needle) for needle in needles]
    return items


def _hidden(tokenizer: Any, num_tokens: int, needles: Sequence[Needle], rng: random.Random) -> str:
    """A document of at most `num_tokens`, with the lines of the needles at random places; lines of a needle
    keep their order, without which a chain could not be read in one pass."""

    def length(line: str) -> int:
        return len(tokenizer.encode(f"{line}\n", add_special_tokens=False, verbose=False))

    left = num_tokens - sum(length(line) for needle in needles for line in needle.lines)
    lines: list[str] = []
    for section in sections(rng):
        for line in section.strip().split("\n"):
            left -= length(line)
            if left < 0:
                break
            lines.append(line)
        if left < 0:
            break
    at: list[tuple[float, str]] = [(float(index), line) for index, line in enumerate(lines)]
    for needle in needles:
        places = sorted(rng.uniform(-1, len(lines)) for _ in needle.lines)
        at += zip(places, needle.lines, strict=True)
    return "\n".join(line for _, line in sorted(at))


def scored_needles(items: Sequence[NeedleItem], texts: Sequence[str]) -> list[TaskScoring]:
    """Right answers by depth, of all kinds (`needles`) and of each; the depth is the filter."""
    scored = {task: TaskScoring(task, VERSION) for task in (NEEDLES, *map(task_of, KINDS))}
    for item, text in zip(items, texts, strict=True):
        needle, label = item.needle, depth_label(item.depth)
        number = item.number * len(KINDS) + KINDS.index(needle.kind)
        score = {METRIC: float(needle.is_right(text))}
        for task in (NEEDLES, task_of(needle.kind)):
            target = ", ".join(needle.expected)
            scored[task].add_item(number, item.prompt, [text], target, label, **score)
    for scoring in scored.values():
        for label in dict.fromkeys(sample["filter"] for sample in scoring.samples):
            scoring.add_metric(METRIC, filter_name=label)
    return list(scored.values())


def task_of(kind: str) -> str:
    return f"{NEEDLES}_{kind}"
