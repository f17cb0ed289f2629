"""Conversations to workload items: the chat template split into what each turn appends.

An agentic workload is synthetic conversations: a shared system prompt with tools, short JSON calls, growing
results. Messages have the Hermes form, results in user messages, so that any template renders them.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from ...base.errors import BadInput
from ...engine.base.chat_template import PLAIN_TEMPLATE
from ..options.values import ThinkTime
from .workload import ConversationTurn, Message, Workload, WorkloadItem

History = Literal["model", "dataset"]
# Private-use characters stand for the answers while the template renders a conversation.
NO_PAUSE = ThinkTime()
_ANSWER = "\ue000answer\ue001"


@dataclass(frozen=True, slots=True)
class SourceTurn:
    """A source conversation's turn: messages, answer, tokens to generate (None: the answer's length)."""

    messages: tuple[Message, ...]
    answer: str
    output_len: int | None = None


class ChatSegments:
    """A tokenizer's chat template, or serve-local's plain one, split at a conversation's answers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.is_plain = not getattr(tokenizer, "chat_template", None)
        self._template = PLAIN_TEMPLATE if self.is_plain else None

    def split(self, exchanges: Sequence[SourceTurn]) -> list[tuple[int, ...]]:
        """Token ids that each turn appends. BadInput: the template refuses, or leaves out an answer."""
        messages: list[dict[str, str]] = []
        for number, exchange in enumerate(exchanges):
            if number:
                messages.append({"role": "assistant", "content": _ANSWER})
            messages += [asdict(message) for message in exchange.messages]
        pieces = self._rendered(messages).split(_ANSWER)
        if len(pieces) != len(exchanges):
            raise BadInput("the model's chat template leaves answers out of the history")
        # The plain template writes a space before an answer, which the model generates itself.
        first, *later = pieces if not self.is_plain else [piece.rstrip(" ") for piece in pieces]
        return [self.encode(first, starts=True), *(self.encode(p, starts=False) for p in later)]

    def rewrites_history(self) -> bool:
        """True if the template renders earlier turns otherwise, so that appending is not what chats do."""
        question = {"role": "user", "content": "a"}
        answered = [question, {"role": "assistant", "content": _ANSWER}, question]
        alone = self._rendered([question]).rstrip(" ")
        return self._rendered(answered).split(_ANSWER)[0].rstrip(" ") != alone

    def encode(self, text: str, *, starts: bool) -> tuple[int, ...]:
        special = starts and self.is_plain
        return tuple(self._tokenizer.encode(text, add_special_tokens=special))

    def _rendered(self, messages: list[dict[str, str]]) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                messages, chat_template=self._template, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:
            # A template may raise anything.
            raise BadInput(f"the model's chat template refuses a conversation: {error}") from error


@dataclass(frozen=True, slots=True)
class ConversationRules:
    """How conversations become items: the answers that a prompt repeats (the model's own, or the data set's),
    and the number of turns (a shorter conversation is dropped, a longer one cut)."""

    max_model_len: int
    history: History = "model"
    think_time: ThinkTime = NO_PAUSE
    min_turns: int = 1
    max_turns: int | None = None
    seed: int = 0


class ConversationBuilder:
    """Builds items from conversations, and counts what was cut or dropped."""

    def __init__(self, tokenizer: Any, rules: ConversationRules) -> None:
        self._segments = ChatSegments(tokenizer)
        self._rules = rules
        self._rng = np.random.default_rng([rules.seed, 1])
        self._counts: Counter[str] = Counter()

    def item(self, exchanges: Sequence[SourceTurn]) -> WorkloadItem | None:
        """The item of a conversation, without an id; None where too few turns fit."""
        rules = self._rules
        if len(exchanges) < rules.min_turns:
            self.drop(f"under {rules.min_turns} turns")
            return None
        kept = exchanges[: rules.max_turns]
        try:
            segments = self._segments.split(kept)
        except BadInput as refusal:
            self.drop(str(refusal))
            return None
        answers = [self._segments.encode(exchange.answer, starts=False) for exchange in kept]
        turns = [
            ConversationTurn(segment, e.output_len or max(1, len(answer)), e.messages, 0.0)
            for segment, e, answer in zip(segments, kept, answers, strict=True)
        ]
        if rules.history == "dataset":
            turns[1:] = [
                replace(turn, answer_token_ids=answer, answer=exchange.answer)
                for turn, answer, exchange in zip(turns[1:], answers, kept, strict=False)
            ]
        whole = _item(turns)
        ends = [p + o for p, o in zip(whole.prompt_lens, whole.output_lens, strict=True)]
        fitting = sum(end <= rules.max_model_len for end in ends)
        if fitting < rules.min_turns:
            self.drop(f"longer than the model's context of {rules.max_model_len} tokens")
            return None
        if fitting < len(turns):
            self._counts[f"cut to the turns that fit the context of {rules.max_model_len}"] += 1
        pauses = rules.think_time.sample(self._rng, fitting - 1)
        later = zip(turns[1:fitting], pauses, strict=True)
        return _item([turns[0], *(replace(turn, think_seconds=s) for turn, s in later)])

    def drop(self, reason: str) -> None:
        self._counts[f"dropped: {reason}"] += 1

    def notes(self) -> list[str]:
        """Notes on conversations that were cut or dropped, and on the chat template."""
        notes = [f"{count} conversations {what}" for what, count in self._counts.items()]
        if self._segments.is_plain:
            notes.append(
                "the model has no chat template: a line per message, as serve-local has it"
            )
        elif self._segments.rewrites_history():
            notes.append(
                "the model's chat template renders earlier turns otherwise than the last; here every turn is "
                "appended to what was generated"
            )
        return notes


