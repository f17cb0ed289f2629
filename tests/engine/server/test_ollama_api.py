"""Ollama's API, by its own documents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from llmopt.engine import LLM, SamplingParams
from llmopt.engine.server.protocol.errors import ApiError
from llmopt.engine.server.protocol.ollama_protocol import Options, filled
from llmopt.engine.server.protocol.server_options import ServerOptions

from ...support.live_server import RunningServer, make_engine, running
from .test_messages_api import TEMPLATE
from .test_tool_calls import CLOCK, JSON_ONE, WEATHER, saying

USER: Any = [{"role": "user", "content": "Is it raining?"}]
GREEDY = {"temperature": 0, "num_predict": 12}
DURATIONS = {"total_duration", "load_duration", "prompt_eval_duration", "eval_duration"}


@pytest.fixture(scope="module")
def served() -> Iterator[RunningServer]:
    with running(make_engine(), chat_template=TEMPLATE) as server:
        yield server


def whole(server: RunningServer, path: str, **body: Any) -> dict[str, Any]:
    with server.http() as http:
        response = http.post(path, json={"model": "tiny", "stream": False, **body})
    assert response.status_code == 200, response.text
    return response.json()


def streamed(server: RunningServer, path: str, **body: Any) -> list[dict[str, Any]]:
    with server.http() as http:
        response = http.post(path, json={"model": "tiny", **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    for line in lines:
        assert line["model"] == "tiny" and datetime.fromisoformat(line["created_at"])
    return lines


def check_ending(last: dict[str, Any], reason: str, num_tokens: int) -> None:
    assert last["done_reason"] == reason and last["eval_count"] == num_tokens
    assert last["prompt_eval_count"] > 0
    assert all(isinstance(last[name], int) for name in DURATIONS)
    assert last["total_duration"] >= last["prompt_eval_duration"] + last["eval_duration"] > 0


def test_a_chat_whole_and_streamed(served: RunningServer) -> None:
    answer = whole(served, "/api/chat", messages=USER, options=GREEDY)
    check_ending(answer, "length", 12)
    assert answer["message"]["role"] == "assistant" and answer["message"]["content"]
    parts = streamed(served, "/api/chat", messages=USER, options=GREEDY, keep_alive="5m")
    check_ending(parts[-1], "length", 12)
    assert len(parts) > 5 and parts[-1]["message"]["content"] == ""
    assert "".join(p["message"]["content"] for p in parts) == answer["message"]["content"]
    chat = served.openai().chat.completions.create(
        model="tiny", messages=USER, temperature=0, max_tokens=12
    )
    assert chat.choices[0].message.content == answer["message"]["content"]


def test_a_prompt_goes_through_the_template_unless_raw(served: RunningServer, llm: LLM) -> None:
    def greedy(prompt: str) -> str:
        return llm.generate(prompt, SamplingParams(temperature=0, max_tokens=12))[0].text

    asked = {"prompt": "Once upon a time", "options": GREEDY}
    raw = whole(served, "/api/generate", raw=True, **asked)
    assert raw["response"] == greedy("Once upon a time") and "context" not in raw
    with served.http() as http:
        rendered = http.post("/tokenize", json={"messages": [{"role": "user", "content": "Tom"}]})
    answer = whole(served, "/api/generate", prompt="Tom", options=GREEDY)
    assert answer["context"][:-12] == rendered.json()["tokens"]
    parts = streamed(served, "/api/generate", prompt="Tom", options=GREEDY)
    assert "".join(part["response"] for part in parts) == answer["response"]
    check_ending(parts[-1], "length", 12)
    system = whole(served, "/api/generate", prompt="Tom", system="Be brief.", options=GREEDY)
    assert system["prompt_eval_count"] > answer["prompt_eval_count"]
    again = whole(served, "/api/generate", prompt="Tom", context=answer["context"], options=GREEDY)
    assert again["prompt_eval_count"] == answer["prompt_eval_count"] + len(answer["context"])


def test_without_a_template_a_prompt_is_continued(server: RunningServer, llm: LLM) -> None:
    answer = whole(server, "/api/generate", prompt="Once upon a time", options=GREEDY)
    params = SamplingParams(temperature=0, max_tokens=12)
    assert answer["response"] == llm.generate("Once upon a time", params)[0].text


def test_tools_whole_and_streamed(served: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = '{"name": "clock", "arguments": {}}'
    saying(
        served,
        monkeypatch,
        f"I look.\n<tool_call>\n{JSON_ONE}\n</tool_call>\n<tool_call>\n{clock}\n</tool_call>",
    )
    asked = {"messages": USER, "tools": [WEATHER, CLOCK], "options": {"temperature": 0}}
    message = whole(served, "/api/chat", **asked)["message"]
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [
        {"name": "weather", "arguments": {"city": "Köln"}},
        {"name": "clock", "arguments": {}},
    ]
    parts = streamed(served, "/api/chat", **asked)
    calls = [call for part in parts for call in part["message"].get("tool_calls", ())]
    assert calls == message["tool_calls"] and parts[-1]["done_reason"] == "stop"
    assert "".join(part["message"]["content"] for part in parts) == message["content"]


def test_the_conversation_goes_on_after_a_call(served: RunningServer) -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Köln"}}}
    turns = [
        *USER,
        {"role": "assistant", "content": "", "tool_calls": [call], "thinking": "Hm."},
        {"role": "tool", "tool_name": "weather", "content": "dry"},
    ]
    answer = whole(served, "/api/chat", messages=turns, tools=[WEATHER], options=GREEDY)
    rendered = (
        "Tools: weather as <tool_call>\nuser: Is it raining?\nassistant: (Hm.) "
        '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>\n'
        "tool: dry\nassistant:"
    )
    tokens = served.engine.tokenizer(rendered, add_special_tokens=False).input_ids
    assert answer["prompt_eval_count"] == len(tokens)


def test_thinking_comes_apart_or_not_at_all(
    served: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    saying(served, monkeypatch, "<think>Rain? Hm.</think>It is dry.")
    for think, thinking in ((True, "Rain? Hm."), ("high", "Rain? Hm."), (False, None)):
        message = whole(served, "/api/chat", messages=USER, think=think)["message"]
        assert message.get("thinking") == thinking and message["content"] == "It is dry."
        parts = streamed(served, "/api/chat", messages=USER, think=think)
        text = "".join(part["message"].get("thinking", "") for part in parts)
        assert text == (thinking or "")
    parts = streamed(served, "/api/generate", prompt="Rain?", think=True)
    assert "".join(part.get("thinking", "") for part in parts) == "Rain? Hm."


def test_a_format_holds(served: RunningServer) -> None:
    schema = {
        "type": "object",
        "properties": {"dry": {"type": "boolean"}},
        "required": ["dry"],
        "additionalProperties": False,
    }
    body: Any = {"messages": USER, "format": schema, "think": False}
    answer = whole(served, "/api/chat", **body, options={"temperature": 0})
    assert set(json.loads(answer["message"]["content"])) == {"dry"}
    options = {"temperature": 0, "num_predict": 5}
    body = {"prompt": "A pet?", "format": "json", "think": False}
    answer = whole(served, "/api/generate", **body, options=options)
    assert answer["response"].lstrip().startswith("{")


def test_options_are_those_of_sampling(served: RunningServer) -> None:
    options = {"seed": 7, "temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
    options |= {"num_predict": 16, "repeat_penalty": 1.1, "num_ctx": 4096, "num_gpu": 1}
    first, second = (
        whole(served, "/api/generate", prompt="Tom", options=options)["response"] for _ in range(2)
    )
    assert first == second
    stop = {"temperature": 0, "stop": ["a"], "num_predict": -1}
    stopped = whole(served, "/api/generate", prompt="Once upon", raw=True, options=stop)
    assert stopped["done_reason"] == "stop" and "a" not in stopped["response"]


def test_options_that_are_off_are_not_those_of_the_checkpoint() -> None:
    """A field of None takes the value of generation_config.json; Ollama's 0 is no limit, and no penalty."""
    fields = Options(top_k=0, repeat_penalty=1.3, repeat_last_n=0).fields(512)
    assert (fields["top_k"], fields["repetition_penalty"]) == (0, 1.0)
    fields = Options(repeat_penalty=1.3).fields(512)
    assert (fields["top_k"], fields["repetition_penalty"]) == (None, 1.3)


