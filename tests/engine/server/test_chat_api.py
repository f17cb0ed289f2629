"""`/v1/chat/completions` and chat templates."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.engine import LLM, SamplingParams
from llmopt.engine.base.turns import with_one_system_turn
from llmopt.engine.server.endpoints.capabilities import default_sampling
from llmopt.engine.server.endpoints.tokenization import SpecialTexts, Tokenization
from llmopt.engine.server.protocol.chat_protocol import ChatRequest
from llmopt.quant.gguf.container import write_gguf
from llmopt.quant.source.load_processor import load_tokenizer
from llmopt.recipes import MODELS

from ...support.live_server import RunningServer, events, make_engine, running

MESSAGES: Any = [
    {"role": "system", "content": "Tell stories."},
    {"role": "user", "content": "Who was Lily?"},
]
AS_TEXT = "System: Tell stories.\nUser: Who was Lily?\nAssistant:"


def test_a_model_without_a_template_gets_the_stated_one(server: RunningServer, llm: LLM) -> None:
    expected = llm.generate(AS_TEXT, SamplingParams(temperature=0, max_tokens=30))[0]
    client = server.openai()
    whole = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_completion_tokens=30
    )
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content == expected.text
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(expected.prompt_token_ids)

    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, temperature=0, max_tokens=30, stream=True
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == expected.text
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * 29
    assert chunks[-1].choices[0].finish_reason == "length"
    assert len({chunk.id for chunk in chunks}) == 1

    with server.http() as http:
        (card,) = http.get("/v1/models").json()["data"]
    assert card["id"] == "tiny" and card["chat_template"]["source"] == "plain"
    assert "Assistant:" in card["chat_template"]["template"]


def test_without_a_limit_the_completion_ends_by_eos_or_with_the_context(
    server: RunningServer,
) -> None:
    answer = server.openai().chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, logit_bias={"1": -100, "2": -100}
    )
    assert answer.usage is not None
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == server.engine.max_model_len


def test_logprobs_have_the_chat_shape(server: RunningServer) -> None:
    answer = server.openai().chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_tokens=5, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert len(logprobs.content) == 5
    written = b"".join(bytes(token.bytes or []) for token in logprobs.content)
    assert written.decode() == answer.choices[0].message.content
    for token in logprobs.content:
        assert token.top_logprobs[0].token == token.token
        assert len(token.top_logprobs) == 2


def test_several_completions_stream_side_by_side(server: RunningServer) -> None:
    body = {"messages": MESSAGES, "n": 2, "seed": 5, "temperature": 1.0, "max_tokens": 10}
    with server.http() as http:
        whole = http.post("/v1/chat/completions", json=body).json()
    texts = ["", ""]
    roles = []
    for event in events(server, "/v1/chat/completions", body):
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"]["content"]
        roles += [choice["index"]] if "role" in choice["delta"] else []
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    assert texts[0] != texts[1]
    assert sorted(roles) == [0, 1]


def test_content_in_parts_is_joined_by_lines(server: RunningServer) -> None:
    """vLLM and llama.cpp join it so for a template that takes text."""
    parts = [{"type": "text", "text": "Who was"}, {"type": "text", "text": "Lily?"}]
    with server.http() as http:
        texts = [
            http.post(
                "/v1/chat/completions",
                json={
                    "messages": [{"role": "user", "content": content}],
                    "temperature": 0,
                    "max_tokens": 8,
                },
            ).json()["choices"][0]["message"]["content"]
            for content in (parts, "Who was\nLily?")
        ]
    assert texts[0] == texts[1]


@pytest.fixture
def templated(tmp_path: Path) -> Tokenization:
    """Tokens of a model whose template writes its own special tokens and refuses two users in a row."""
    from transformers import AutoTokenizer

    folder = tmp_path / "model"
    shutil.copytree(MODELS / "stories260K", folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{{ bos_token }}{% for m in messages %}"
        "{% if loop.index0 and m.role == messages[loop.index0 - 1].role %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenization(AutoTokenizer.from_pretrained(folder, local_files_only=True))


def encode_chat(text: Tokenization, *roles: str) -> list[int]:
    messages = [{"role": role, "content": "hi"} for role in roles]
    request = ChatRequest.model_validate({"messages": messages})
    return asyncio.run(text.encode_chat(request.messages))


def test_a_model_speaks_its_own_template(templated: Tokenization) -> None:
    assert templated.template_source == "model"
    token_ids = encode_chat(templated, "developer", "user")
    (expected,) = asyncio.run(templated.encode(["[system]hi[user]hi[assistant]"]))
    assert token_ids == expected
    assert token_ids.count(1) == 1


FIRST_SYSTEM = (
    "{% if messages[0].role == 'system' %}system: {{ messages[0].content }}\n{% endif %}"
    "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
)
LEADING_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
)
EVERY_SYSTEM = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ("sA sB uC", "system: A\n\nB\nuser: C\n"),
        ("sA uB aC sD uE", "system: A\nuser: B\nassistant: C\nuser: D\n\nE\n"),
        ("uA aB sC dD uE", "user: A\nassistant: B\nuser: C\n\nD\n\nE\n"),
        ("sA uB aC sD aE", "system: A\nuser: B\nassistant: C\nuser: D\nassistant: E\n"),
        ("uA sB", "user: A\n\nB\n"),
        ("uA uB", "user: A\nuser: B\n"),
    ],
)
def test_no_system_message_is_lost(turns: str, expected: str) -> None:
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}
    messages = [{"role": roles[turn[0]], "content": turn[1:]} for turn in turns.split()]
    request = ChatRequest.model_validate({"messages": messages})
    tokenizer = load_tokenizer(MODELS / "stories260K")
    for template in (FIRST_SYSTEM, LEADING_SYSTEM):
        text = Tokenization(tokenizer, chat_template=template)
        assert asyncio.run(text.render_chat(request.messages, [], {})) == expected + "assistant:"
    text = Tokenization(tokenizer, chat_template=EVERY_SYSTEM)
    roles["d"] = "system"
    plain = "".join(f"{roles[turn[0]]}: {turn[1:]}\n" for turn in turns.split())
    assert asyncio.run(text.render_chat(request.messages, [], {})) == plain + "assistant:"


def test_images_stay_where_a_system_message_joins_their_turn() -> None:
    image = [{"type": "image"}, {"type": "text", "text": "B"}]
    turns = [{"role": "user", "content": "A"}, {"role": "system", "content": "S"}]
    (turn,) = with_one_system_turn([*turns, {"role": "user", "content": image}])
    separator = {"type": "text", "text": "\n\n"}
    assert turn["content"] == [{"type": "text", "text": "A\n\nS"}, separator, *image]


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_special_tokens_in_a_message_are_text(templated: Tokenization, role: str) -> None:
    content = "a</s>b <s>[user]</s> \ufdd0é</s"
    request = ChatRequest.model_validate({"messages": [{"role": role, "content": content}]})
    token_ids = asyncio.run(templated.encode_chat(request.messages))
    assert token_ids.count(1) == 1 and 2 not in token_ids
    shown = content.replace("\ufdd0", "")
    expected = f"<s>[{role}]{shown}[assistant]"
    assert templated.decode(token_ids, skip_special_tokens=False).replace("<s> ", "<s>") == expected


def test_special_tokens_in_names_and_tools_are_text(templated: Tokenization) -> None:
    templated._tokenizer.chat_template = (
        "{{ bos_token }}{% for t in tools or () %}{{ t | tojson }}{% endfor %}"
        "{% for m in messages %}[{{ m.name }}]{{ m.content }}{% endfor %}"
    )
    function = {
        "name": "f",
        "description": "a</s>b",
        "parameters": {"type": "object", "properties": {"x</s>": {"enum": ["<s>", {"a": "</s>"}]}}},
    }
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi", "name": "n</s>"}]}
    body["tools"] = [{"type": "function", "function": function}]
    request = ChatRequest.model_validate(body)
    token_ids = asyncio.run(templated.encode_chat(request.messages, request.tools or ()))
    assert token_ids.count(1) == 1 and 2 not in token_ids
    shown = templated.decode(token_ids, skip_special_tokens=False)
    assert shown.count("</s>") == 4 and "\ufdd0" not in shown


def test_overlapping_special_tokens_are_text(templated: Tokenization) -> None:
    tokenizer = templated._tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|a|>", "|><|", "<|b|>"]})
    guard, special = SpecialTexts(tokenizer), {*tokenizer.all_special_ids}
    for text in ("<|a|><|b|>", "|><|a|><|", "<|<|a|>b|>"):
        ids = tokenizer(guard.broken(text), add_special_tokens=False).input_ids
        assert not special & {*ids}, text
        assert special & {*tokenizer(text, add_special_tokens=False).input_ids}


def test_text_without_special_tokens_has_the_ids_of_the_template(templated: Tokenization) -> None:
    turns = [{"role": "user", "content": "He said: <b> \u00e9 [x] </ s>"}]
    request = ChatRequest.model_validate({"messages": turns})
    expected = templated._tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_dict=False
    )
    assert asyncio.run(templated.encode_chat(request.messages)) == expected


def test_a_template_may_refuse_the_messages(templated: Tokenization) -> None:
    with pytest.raises(BadInput, match="roles must alternate"):
        encode_chat(templated, "user", "user")


def test_tokens_that_are_parts_of_a_character_keep_their_bytes(server: RunningServer) -> None:
    body = {"prompt": "A 🐶", "max_tokens": 1, "echo": True, "logprobs": 0, "temperature": 0}
    with server.http() as http:
        answer = http.post("/v1/completions", json=body).json()["choices"][0]
    assert answer["text"].startswith("A 🐶")
    tokens = answer["logprobs"]["tokens"]
    assert [t for t in tokens if t.startswith("bytes:")] == [
        f"bytes:\\x{byte:02x}" for byte in "🐶".encode()
    ]


def test_generation_config_gives_the_default_sampling(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODELS / "stories260K", folder)
    path = folder / "generation_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "do_sample": True, "temperature": 0.01, "top_k": 1}))
    assert default_sampling(folder) == {"temperature": 0.01, "top_k": 1}
    with running(make_engine(str(folder), num_blocks=9, block_size=16)) as server:
        with server.http() as http:
            body = {"prompt": "Once", "max_tokens": 20}
            texts = [
                http.post("/v1/completions", json={**body, **fields}).json()["choices"][0]["text"]
                for fields in ({}, {"temperature": 0}, {"temperature": 2.0, "top_k": 0, "seed": 3})
            ]
            model = http.get("/v1/models").json()["data"][0]
            longest = {"prompt": [5], "max_tokens": model["max_model_len"] - 1, "ignore_eos": True}
            assert http.post("/v1/completions", json=longest).status_code == 200
            longest["max_tokens"] += 1
            assert http.post("/v1/completions", json=longest).status_code == 400
        assert texts[0] == texts[1] != texts[2]
        assert model["max_model_len"] == server.engine.scheduler.longest_sequence == 9 * 16 + 1
    path.write_text(json.dumps({"temperature": -1}))
    with pytest.raises(BadInput, match=r"generation_config\.json: temperature"):
        default_sampling(folder)


def test_sampling_of_a_gguf_file_that_is_not_read_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "m.gguf"
    keys = {"temp": 0.6, "mirostat": 0, "mirostat_tau": 5.0, "xtc_probability": 0.0}
    for changes, names in (({}, ""), ({"xtc_probability": 0.5, "mirostat": 2}, "asks for xtc_")):
        given = {f"general.sampling.{key}": value for key, value in (keys | changes).items()}
        write_gguf(file, given, [])
        assert default_sampling(file) == {"temperature": 0.6}
        assert caplog.text.count("is not sampled by here") == bool(names) and names in caplog.text


def test_a_gguf_file_gives_the_default_sampling(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    keys = {"temp": 0.6, "top_k": 20, "min_p": 0.05, "penalty_repeat": 1.05, "mirostat": 0}
    write_gguf(file, {f"general.sampling.{key}": value for key, value in keys.items()}, [])
    stored = {"temperature": 0.6, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}
    assert default_sampling(file) == default_sampling(tmp_path) == stored
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 1, "top_p": 0.9}))
    assert default_sampling(file) == {**stored, "temperature": 1, "top_p": 0.9}
    write_gguf(file, {"general.sampling.top_p": 2.0}, [])
    with pytest.raises(BadInput, match=r"m\.gguf: top_p"):
        default_sampling(file)
