"""Conversations to workload items: the chat template split into what each turn appends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ...engine.server.endpoints.tokenization import PLAIN_TEMPLATE
from ...quant.base.errors import BadInput
from ..options.values import ThinkTime
from .workload import ConversationTurn, Message, WorkloadItem

History = Literal["model", "dataset"]
# Private-use characters stand for the answers while the template renders a conversation.
NO_PAUSE = ThinkTime()
_ANSWER = "\ue000answer\ue001"


@dataclass(frozen=True, slots=True)
class SourceTurn:
    """One turn of a source conversation: its new messages, the answer, and how many tokens to generate.

    `output_len` None is the length of the answer.
    """

    messages: tuple[Message, ...]
    answer: str
    output_len: int | None = None


class ChatSegments:
    """A tokenizer's chat template, split at the answers of a conversation.

    A model without a template gets the plain one of serve-local: a line per message.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.is_plain = not getattr(tokenizer, "chat_template", None)
        self._template = PLAIN_TEMPLATE if self.is_plain else None

    def split(self, exchanges: Sequence[SourceTurn]) -> list[tuple[int, ...]]:
        """Token ids that each turn appends: the first prompt, then what lies between two answers.

        Raises:
            BadInput: the template refuses the conversation, or does not render every answer.
        """
        spoken: list[dict[str, str]] = []
        for number, exchange in enumerate(exchanges):
            if number:
                spoken.append({"role": "assistant", "content": _ANSWER})
            spoken += [{"role": m.role, "content": m.content} for m in exchange.messages]
        pieces = self._rendered(spoken).split(_ANSWER)
        if len(pieces) != len(exchanges):
            raise BadInput("the model's chat template leaves answers out of the history")
        # The plain template writes a space before an answer, which the model generates itself.
        first, *later = pieces if not self.is_plain else [piece.rstrip(" ") for piece in pieces]
        return [
            self.encode(first, starts=True),
            *(self.encode(piece, starts=False) for piece in later),
        ]

    def rewrites_history(self) -> bool:
        """Whether the template renders an earlier turn otherwise than when it was the last one, so that
        appending is not what a chat server does."""
        asked = {"role": "user", "content": "a"}
        answered = [asked, {"role": "assistant", "content": _ANSWER}, asked]
        return self._rendered(answered).split(_ANSWER)[0].rstrip(" ") != self._rendered(
            [asked]
        ).rstrip(" ")

    def encode(self, text: str, *, starts: bool) -> tuple[int, ...]:
        """Token ids of a rendered piece. A model's template writes the special tokens itself."""
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
    """How conversations become items.

    Attributes:
        history: whose answers a prompt repeats: the model's own, or the data set's.
        min_turns, max_turns: a shorter conversation is dropped, a longer one cut.
    """

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
        """The item of a conversation, without a position; None where too few turns fit."""
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
            ConversationTurn(segment, e.output_len or max(1, len(answer)), e.messages)
            for segment, e, answer in zip(segments, kept, answers, strict=True)
        ]
        if rules.history == "dataset":
            turns[1:] = [
                replace(turn, answer_token_ids=answer, answer=exchange.answer)
                for turn, answer, exchange in zip(turns[1:], answers, kept, strict=False)
            ]
        whole = _item(turns)
        fitting = _fitting_turns(whole, rules.max_model_len)
        if fitting < rules.min_turns:
            self.drop(f"longer than the model's context of {rules.max_model_len} tokens")
            return None
        if fitting < len(turns):
            self._counts[f"cut to the turns that fit the context of {rules.max_model_len}"] += 1
        pauses = rules.think_time.sample(self._rng, fitting - 1)
        later = zip(turns[1:fitting], pauses, strict=True)
        return _item([turns[0], *(replace(turn, think_seconds=s) for turn, s in later)])

    def drop(self, reason: str) -> None:
        """Count a conversation that is left out."""
        self._counts[f"dropped: {reason}"] += 1

    def notes(self) -> list[str]:
        """Say what was cut or dropped, and what the template implies."""
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


def _fitting_turns(item: WorkloadItem, max_model_len: int) -> int:
    """How many turns, from the first, have a prompt and an answer that fit the context."""
    ends = [p + o for p, o in zip(item.prompt_lens, item.output_lens, strict=True)]
    return sum(end <= max_model_len for end in ends)


def in_order(items: Sequence[WorkloadItem]) -> tuple[WorkloadItem, ...]:
    """The items with ids by position."""
    return tuple(replace(item, request_id=f"bench-{number}") for number, item in enumerate(items))
