"""Conversations as chat templates render them: some read one system message, or one call of a turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....base.errors import BadInput
from ...base.chat_template import render_chat

Turn = dict[str, Any]


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


def _joined(first: Any, second: Any) -> Any:
    if isinstance(first, str) and isinstance(second, str):
        return "\n\n".join(filter(None, (first, second)))
    parts = [
        [{"type": "text", "text": content}] if isinstance(content, str) else content
        for content in (first, second)
    ]
    return [*parts[0], {"type": "text", "text": "\n\n"}, *parts[1]]