def _item(turns: Sequence[ConversationTurn]) -> WorkloadItem:
    first, *later = turns
    return WorkloadItem(
        "", first.token_ids, first.output_len, messages=first.messages, turns=tuple(later)
    )


def in_order(items: Sequence[WorkloadItem]) -> tuple[WorkloadItem, ...]:
    return tuple(replace(item, request_id=f"bench-{number}") for number, item in enumerate(items))


NUM_TURNS, TOOL_OUTPUT_GROWTH = 8, 1.25
AGENTIC_DEFAULTS = {"system": 1024, "task": 64, "tool-output": 128, "output": 48}
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
    """`num_prompts` sessions of `num_turns` requests each, after one system prompt that all share.

    The first turn asks with a task of `task_len` tokens; each later one appends a tool result, the first of
    `tool_output_len` tokens and every next one `tool_output_growth` times as long. Lengths are of the
    messages: the chat template's tokens are added. Default lengths shrink to the context, then the default
    number of turns. Raises BadInput: explicit lengths that do not fit the context.
    """
    wanted = {"system": system_len, "task": task_len, "tool-output": tool_output_len}
    wanted["output"] = output_len
    segments = ChatSegments(tokenizer)
    for turns in [num_turns] if num_turns else range(NUM_TURNS, 0, -1):
        results = [tool_output_growth**number for number in range(turns - 1)]
        weights = {"system": 1.0, "task": 1.0, "tool-output": sum(results), "output": float(turns)}
        opening = SourceTurn((Message("system", ""), Message("user", "")), "")
        later = [SourceTurn((Message("user", TOOL_RESPONSE.format("")),), "")] * (turns - 1)
        room = rules.max_model_len - (
            sum(map(len, segments.split([opening, *later]))) + SLACK * (turns + 1)
        )
        if fitted := fit_session(wanted, weights, room):
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


def fit_session(
    given: dict[str, int | None], weights: dict[str, float], max_tokens: int
) -> tuple[dict[str, int], list[str]] | None:
    """Message lengths whose weighted sum fits `max_tokens`, and a note if reduced; None: impossible."""
    fixed = {name: length for name, length in given.items() if length is not None}
    free = {name: length for name, length in AGENTIC_DEFAULTS.items() if name not in fixed}
    left = max_tokens - sum(length * weights[name] for name, length in fixed.items())
    wanted = sum(length * weights[name] for name, length in free.items())
    if wanted <= left:
        return {**free, **fixed}, []
    shrunk = {name: int(length * left / wanted) for name, length in free.items()}
    if not free or min(shrunk.values()) < SHORTEST:
        return None
    lengths = " + ".join(f"{name} {length}" for name, length in shrunk.items())
    return {**shrunk, **fixed}, [f"default lengths cut to {lengths} to fit the model's context"]


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
        texts = {field: self.sentence().strip() for field in fields}
        properties = {
            field: {"type": "string", "description": text} for field, text in texts.items()
        }
        parameters = {"type": "object", "properties": properties, "required": fields}
        function = {"name": name, "description": self.sentence().strip(), "parameters": parameters}
        return json.dumps({"type": "function", "function": function}) + "\n"

    def sentence(self) -> str:
        parts = (self._rng.choice(WORDS), self._rng.choice(OBJECTS), str(self._rng.randrange(1000)))
        return " ".join(parts) + ". "

    def call(self) -> str:
        name = f"{self._rng.choice(VERBS)}_{self._rng.choice(OBJECTS)}"
        arguments = {self._rng.choice(OBJECTS): self.sentence().strip(". ")}
        called = json.dumps({"name": name, "arguments": arguments})
        return f"<tool_call>\n{called}\n</tool_call>"

    def tool_response(self, length: int) -> str:
        return TOOL_RESPONSE.format(self.text(length, self.row))

    def row(self) -> str:
        values = {field: self._rng.randrange(10**6) for field in self._rng.sample(OBJECTS, 2)}
        return json.dumps({**values, "note": self.sentence().strip()}) + "\n"