def test_models_are_listed_and_shown(served: RunningServer) -> None:
    with served.http() as http:
        (model,) = http.get("/api/tags").json()["models"]
        (running_,) = http.get("/api/ps").json()["models"]
        shown = http.post("/api/show", json={"model": "tiny"}).json()
        version = http.get("/api/version").json()["version"]
    assert model["name"] == model["model"] == running_["name"] == "tiny"
    assert model["size"] > 1 << 20 and len(model["digest"]) == 64
    assert model["details"]["family"] == "llama" and model["details"]["parameter_size"] == "3.1M"
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["model_info"]["llama.context_length"] == served.engine.max_model_len
    assert shown["template"] == TEMPLATE
    assert tuple(map(int, version.split("."))) >= (0, 13, 4)  # which `codex --oss` asks for


def test_a_request_without_a_prompt_finds_the_model_loaded(served: RunningServer) -> None:
    answer = whole(served, "/api/generate", keep_alive=0)
    assert (answer["response"], answer["done"], answer["done_reason"]) == ("", True, "load")
    assert whole(served, "/api/chat", messages=[])["done_reason"] == "load"


@pytest.mark.parametrize(
    ("path", "status", "words", "fields"),
    [
        ("chat", 404, "no model 'other'", {"model": "other", "messages": USER}),
        ("chat", 400, "model", {"model": None, "messages": USER}),
        ("chat", 400, "images", {"messages": [{"role": "user", "images": ["x"]}]}),
        ("chat", 400, "role", {"messages": [{"role": "other"}]}),
        ("chat", 400, "top_logprobs", {"messages": USER, "top_logprobs": 2}),
        ("generate", 400, "template", {"prompt": "a", "template": "{{ range .Messages }}"}),
        ("chat", 400, "tools", {"messages": USER, "tools": [{"type": "custom"}]}),
        ("generate", 400, "suffix", {"prompt": "a", "suffix": "b"}),
        ("generate", 400, "mirostat", {"prompt": "a", "options": {"mirostat": 2}}),
        ("generate", 400, "temperature", {"prompt": "a", "options": {"temperature": -1}}),
        ("generate", 400, "format", {"prompt": "a", "format": "xml"}),
        ("generate", 400, "context", {"prompt": "a", "context": [-1]}),
        ("show", 404, "no model", {"model": "other"}),
    ],
)
def test_refusals_are_ollamas(
    served: RunningServer, path: str, status: int, words: str, fields: dict[str, Any]
) -> None:
    with served.http() as http:
        response = http.post(f"/api/{path}", json={"model": "tiny", **fields})
    assert response.status_code == status and set(response.json()) == {"error"}
    assert words in response.json()["error"]


