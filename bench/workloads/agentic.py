"""Agentic sessions: a shared system prompt with tool definitions, short JSON calls, growing tool results.

Synthetic text from a seed. The messages have the Hermes form (`<tool_call>`, `<tool_response>`), with tool
results in user messages, so that any chat template renders them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from ...quant.base.errors import BadInput
from .conversations import (
    ChatSegments,
    ConversationBuilder,
    ConversationRules,
    SourceTurn,
    in_order,
)
from .workload import Message, Workload

NUM_TURNS, TOOL_OUTPUT_GROWTH = 8, 1.25
SYSTEM_LEN, TASK_LEN, TOOL_OUTPUT_LEN, OUTPUT_LEN = 1024, 64, 128, 48
# Tokens by which the text of a message may differ from its length, once the template surrounds it.
SLACK = 2
SHORTEST = 4
INSTRUCTION = (
    "Answer with one call, as JSON within <tool_call></tool_call>. These are your tools:\n"
)
TOOL_RESPONSE = "<tool_response>\n{}\n</tool_response>"

VERBS = ("read", "list", "search", "write", "run", "query", "fetch", "compare", "rename", "check")
OBJECTS = ("file", "table", "index", "ticket", "branch", "page", "invoice", "log", "test", "user")
WORDS = (
    *("the value of", "an entry in", "no change since", "updated by", "was removed from"),
    *("status ok", "size in bytes", "returned error", "belongs to", "was created on"),
)


def agentic_workload(
    tokenizer: Any,
    rules: ConversationRules,
    *,
    num_prompts: int,
    num_turns: int | None = None,
    system_len: int | None = None,
    task_len: int | None = None,
    tool_output_len: int | None = None,
    tool_output_growth: float = TOOL_OUTPUT_GROWTH,
    output_len: int | None = None,
    seed: int = 0,
) -> Workload:
    """`num_prompts` sessions of `num_turns` requests each, behind one system prompt that all share.

    The first turn asks with a task of `task_len` tokens; each later one appends a tool result, the first of
    `tool_output_len` tokens and every next one `tool_output_growth` times as long. Lengths are of the
    messages: the chat template's tokens are added.

    Default lengths shrink to the context, then the default number of turns.

    Raises:
        BadInput: lengths that were asked for do not fit the context.
    """
    asked = {
        "system": system_len,
        "task": task_len,
        "tool-output": tool_output_len,
        "output": output_len,
    }
    segments = ChatSegments(tokenizer)
    for turns in [num_turns] if num_turns else range(NUM_TURNS, 0, -1):
        results = [tool_output_growth**number for number in range(turns - 1)]
        weights = {"system": 1.0, "task": 1.0, "tool-output": sum(results), "output": float(turns)}
        room = rules.max_model_len - template_tokens(segments, turns)
        if fitted := fit_session(asked, weights, room):
            break
    else:
        raise BadInput(
            f"the sessions do not fit the model's context of {rules.max_model_len}: lower --agentic-*-len or "
            "--agentic-num-turns"
        )
    lengths, notes = fitted
    if not num_turns and turns < NUM_TURNS:
        notes.append(f"{turns} turns instead of {NUM_TURNS}, to fit the model's context")
    write = _Writer(tokenizer, random.Random(seed))
    tools = write.text(lengths["system"], write.tool_definition, INSTRUCTION)
    system = Message("system", tools)
    builder = ConversationBuilder(tokenizer, rules)
    items = []
    for _ in range(num_prompts):
        task = Message("user", write.text(lengths["task"], write.sentence))
        exchanges = [SourceTurn((system, task), write.call(), lengths["output"])]
        for growth in results:
            length = max(1, round(lengths["tool-output"] * growth))
            result = Message("user", write.tool_response(length))
            exchanges.append(SourceTurn((result,), write.call(), lengths["output"]))
        if item := builder.item(exchanges):
            items.append(item)
    notes += builder.notes()
    if not items:
        raise BadInput(f"agentic sessions: none is left ({', '.join(notes)})")
    source = f"synthetic agentic sessions of {turns} turns behind {lengths['system']} shared tokens"
    return Workload("agentic", source, in_order(items), tuple(notes))


def template_tokens(segments: ChatSegments, num_turns: int) -> int:
    """Tokens of a session whose messages are empty, and the slack of its messages."""
    opening = SourceTurn((Message("system", ""), Message("user", "")), "")
    later = [SourceTurn((Message("user", TOOL_RESPONSE.format("")),), "")] * (num_turns - 1)
    return sum(map(len, segments.split([opening, *later]))) + SLACK * (num_turns + 1)


def fit_session(
    asked: dict[str, int | None], weights: dict[str, float], max_tokens: int
) -> tuple[dict[str, int], list[str]] | None:
    """Message lengths whose weighted sum fits `max_tokens`, and a note if defaults were reduced; None where
    they cannot fit."""
    defaults = {
        "system": SYSTEM_LEN,
        "task": TASK_LEN,
        "tool-output": TOOL_OUTPUT_LEN,
        "output": OUTPUT_LEN,
    }
    fixed = {name: length for name, length in asked.items() if length is not None}
    free = {name: length for name, length in defaults.items() if name not in fixed}
    left = max_tokens - sum(length * weights[name] for name, length in fixed.items())
    wanted = sum(length * weights[name] for name, length in free.items())
    if wanted <= left:
        return {**free, **fixed}, []
    shrunk = {name: int(length * left / wanted) for name, length in free.items()}
    if not free or min(shrunk.values()) < SHORTEST:
        return None
    words = " + ".join(f"{name} {length}" for name, length in shrunk.items())
    return {**shrunk, **fixed}, [f"default lengths cut to {words} to fit the model's context"]


class _Writer:
    """Seeded text of exact token lengths."""

    def __init__(self, tokenizer: Any, rng: random.Random) -> None:
        self._tokenizer = tokenizer
        self._rng = rng

    def text(self, length: int, piece: Callable[[], str], opening: str = "") -> str:
        """Text of `length` tokens: the opening and then pieces, cut."""
        ids: list[int] = list(self._tokenizer.encode(opening, add_special_tokens=False))
        while len(ids) < length:
            ids += self._tokenizer.encode(piece(), add_special_tokens=False)
        return self._tokenizer.decode(ids[:length], skip_special_tokens=True)

    def tool_definition(self) -> str:
        name = f"{self._rng.choice(VERBS)}_{self._rng.choice(OBJECTS)}"
        fields = self._rng.sample(OBJECTS, 2)
        properties = {
            field: {"type": "string", "description": self.sentence().strip()} for field in fields
        }
        function = {
            "name": name,
            "description": self.sentence().strip(),
            "parameters": {"type": "object", "properties": properties, "required": fields},
        }
        return json.dumps({"type": "function", "function": function}) + "\n"

    def sentence(self) -> str:
        words = (self._rng.choice(WORDS), self._rng.choice(OBJECTS), str(self._rng.randrange(1000)))
        return " ".join(words) + ". "

    def call(self) -> str:
        """A tool call: the answer of the data set."""
        name = f"{self._rng.choice(VERBS)}_{self._rng.choice(OBJECTS)}"
        arguments = {self._rng.choice(OBJECTS): self.sentence().strip(". ")}
        called = json.dumps({"name": name, "arguments": arguments})
        return f"<tool_call>\n{called}\n</tool_call>"

    def tool_response(self, length: int) -> str:
        """A tool result, of `length` tokens between its tags."""
        return TOOL_RESPONSE.format(self.text(length, self.row))

    def row(self) -> str:
        values = {field: self._rng.randrange(10**6) for field in self._rng.sample(OBJECTS, 2)}
        return json.dumps({**values, "note": self.sentence().strip()}) + "\n"
