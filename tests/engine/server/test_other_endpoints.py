"""`/v1/responses`, `/tokenize`, `/detokenize`, `/abort`."""

from __future__ import annotations

import json
import threading
from typing import Any

import openai
import pytest
from llmopt.engine import LLM, SamplingParams
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from ...support.live_server import RunningServer, slow_steps

AS_TEXT = "System: Tell stories.\nUser: Who was Lily?\nAssistant:"
BODY: dict[str, Any] = {
    "instructions": "Tell stories.",
    "input": "Who was Lily?",
    "temperature": 0,
    "max_output_tokens": 20,
}


def post(server: RunningServer, path: str, body: dict[str, Any], status: int = 200) -> Any:
    with server.http() as http:
        response = http.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json() if status == 200 else response.json()["error"]["message"]


def test_a_response_is_the_chats_text(server: RunningServer, llm: LLM) -> None:
    expected = llm.generate(AS_TEXT, SamplingParams(temperature=0, max_tokens=20))[0]
    found = post(server, "/v1/responses", BODY)
    response = Response.model_validate(found, strict=True)
    assert response.output_text == expected.text
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None and response.usage.output_tokens == 20
    assert set(found["usage"]["seconds"]) == {"queue", "prefill", "decode"}
    parts = [{"type": "input_text", "text": "Who was Lily?"}]
    items = [
        {"role": "system", "content": "Tell stories."},
        {"type": "message", "role": "user", "content": parts},
    ]
    as_items = post(server, "/v1/responses", {**BODY, "instructions": None, "input": items})
    assert as_items["output"][0]["content"][0]["text"] == expected.text


def test_a_response_streams_the_official_events(server: RunningServer) -> None:
    whole = post(server, "/v1/responses", BODY)
    with server.http() as http, http.stream(
        "POST", "/v1/responses", json={**BODY, "stream": True}
    ) as stream:  # fmt: skip
        lines = [line for line in stream.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines[::2]]
    payloads = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert names == [payload["type"] for payload in payloads]
    events = [TypeAdapter(ResponseStreamEvent).validate_python(p, strict=True) for p in payloads]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = names.count("response.output_text.delta")
    assert names == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added", *["response.output_text.delta"] * deltas,
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.incomplete",
    ]  # fmt: skip
    text = whole["output"][0]["content"][0]["text"]
    assert "".join(p["delta"] for p in payloads if "delta" in p) == text
    assert payloads[-1]["response"]["output"][0]["content"] == whole["output"][0]["content"]

    with server.openai().responses.stream(
        model="tiny", input="Who?", temperature=0, extra_body={"guided_choice": ["Lily", "Tom"]}
    ) as manager:
        assert manager.get_final_response().output_text in ("Lily", "Tom")


def test_a_response_with_a_schema_and_logprobs(server: RunningServer) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 5}},
        "required": ["n"],
        "additionalProperties": False,
    }
    found = post(
        server,
        "/v1/responses",
        {
            **BODY,
            "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}},
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
        },
    )
    response = Response.model_validate(found, strict=True)
    assert response.status == "completed"
    assert 1 <= json.loads(response.output_text)["n"] <= 5
    logprobs = found["output"][0]["content"][0]["logprobs"]
    assert len(logprobs) == response.usage.output_tokens  # type: ignore[union-attr]
    assert {len(one["top_logprobs"]) for one in logprobs} == {2}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call", "call_id": "1"}]}, "'computer_call'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "'input_image'"),
        ({"tools": [{"type": "custom"}]}, "name"),
        ({"tool_choice": {"type": "web_search_preview"}}, "'web_search_preview' is hosted"),
        ({"background": True}, "background"),
        ({"n": 2}, "n is not"),
        ({"max_tokens": 4}, "max_tokens"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "text.format"),
        ({"max_output_tokens": 0}, "max_tokens"),
    ],
)
def test_a_response_that_cannot_be_made(
    server: RunningServer, fields: dict[str, Any], named: str
) -> None:
    assert named in post(server, "/v1/responses", {**BODY, **fields}, 400)


def test_tokens_of_texts_and_back(server: RunningServer, llm: LLM) -> None:
    text = "Lily saw a 🐶"
    found = post(server, "/tokenize", {"prompt": text, "return_token_strs": True})
    assert found["tokens"] == llm.engine.encode(text)
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == llm.engine.max_model_len
    bare = post(server, "/tokenize", {"prompt": text, "add_special_tokens": False})
    assert [1, *bare["tokens"]] == found["tokens"]
    assert post(server, "/detokenize", {"tokens": bare["tokens"]})["prompt"] == text
    messages = [
        {"role": "system", "content": "Tell stories."},
        {"role": "user", "content": "Who was Lily?"},
    ]
    chat = post(server, "/tokenize", {"messages": messages})
    assert chat["tokens"] == llm.engine.encode(AS_TEXT)
    assert chat["token_strs"] is None
    begun = [*messages, {"role": "assistant", "content": "A girl who"}]
    going_on = {"continue_final_message": True, "add_generation_prompt": False}
    continued = post(server, "/tokenize", {"messages": begun, **going_on})["tokens"]
    assert post(server, "/detokenize", {"tokens": continued})["prompt"].endswith("A girl who")
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": messages}),
        ("/tokenize", {"messages": begun, "continue_final_message": True}),
        ("/tokenize", {"messages": messages, "chat_template": "{{ messages }}"}),
        ("/detokenize", {"tokens": [10**6]}),
        ("/detokenize", {"tokens": [-1]}),
    ):
        assert post(server, path, body, 400)


def test_abort_ends_a_response_and_tells_its_client(server: RunningServer) -> None:
    ends: dict[str, Any] = {}
    body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True}

    def whole() -> None:
        with server.http() as http:
            ends["whole"] = http.post("/v1/completions", json={**body, "request_id": "a"})

    def stream() -> None:
        with pytest.raises(openai.APIError) as told:
            client = server.openai()
            for _ in client.completions.create(
                model="tiny",
                prompt="Once",
                max_tokens=400,
                stream=True,
                extra_body={"request_id": "b", "ignore_eos": True},
            ):
                pass
        ends["stream"] = str(told.value)

    threads = [threading.Thread(target=whole), threading.Thread(target=stream)]
    with slow_steps(server):
        for thread in threads:
            thread.start()
        server.wait_for(lambda engine: engine.stats.num_running == 2)
        for name in ("cmpl-a", "cmpl-b"):
            assert post(server, "/abort", {"id": name}) == {"id": name, "aborted": True}
        for thread in threads:
            thread.join()
    assert ends["whole"].status_code == 409
    assert ends["whole"].json()["error"]["code"] == "aborted"
    assert ends["stream"] == "the request was aborted"
    assert post(server, "/abort", {"id": "cmpl-a"})["aborted"] is False
    assert server.wait_until_idle().kv_blocks_used == 0