def test_log_probabilities(served: RunningServer) -> None:
    asked: Any = {"options": GREEDY, "logprobs": True, "top_logprobs": 2}
    chat = whole(served, "/api/chat", messages=USER, **asked)["logprobs"]
    assert len(chat) == 12 and all(len(each["top_logprobs"]) == 2 for each in chat)
    assert {"token", "logprob", "bytes"} <= chat[0].keys()
    parts = streamed(served, "/api/chat", messages=USER, **asked)
    assert [each for part in parts for each in part.get("logprobs", ())] == chat
    raw = whole(served, "/api/generate", prompt="Lily", raw=True, **asked)["logprobs"]
    assert len(raw) == 12 and len(raw[0]["top_logprobs"]) == 2


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{" + " " * 40_000, "at most 32768"),
        ("{{ }}", "not supported"),
        ("{{.Prompt}}" * 2000, "more than 16777216 characters"),
        ("{{if .Prompt}}" * 2000, "more than 32 ifs"),
        ("{{if .Prompt}}", "no end"),
        ("{{ {{ .Prompt }}", "not supported"),
    ],
)
def test_templates_that_are_refused(template: str, problem: str) -> None:
    with pytest.raises(ApiError, match=problem):
        filled(template, {"System": "be", "Prompt": "Lily" * 3000})


def test_braces_without_an_end_are_text() -> None:
    blanks = "{{" + " " * 1200
    assert filled(f"{{{{- .Prompt -}}}}  {blanks}", {"Prompt": "Lily"}) == f"Lily{blanks}"


