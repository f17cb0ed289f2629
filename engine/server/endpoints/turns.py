"""Conversations as chat templates render them: some read one system message, or one call of a turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from ....base.errors import BadInput
from ...base.chat_template import render_chat

Turn = dict[str, Any]
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
HARMONY_EFFORTS = ("low", "medium", "high")
"""Efforts of gpt-oss, whose template writes any text."""


def keeps_system_turns(tokenizer: Any, *, as_parts: bool = False) -> bool:
    """True if the chat template renders every system message, also a second one and one after an answer."""
    turns = []
    for index, role in enumerate(("system", "system", "user", "assistant", "system", "user")):
        text = f"probe {index}."
        turns.append(
            {"role": role, "content": [{"type": "text", "text": text}] if as_parts else text}
        )
    try:
        rendered = render_chat(tokenizer, turns)
    except BadInput:
        return False
    return all(f"probe {index}." in rendered for index in range(len(turns)))


def efforts_of(tokenizer: Any, *, as_parts: bool = False) -> tuple[str, ...]:
    """Reasoning efforts that the chat template does not refuse; all of them where it refuses each."""
    turns = [_turn("user", "probe", as_parts)]
    taken = ["none"]
    for effort in EFFORTS[1:]:
        options = {"enable_thinking": True, "thinking": True, "reasoning_effort": effort}
        try:
            render_chat(tokenizer, turns, options)
        except BadInput:
            continue
        taken.append(effort)
    return tuple(taken) if len(taken) > 1 else EFFORTS


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
            if queue := results.get(call["id"]) or results.get(None):
                read.append(queue.popleft())
        read += [result for queue in results.values() for result in queue]
    return read


def _turn(role: str, text: str, as_parts: bool) -> Turn:
    return {"role": role, "content": [{"type": "text", "text": text}] if as_parts else text}


def _joined(first: Any, second: Any) -> Any:
    if isinstance(first, str) and isinstance(second, str):
        return "\n\n".join(filter(None, (first, second)))
    parts = [
        [{"type": "text", "text": content}] if isinstance(content, str) else content
        for content in (first, second)
    ]
    return [*parts[0], {"type": "text", "text": "\n\n"}, *parts[1]]
