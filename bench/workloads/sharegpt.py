"""ShareGPT conversations by the usual filter of serving benchmarks, and whole multi-turn threads.

As in vLLM's `benchmark_serving`: of two turns the first is the prompt, the second gives the output length, by
the tokenizer with special tokens; pairs too short or too long are dropped. vLLM ignores roles; here a system
message joins the first question, and an answer without a question is skipped.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from ...base.errors import BadInput
from ...base.json_lines import parse_json
from ...recipes import DATA
from .conversations import ConversationBuilder, ConversationRules, SourceTurn, in_order
from .workload import Message, Tokenizer, Workload, WorkloadItem, numbered, oversampled, read_text

STAND_IN = DATA / "sharegpt_stand_in.json"
MIN_TOKENS = 4  # this and the next two: the filter of vLLM's `is_valid_sequence`
MAX_PROMPT_TOKENS = 1024
MAX_TOTAL_TOKENS = 2048
STAND_IN_NOTE = (
    "the prompts are a bundled stand-in in ShareGPT's shape, not ShareGPT: give the real "
    "file with --dataset-path for numbers to compare with others"
)
_ASSISTANTS = ("gpt", "chatgpt", "bing", "bard", "assistant", "model", "bot", "ai")
ROLES = {"human": "user", "user": "user", "system": "system", "developer": "system"}
ROLES |= dict.fromkeys(_ASSISTANTS, "assistant")
TURNS = ("conversations", "conversation", "messages")
TEXT_PARTS = ("text", "input_text", "output_text")
NO_PAIR = "its first messages are not a question and an answer"
# Threads are chained from the stand-in's pairs, which have one turn each.
STAND_IN_TURNS = (2, 6)


def load_conversations(path: Path, seed: int | None = None) -> list[list[Any]]:
    """Turns of entries with two or more, shuffled by `seed`. BadInput: no file, JSON or such entries."""
    text = read_text(path)
    try:
        data = parse_json(text)
    except json.JSONDecodeError as error:
        raise BadInput(
            f"dataset {path}, line {error.lineno}: not JSON ({error.msg}); "
            "a ShareGPT file is one JSON list of conversations"
        ) from error
    if not isinstance(data, list):
        raise BadInput(f"dataset {path} holds a {type(data).__name__}, not a list of conversations")
    threads = (turns_of(entry) for entry in data if isinstance(entry, dict))
    kept = [turns for turns in threads if turns is not None and len(turns) >= 2]
    if not kept:
        raise BadInput(f"dataset {path} has no entry with two conversation turns")
    if seed is not None:
        random.Random(seed).shuffle(kept)
    return kept


def turns_of(row: Mapping[str, Any]) -> list[Any] | None:
    """The turns of a row, by the first of the columns that hold conversations; None without one."""
    return next((row[name] for name in TURNS if isinstance(row.get(name), list)), None)


def read_turn(turn: Any) -> Message | None:
    """A message of ShareGPT (`from`, `value`), a chat (`role`, `content`), or a text alone; else None."""
    if isinstance(turn, str):
        return Message("", turn)
    if not isinstance(turn, Mapping):
        return None
    name, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    role = "" if name is None else ROLES.get(str(name).lower())
    if isinstance(text, list):
        is_part = [isinstance(p, Mapping) and p.get("type") in TEXT_PARTS for p in text]
        parts = [p.get("text") if known else p for p, known in zip(text, is_part, strict=True)]
        text = "".join(parts) if all(isinstance(part, str) for part in parts) else None
    return Message(role, text) if role is not None and isinstance(text, str) else None


def _opened(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """(system messages at the start, others, without an answer to no question)"""
    opening = [*takewhile(lambda message: message.role == "system", messages)]
    others = messages[len(opening) :]
    return opening, others[1:] if others and others[0].role == "assistant" else others


def first_pair(turns: Sequence[Any]) -> tuple[str, str | None] | None:
    """(prompt, answer or None) of the first question, with system messages before; None: it has none."""
    readable = takewhile(lambda message: message is not None, map(read_turn, turns))
    opening, others = _opened([message for message in readable if message is not None])
    roles = [message.role for message in others[:2]]
    if roles[:1] not in (["user"], [""]) or roles[1:] not in ([], ["assistant"], [""]):
        return None
    prompt = "\n\n".join(message.content for message in [*opening, others[0]])
    return (prompt, others[1].content if len(others) > 1 else None) if prompt else None


def drop_reason(prompt_len: int, output_len: int, *, length_is_forced: bool) -> str | None:
    """Reason to drop a pair of these lengths (in tokens); None if it is kept."""
    if prompt_len < MIN_TOKENS:
        return f"prompt under {MIN_TOKENS} tokens"
    if output_len < MIN_TOKENS and not length_is_forced:
        return f"answer under {MIN_TOKENS} tokens"
    if prompt_len > MAX_PROMPT_TOKENS:
        return f"prompt over {MAX_PROMPT_TOKENS} tokens"
    if prompt_len + output_len > MAX_TOTAL_TOKENS:
        return f"prompt and answer over {MAX_TOTAL_TOKENS} tokens"
    return None


def sharegpt_workload(
    tokenizer: Tokenizer,
    *,
    num_prompts: int,
    max_model_len: int,
    path: Path | None = None,
    seed: int = 0,
    output_len: int | None = None,
    shuffle: bool = True,
    oversample: bool = True,
) -> Workload:
    """`num_prompts` requests from a ShareGPT file, or from the bundled stand-in when `path` is None. Pairs
    that exceed the model's context are dropped too, and counted in the notes. Raises BadInput: the file is
    unusable, or the filter leaves no prompt."""
    entries = load_conversations(path or STAND_IN, seed if shuffle else None)
    pairs: list[tuple[list[int], int]] = []
    dropped: Counter[str] = Counter()
    for turns in entries:
        if len(pairs) == num_prompts:
            break
        prompt, answer = first_pair(turns) or ("", None)
        if answer is None:
            dropped[NO_PAIR] += 1
            continue
        prompt_ids = list(tokenizer.encode(prompt))
        is_forced = output_len is not None
        length = len(tokenizer.encode(answer)) if output_len is None else output_len
        reason = drop_reason(len(prompt_ids), length, length_is_forced=is_forced)
        if reason is None and len(prompt_ids) + length > max_model_len:
            reason = f"longer than the model's context of {max_model_len} tokens"
        if reason is None:
            pairs.append((prompt_ids, length))
        else:
            dropped[reason] += 1
    source = f"ShareGPT file {path.name}" if path else "bundled ShareGPT stand-in"
    if not pairs:
        reasons = ", ".join(f"{count} × {reason}" for reason, count in dropped.items())
        raise BadInput(f"{source}: the filter leaves no prompt ({reasons})")
    notes = [f"{count} conversations dropped: {reason}" for reason, count in dropped.items()]
    if oversample:
        pairs = oversampled(pairs, num_prompts, seed, notes)
    stand_in = [STAND_IN_NOTE] if path is None else []
    return Workload("sharegpt", source, numbered(pairs), (*stand_in, *notes), path is None)


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
    builder = ConversationBuilder(tokenizer, rules)
    items: list[WorkloadItem] = []
    if path is None:
        threads = stand_in_threads(seed)
    else:
        threads = map(exchanges_of, load_conversations(path, seed if shuffle else None))
    for thread in threads:
        if len(items) == num_prompts:
            break
        if not thread:
            builder.drop(NO_PAIR)
        elif item := builder.item([replace(turn, output_len=output_len) for turn in thread]):
            items.append(item)
    source = f"threads of ShareGPT file {path.name}" if path else "bundled ShareGPT stand-in"
    notes = builder.notes()
    if not items:
        raise BadInput(f"{source}: no conversation is left ({', '.join(notes)})")
    if oversample:
        items = oversampled(items, num_prompts, seed, notes, "conversations")
    stand_in = [STAND_IN_NOTE] if path is None else []
    return Workload("sharegpt", source, in_order(items), (*stand_in, *notes), path is None)


def exchanges_of(messages: list[Any]) -> list[SourceTurn]:
    """Alternating (question, answer) pairs, up to a break; system messages join the first question."""
    spoken: list[Message] = []
    for message in map(read_turn, messages):
        if message is None or not message.content.strip():
            break
        spoken.append(message)
    opening, spoken = _opened(spoken)
    exchanges: list[SourceTurn] = []
    for question, answer in zip(spoken[::2], spoken[1::2], strict=False):
        if (question.role, answer.role) != ("user", "assistant"):
            break
        exchanges.append(SourceTurn((*opening, question), answer.content))
        opening = []
    return exchanges


def stand_in_threads(seed: int) -> Iterator[list[SourceTurn]]:
    """Endless threads, chained from the stand-in's pairs: each pair is used once before any is used again."""
    rng = random.Random(seed)
    pairs = [exchanges_of(turns)[0] for turns in load_conversations(STAND_IN)]
    deck: list[SourceTurn] = []
    while True:
        count = rng.randint(*STAND_IN_TURNS)
        if len(deck) < count:
            deck += rng.sample(pairs, len(pairs))
        yield [deck.pop(0) for _ in range(count)]