def test_a_template_of_the_request(served: RunningServer) -> None:
    template = (
        "{{ if .System }}<{{ .System }}>\n{{ else }}none {{- end }}\n"
        "{{- .Prompt }} so{{ if .Response }} {{ .Response }}{{ end }}"
    )
    assert filled(template, {"System": "be", "Prompt": "Lily"}) == "<be>\nLily so"
    assert filled(template, {"System": "", "Prompt": "Lily"}) == "noneLily so"
    branch = "{{ if .System }}{{ .Response }}{{ else }}{{ .Prompt }}!{{ end }}"
    assert filled(branch, {"System": "", "Prompt": "Lily"}) == "Lily!"
    with pytest.raises(ApiError, match="an if has no end"):
        filled("{{ if .System }}a", {"System": "", "Prompt": "Lily"})
    asked: Any = {"options": GREEDY, "prompt": "Lily"}
    shown = whole(served, "/api/generate", template="{{ .Prompt }} and", **asked)
    raw = whole(served, "/api/generate", raw=True, **{**asked, "prompt": "Lily and"})
    assert shown["response"] == raw["response"]


def test_a_suffix_goes_behind_the_tokens_that_the_model_has_for_it(
    served: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = served.app.state.service.text
    monkeypatch.setattr(text, "fill_markers", ("<P>", "<S>", "<M>"))
    asked: Any = {"options": GREEDY}
    filled_in = whole(served, "/api/generate", prompt="a", suffix="b", **asked)
    raw = whole(served, "/api/generate", raw=True, prompt="<P>a<S>b<M>", **asked)
    assert filled_in["response"] == raw["response"]
    assert filled_in["prompt_eval_count"] == raw["prompt_eval_count"]


def test_options_without_an_effect_are_named(served: RunningServer) -> None:
    options = {**GREEDY, "repeat_last_n": 64, "typical_p": 0.7, "num_thread": 4, "num_ctx": 77}
    body = {"model": "tiny", "prompt": "a", "options": options, "stream": False}
    with served.http() as http:
        answer = http.post("/api/generate", json=body)
        neutral = {**GREEDY, "repeat_last_n": -1, "typical_p": 1}
        plain = http.post("/api/generate", json={**body, "options": neutral})
    names = "options.num_ctx, options.num_thread, options.repeat_last_n, options.typical_p"
    assert answer.headers["x-ignored-fields"] == names
    assert "x-ignored-fields" not in plain.headers


def test_thinking_is_refused_where_the_model_cannot(server: RunningServer) -> None:
    with server.http() as http:
        body = {"model": "tiny:latest", "messages": USER, "think": True}
        response = http.post("/api/chat", json=body)
    assert response.status_code == 400
    assert response.json() == {"error": "'tiny' does not support thinking"}


def test_a_failure_on_the_way_is_the_last_line(
    served: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute, steps = served.engine.runner.execute, iter(range(100))

    def fails(*arguments: Any) -> Any:
        if next(steps) == 3:
            raise RuntimeError("out of luck")
        return execute(*arguments)

    monkeypatch.setattr(served.engine.runner, "execute", fails)
    with served.http() as http:
        response = http.post("/api/chat", json={"model": "tiny", "messages": USER})
    last = json.loads(response.text.splitlines()[-1])
    assert set(last) == {"error"} and "step" in last["error"]


def test_keys_hold_for_it_too() -> None:
    options = ServerOptions(api_keys=("sesame",))
    with running(make_engine("stories260K"), options) as server, server.http() as http:
        refused = http.get("/api/tags")
        assert refused.status_code == 401 and set(refused.json()) == {"error"}


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded"])
def test_a_body_is_json_whatever_its_type_says(served: RunningServer, kind: str | None) -> None:
    """LiteLLM sends none, and the examples of Ollama's documents are `curl -d`."""
    body = json.dumps({"model": "tiny", "prompt": "Tom", "stream": False, "options": GREEDY})
    headers = {} if kind is None else {"Content-Type": kind}
    with served.http() as http:
        answered = http.post("/api/generate", content=body, headers=headers)
        # A browser's page could send such a body here without being asked whether it may.
        refused = http.post(
            "/api/generate", content=body, headers={**headers, "Origin": "https://example.org"}
        )
    assert answered.status_code == 200 and answered.json()["eval_count"] == 12
    assert refused.status_code == 400
