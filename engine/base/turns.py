"""Conversations as chat templates render them: some read one system message, or one call of a turn."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from ...base.errors import BadInput
from .chat_template import render_chat

Turn = dict[str, Any]
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
HARMONY_EFFORTS = ("low", "medium", "high")
"""Efforts of gpt-oss, whose template writes any text."""


class TurnReader:
    """Conversations as a chat template reads them, which probes of it show when a conversation needs them:
    `template` or the tokenizer's, that of a model whose template reads lists of parts alone `as_parts`."""

    def __init__(
        self, tokenizer: Any, template: str | None = None, *, as_parts: bool = False
    ) -> None:
        self._tokenizer, self._template, self._as_parts = tokenizer, template, as_parts
        self._is_harmony = "<|channel|>" in str(template or tokenizer.chat_template)

    def read(self, turns: Sequence[Turn]) -> list[Turn]:
        """The turns with later system messages and with the arguments of calls, a text or an object, as the
        template reads them."""
        if any(turn["role"] == "system" for turn in turns[1:]) and not self._keeps_system_turns:
            turns = with_one_system_turn(turns)
        turns = [
            {**turn, "tool_calls": [self._with_arguments(call) for call in calls]}
            if isinstance(calls := turn.get("tool_calls"), list | tuple) and calls
            else turn
            for turn in turns
        ]
        return with_one_call_a_turn(turns) if self._is_harmony else turns

    @cached_property
    def efforts(self) -> tuple[str, ...]:
        """Reasoning efforts that the template does not refuse; all of them where it refuses each."""
        if self._is_harmony:
            return HARMONY_EFFORTS
        turns, fixed = [self._turn("user", "probe")], {"enable_thinking": True, "thinking": True}
        taken = [e for e in EFFORTS[1:] if self._rendered(turns, {**fixed, "reasoning_effort": e})]
        return ("none", *taken) if taken else EFFORTS

    @cached_property
    def _keeps_system_turns(self) -> bool:
        """True if every system message is rendered, also a second one and one after an answer."""
        roles = ("system", "system", "user", "assistant", "system", "user")
        rendered = self._rendered([self._turn(role, f"probe {n}.") for n, role in enumerate(roles)])
        return all(f"probe {n}." in rendered for n in range(len(roles)))

    @cached_property
    def _reads_texts(self) -> bool:
        """True if arguments of calls are a JSON text: an object is refused, as by DeepSeek's templates, which
        join texts, or written as Python does."""

        def are_read(arguments: Any) -> bool:
            function = {"name": "probe", "arguments": arguments}
            calls = [{"id": "probe0000", "type": "function", "function": function}]
            call = {**self._turn("assistant", ""), "tool_calls": calls}
            result = {**self._turn("tool", "probe"), "tool_call_id": "probe0000"}
            rendered = self._rendered([self._turn("user", "probe"), call, result])
            return "probe_key" in rendered and "{'probe_key'" not in rendered

        return not are_read({"probe_key": 1}) and are_read('{"probe_key": 1}')

    def _with_arguments(self, call: Any) -> Any:
        if hasattr(call, "model_dump"):  # the OpenAI library's
            call = call.model_dump()
        if not isinstance(call, Mapping) or not isinstance(call.get("function", call), Mapping):
            return call
        function = call.get("function", call)
        arguments = function.get("arguments") or "{}"
        if self._reads_texts:
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
        else:
            with suppress(ValueError, RecursionError, TypeError):  # a call that was cut off is text
                arguments = json.loads(arguments)
            is_walked = "items" in str(self._template or self._tokenizer.chat_template)
            if is_walked and not isinstance(arguments, dict):
                arguments = {"arguments": arguments}
        function = {**function, "arguments": arguments}
        return {**call, "function": function} if "function" in call else function

    def _rendered(self, turns: Sequence[Turn], options: Mapping[str, Any] | None = None) -> str:
        """The text of turns; empty where the template refuses them."""
        try:
            return render_chat(self._tokenizer, turns, options, template=self._template)
        except BadInput:
            return ""

    def _turn(self, role: str, text: str) -> Turn:
        parts = [{"type": "text", "text": text}]
        return {"role": role, "content": parts if self._as_parts else text}


def nearest_effort(effort: str, efforts: Sequence[str]) -> str:
    """The effort that a template takes in place of another one; of two that are as near, the higher one."""
    rank = EFFORTS.index(effort)
    return min(efforts, key=lambda other: (abs(EFFORTS.index(other) - rank), -EFFORTS.index(other)))


def with_one_system_turn(turns: Sequence[Turn]) -> list[Turn]:
    """The conversation for a template that reads one system message: the first ones are joined. Later ones
    belong to the user's turn after or before them, or are one of their own."""
    read: list[Turn] = []
    was_system = False
    for turn in turns:
        is_system = turn["role"] == "system"
        is_later = is_system and bool(read) and (len(read) > 1 or read[0]["role"] != "system")
        turn = {**turn, "role": "user"} if is_later else turn
        if read and (is_system or was_system) and read[-1]["role"] == turn["role"]:
            content = _joined(read[-1]["content"], turn["content"])
            read[-1] = {**read[-1], "content": content}
        else:
            read.append(turn)
        was_system = is_system
    return read


def with_one_call_a_turn(turns: Sequence[Turn]) -> list[Turn]:
    """The conversation for harmony's templates. They read the first call of a turn, so each call has a turn
    of its own, before its result. They refuse a text with reasoning and a call, so the text is left out."""
    read: list[Turn] = []
    waiting = deque(turns)
    while waiting:
        turn = waiting.popleft()
        calls = turn.get("tool_calls")
        if not calls:
            read.append(turn)
            continue
        if turn.get("reasoning_content"):
            turn = {**turn, "content": ""}
        results: dict[str | None, deque[Turn]] = {}
        while waiting and waiting[0]["role"] == "tool":
            result = waiting.popleft()
            results.setdefault(result.get("tool_call_id"), deque()).append(result)
        for call in calls:
            read.append({**turn, "tool_calls": [call]})
            turn = {"role": turn["role"], "content": ""}
            if queue := results.get(call.get("id")) or results.get(None):
                read.append(queue.popleft())
        read += [result for queue in results.values() for result in queue]
    return read


def _joined(first: Any, second: Any) -> Any:
    if isinstance(first, str) and isinstance(second, str):
        return "\n\n".join(filter(None, (first, second)))
    parts = [
        [{"type": "text", "text": content}] if isinstance(content, str) else content
        for content in (first, second)
    ]
    return [*parts[0], {"type": "text", "text": "\n\n"}, *parts[1]]
