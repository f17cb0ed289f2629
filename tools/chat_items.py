"""Items of the tasks `tool_calls` and `answers` in recipes/data: `python -m tools.chat_items`. The same
program writes the same bytes.
"""

from __future__ import annotations

import itertools
import json
import lzma
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmopt.recipes import DATA

from .chat_functions import TOOLS
from .chat_slots import Tool

PER_KIND = 60
KINDS = ("simple", "multiple", "parallel", "none", "types", "nested", "enums")


def with_slot(*kinds: str) -> list[Tool]:
    return [t for t in TOOLS if any(slot.kind in kinds for slot in t.slots.values())]


def item_of(kind: str, number: int) -> dict[str, Any]:
    """An item of a kind, by its number; every choice follows from both."""
    rng = random.Random(f"{kind} {number}")
    pools = {"enums": ("enum",), "types": ("integer", "boolean"), "nested": ("object",)}
    pool = with_slot(*pools[kind]) if kind in pools else list(TOOLS)
    target = pool[number % len(pool)]
    question, call = target.asked(rng, spelled=kind == "types")
    offered, due = [target], [call]
    if kind in ("multiple", "enums", "types", "nested"):
        alike = [t for t in TOOLS if t.group == target.group and t is not target]
        others = [t for t in TOOLS if t.group != target.group]
        offered += rng.sample(alike, min(2, len(alike))) + rng.sample(others, 2)
    elif kind == "parallel":
        second = target if number % 2 else rng.choice([t for t in TOOLS if t.group != target.group])
        while True:
            other, call = second.asked(rng)
            if call not in due:
                break
        question, due = f"{question} Also: {other}", [*due, call]
        offered += [second] if second is not target else []
    elif kind == "none":
        offered, due = rng.sample([t for t in TOOLS if t.group != target.group], 3), []
    rng.shuffle(offered)
    return {
        "id": f"{kind}_{number}",
        "question": [[{"role": "user", "content": question}]],
        "function": [t.function for t in offered],
        "ground_truth": due,
    }


TOPICS = (
    "how bread rises",
    "why the sky is blue",
    "how a bicycle stays upright",
    "what a library does",
    "how rivers shape valleys",
    "why we sleep",
    "how a lock works",
    "what makes a good question",
    "how glass is made",
    "why leaves fall in autumn",
    "how a sailing boat moves against the wind",
    "what an index in a book is for",
    "how coffee is roasted",
    "why iron rusts",
    "how bees find flowers",
    "what a budget is",
    "how a thermometer works",
    "why metal feels cold",
    "how a vaccine works",
    "what a prime number is",
)
REQUESTS = (
    "Explain {topic}.",
    "Explain {topic} to a child in three sentences.",
    "Answer in one sentence: {topic}?",
    "List four facts about {topic}.",
    "Write a short dialogue of two friends about {topic}.",
    "Give a title for an article on {topic}.",
    "What do people often get wrong about {topic}?",
    "Write a paragraph on {topic} and end it with a question.",
)


def prompts() -> Iterator[dict[str, str]]:
    for request, topic in itertools.product(REQUESTS, TOPICS):
        yield {"prompt": request.format(topic=topic)}


def tool_rows() -> list[dict[str, Any]]:
    return [item_of(kind, number) for number in range(PER_KIND) for kind in KINDS]


def packed(rows: Sequence[Mapping[str, Any]]) -> bytes:
    lines = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    return lzma.compress(lines.encode(), preset=9)


if __name__ == "__main__":
    (DATA / "tool_calls.jsonl.xz").write_bytes(packed(tool_rows()))
    (DATA / "answers.jsonl.xz").write_bytes(packed(list(prompts())))
