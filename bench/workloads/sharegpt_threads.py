"""Whole ShareGPT threads as multi-turn conversations."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...quant.base.errors import BadInput
from .conversations import ConversationBuilder, ConversationRules, Exchange, in_order
from .sharegpt import STAND_IN, STAND_IN_NOTE, load_conversations
from .workload import Message, Workload, WorkloadItem

ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant", "model"), "assistant"),
    "system": "system",
}
# Threads are chained from the stand-in's pairs, which have one turn each.
STAND_IN_TURNS = (2, 6)


def sharegpt_threads_workload(
    tokenizer: Any,
    rules: ConversationRules,
    *,
    num_prompts: int,
    path: Path | None = None,
    seed: int = 0,
    output_len: int | None = None,
    shuffle: bool = True,
    oversample: bool = True,
) -> Workload:
    """`num_prompts` conversations from a ShareGPT file, or from the bundled stand-in when `path` is None.

    Each turn's output length is that of the data set's answer, or `output_len`. The lengths filter of single
    prompts does not apply: a thread is cut where the model's context ends.

    Raises:
        BadInput: the file is unusable, or no conversation has enough turns.
    """
    builder = ConversationBuilder(tokenizer, rules)
    items: list[WorkloadItem] = []
    threads = stand_in_threads(seed) if path is None else file_threads(path, seed, shuffle=shuffle)
    for thread in threads:
        if len(items) == num_prompts:
            break
        if not thread:
            builder.drop("its first messages are not a question and an answer")
        elif item := builder.item([replace(turn, output_len=output_len) for turn in thread]):
            items.append(item)
    source = f"threads of ShareGPT file {path.name}" if path else "bundled ShareGPT stand-in"
    notes = builder.notes()
    if not items:
        raise BadInput(f"{source}: no conversation is left ({', '.join(notes)})")
    if path is None:
        notes.insert(0, STAND_IN_NOTE)
    if len(items) < num_prompts and oversample:
        missing = num_prompts - len(items)
        notes.append(f"{missing} of {num_prompts} conversations are repeats: the file has too few")
        items += random.Random(seed).choices(items, k=missing)
    return Workload("sharegpt", source, in_order(items), tuple(notes), is_stand_in=path is None)


def file_threads(path: Path, seed: int, *, shuffle: bool) -> Iterator[list[Exchange]]:
    """The threads of a ShareGPT file; an empty one where a thread does not alternate from its start."""
    entries = load_conversations(path)
    if shuffle:
        random.Random(seed).shuffle(entries)
    return (exchanges_of(entry["conversations"]) for entry in entries)


def exchanges_of(messages: list[Any]) -> list[Exchange]:
    """The alternating (question, answer) pairs of a thread, up to the first message that breaks them.

    System messages at the start go with the first question; an answer without a question before it, as
    split threads begin with, is left out.
    """
    spoken: list[Message] = []
    for message in messages:
        role = ROLES.get(str(message.get("from"))) if isinstance(message, dict) else None
        text = message.get("value") if isinstance(message, dict) else None
        if role is None or not isinstance(text, str) or not text.strip():
            break
        spoken.append(Message(role, text))
    opening: list[Message] = []
    while spoken and spoken[0].role == "system":
        opening.append(spoken.pop(0))
    if spoken and spoken[0].role == "assistant":
        spoken.pop(0)
    exchanges: list[Exchange] = []
    for asked, answered in zip(spoken[::2], spoken[1::2], strict=False):
        if (asked.role, answered.role) != ("user", "assistant"):
            break
        exchanges.append(Exchange((*opening, asked), answered.content))
        opening = []
    return exchanges


def stand_in_threads(seed: int) -> Iterator[list[Exchange]]:
    """Threads without end, chained from the stand-in's pairs: each pair is used once before any is again."""
    rng = random.Random(seed)
    pairs = [exchanges_of(entry["conversations"])[0] for entry in load_conversations(STAND_IN)]
    deck: list[Exchange] = []
    while True:
        count = rng.randint(*STAND_IN_TURNS)
        if len(deck) < count:
            deck += rng.sample(pairs, len(pairs))
        yield [deck.pop(0) for _ in range(count)]
