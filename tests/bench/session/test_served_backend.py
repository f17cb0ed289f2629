"""Task requests over HTTP against those on the engine, and chat templates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.bench.load.address import Address, ServedModel, find_served
from llmopt.bench.load.json_http import JsonClient, NoPromptLogprobs, RequestFailed
from llmopt.bench.options.options import BenchOptions, checked
from llmopt.bench.options.values import BACKENDS
from llmopt.bench.session.task_backends import EngineBackend, ServedBackend
from llmopt.bench.session.tasks import (
    TaskGeneration,
    TaskScorer,
    TaskSet,
    check_template,
    protocol_words,
)
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.recipes import DATA

from tests.support.live_server import RunningServer, make_engine, running

STORIES = [story.strip() for story in (DATA / "evaluation.txt").read_text().split("\n\n")]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(make_engine(), chat_template=TEMPLATE) as server:
        yield server


@pytest.fixture(scope="module")
def local() -> TaskScorer:
    return TaskScorer(EngineBackend(make_engine()))


def over_http(server: RunningServer, backend: str = "openai") -> ServedBackend:
    options = checked(BenchOptions, {"base_url": server.url, "tokenizer": "stories3M"}, "option")
    address = Address.parse(server.url, backend=backend)
    served = find_served(options, address)
    return ServedBackend(
        address.json_client(30), address, served, backend=BACKENDS[backend], concurrency=4
    )


def test_loglikelihoods_equal_those_on_the_engine(server: RunningServer, local: TaskScorer) -> None:
    remote = TaskScorer(over_http(server))
    pairs = [(story[:120], story[120:160]) for story in STORIES[:4]]
    pairs += [("Once upon a", " time"), ("", STORIES[0][:60])]
    expected, found = local.loglikelihoods(pairs), remote.loglikelihoods(pairs)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert {greedy for _, greedy in found} == {True, False}
    for (logprob, _), (wanted, _) in zip(found, expected, strict=True):
        assert logprob == pytest.approx(wanted, abs=1e-3)
    texts = STORIES[:2]
    assert remote.rolling_loglikelihoods(texts) == pytest.approx(
        local.rolling_loglikelihoods(texts), rel=1e-5
    )
    # Windows leave room for the last target and for a generated token.
    assert remote.backend.max_inputs == 510
    assert remote.rolling_loglikelihoods([" ".join(STORIES[:6])])[0] < -500


def test_generation_equals_that_on_the_engine(server: RunningServer, local: TaskScorer) -> None:
    remote = TaskScorer(over_http(server))
    requests: list[tuple[str, dict[str, Any]]] = [
        ("Once upon a time", {"max_gen_toks": 24}),
        ("Tom and his dog", {"until": [".", "\n"], "max_gen_toks": 60}),
        (" ".join(STORIES[:6]), {"until": ".", "max_gen_toks": 60}),
        ("Lily", {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "max_gen_toks": 12}),
    ]
    expected = local.generate(requests)
    assert remote.generate(requests) == expected and sum(map(bool, expected)) == 3


def test_conversations_are_rendered_here_or_there(server: RunningServer) -> None:
    remote, chat = over_http(server), over_http(server, "openai-chat")
    remote.tokenizer.chat_template = TEMPLATE
    messages = [
        {"role": "user", "content": "Who is Lily?"},
        {"role": "assistant", "content": "A girl."},
        {"role": "user", "content": "And Tom?"},
    ]
    assert TaskScorer(remote).chat_template == TEMPLATE
    remote.tokenizer.chat_template = {"tool_use": "{{ tools }}", "default": TEMPLATE}
    assert TaskScorer(remote).chat_template == TEMPLATE  # lm-eval hashes a text
    rendered = TaskScorer(remote).apply_chat_template(messages)
    assert rendered.endswith("<user>And Tom?\n<assistant>") and "<assistant>A girl." in rendered
    scorer = TaskScorer(chat)
    sent = scorer.apply_chat_template(messages)
    assert json.loads(sent) == messages and scorer.chat_template is None
    wanted = {"max_gen_toks": 16, "until": ["zebra"]}
    (here,) = TaskScorer(remote).generate([(rendered, wanted)])
    (there,) = scorer.generate([(sent, wanted)])
    assert here and here.strip() == there.strip()
    with pytest.raises(BadInput, match="chats have no log-probabilities"):
        scorer.loglikelihoods([("a", " b")])


def test_templates_are_checked_before_anything_is_measured(server: RunningServer) -> None:
    plain = checked(BenchOptions, {"tasks": "t"}, "option")
    asked = checked(
        BenchOptions,
        {"tasks": "t", "apply_chat_template": True, "num_fewshot": 3, "system_instruction": "Hi"},
        "option",
    )
    tasks = TaskSet(specs=("t",))
    remote, chat = over_http(server), over_http(server, "openai-chat")
    with pytest.raises(BadInput, match="has no chat template"):
        check_template(asked, remote, tasks)
    with pytest.raises(BadInput, match="add --apply-chat-template"):
        check_template(plain, chat, tasks)
    check_template(plain, remote, tasks)
    check_template(asked, chat, tasks)
    assert "no chat template; the task's own shots" in protocol_words(plain, remote, tasks)
    words = protocol_words(asked, chat, tasks)
    assert "the server applies its chat template; shots as turns" in words
    assert "3 shots; system instruction 'Hi'" in words


def test_a_server_without_prompt_scores_is_named(server: RunningServer) -> None:
    remote = over_http(server)
    served = ServedModel("no-such-model", "stories3M", remote.tokenizer, 512)
    address = Address.parse(server.url)
    broken = ServedBackend(
        address.json_client(30), address, served, backend="openai", concurrency=4
    )
    with pytest.raises(NoPromptLogprobs, match="no model 'no-such-model'"):
        TaskScorer(broken).loglikelihoods([("Once", " upon")])


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_a_server_that_cuts_prompts_is_refused(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Ollama reads the 4,096 tokens of its context and answers as usual: needles before them are lost."""
    remote = over_http(server, backend)
    params = SamplingParams(max_tokens=4)
    if backend == "openai-chat":
        monkeypatch.setattr(
            remote, "tokenizer", SimpleNamespace(encode=lambda text, **_: text.split())
        )
        texts = ["word " * count for count in (1000, 900)]
        chats = [[{"role": "user", "content": text}] for text in texts]
        requests = [TaskGeneration([], params, chat) for chat in chats]
    else:
        requests = [TaskGeneration(list(range(count)), params) for count in (1000, 900)]
    choices = [{"text": "here", "message": {"content": "here"}, "finish_reason": "stop"}]

    def generated(*counts: int | None) -> list[str]:
        answers = [{"choices": choices, "usage": {"prompt_tokens": count}} for count in counts]
        monkeypatch.setattr(JsonClient, "post_each", lambda *_: iter(answers))
        return remote.generate(requests, "generations")

    for counts in ((512, 512), (512, 0)):
        with pytest.raises(RequestFailed, match=r"read at most 512 of 1,000 tokens .* context"):
            generated(*counts)
    # Without cached tokens a later prompt counts less, and other templates or tokenizers count otherwise.
    for counts in ((1000, 20), (0, 900), (980, 30), (None, None)):
        assert generated(*counts) == ["here", "here"]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_answers_that_end_in_their_thoughts_are_told(
    server: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    """A reasoning model with a limit for a short answer has spent it before the answer begins."""
    remote = over_http(server, "openai-chat")
    message = [{"role": "user", "content": "Which?"}]
    requests = [TaskGeneration([], SamplingParams(max_tokens=4), message)] * 3
    cut = {"message": {"content": None, name: "Well, I"}, "finish_reason": "length"}
    whole = {"message": {"content": "here", name: "Well"}, "finish_reason": "length"}

    def generated(*choices: dict[str, Any]) -> list[str]:
        monkeypatch.setattr(
            JsonClient, "post_each", lambda *_: ({"choices": [choice]} for choice in choices)
        )
        return remote.generate(requests, "generations")

    with pytest.raises(RequestFailed, match="2 of 3 answers ended within their reasoning"):
        generated(cut, whole, cut)
    assert generated(whole, cut, whole) == ["here", "", "here"]
    assert "1 of 3 answers ended within their reasoning" in caplog.text
