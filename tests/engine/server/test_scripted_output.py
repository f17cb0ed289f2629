"""An agent's loop with a script in place of a model that could do it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.engine.server.protocol.server_options import ServerOptions, read_script, scripted_text

from ...support.live_server import make_engine, running
from .test_tool_calls import JSON_ONE, TEMPLATE, WEATHER


def test_a_call_its_result_and_the_answer(tmp_path: Path) -> None:
    script = [
        {"after": "Is it raining?", "text": f"<tool_call>{JSON_ONE}</tool_call>"},
        {"after": "tool: dry", "text": "No, it is dry."},
    ]
    path = tmp_path / "script.json"
    path.write_text(json.dumps(script))
    options = ServerOptions(script=read_script(path))
    turns: list[Any] = [{"role": "user", "content": "Is it raining?"}]
    fields: Any = {"model": "tiny", "tools": [WEATHER]}
    with running(make_engine("stories260K"), options, chat_template=TEMPLATE) as server:
        client = server.openai()
        first = client.chat.completions.create(messages=turns, **fields).choices[0]
        (call,) = first.message.tool_calls or [None]
        turns += [
            first.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id if call else "", "content": "dry"},
        ]
        second = client.chat.completions.create(messages=turns, **fields).choices[0]
    assert first.finish_reason == "tool_calls" and second.finish_reason == "stop"
    assert second.message.content == "No, it is dry."


def test_a_prompt_that_no_entry_fits_is_free(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text('[{"after": "a", "text": "1"}, {"after": "bb", "text": "2"}]')
    script = read_script(path)
    assert [scripted_text(script, text) for text in ("x", "a", "a bb", "bb a")] == [
        None,
        "1",
        "2",
        "1",
    ]


@pytest.mark.parametrize("text", ["{", "{}x", '[{"after": "a"}]', "3", '["a"]'])
def test_what_is_no_script_says_so(tmp_path: Path, text: str) -> None:
    path = tmp_path / "script.json"
    path.write_text(text)
    with pytest.raises(BadInput, match="a JSON list of objects with after and text"):
        read_script(path)
    with pytest.raises(BadInput, match="No such file"):
        read_script(tmp_path / "none")
