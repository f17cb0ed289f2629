"""Tool calls and lengths of answers end to end: models with known damage lose the score of that damage alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.bench.gate.limits import parse_gate
from llmopt.bench.gate.score_checks import check_task
from llmopt.bench.load.address import Address, find_served
from llmopt.bench.load.json_http import RequestFailed
from llmopt.bench.options.options import BenchOptions
from llmopt.bench.quality.chat_items import Chat, answer_chats
from llmopt.bench.quality.tool_calls import ToolItem, read_tool_items
from llmopt.bench.session.task_backends import EngineBackend, ServedBackend
from llmopt.bench.session.tasks import TaskScores, prepare_tasks, run_tasks
from llmopt.engine.base.sampling_params import SamplingParams

from ...support.live_server import make_engine, running

TOOLS = "{% if tools %}Functions: {{ tools | tojson }} Call by <tool_call>{{ '{' }}...</tool_call>.\n{% endif %}"
TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def written(item: ToolItem) -> str:
    """The right calls of an item, in Hermes' format; text where none is due."""
    calls = [
        {"name": name, "arguments": {key: value_of(choices[0]) for key, choices in values.items()}}
        for name, values in item.expected
    ]
    text = "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    return text or "I cannot do that."


def value_of(choice: Any) -> Any:
    if isinstance(choice, dict):
        return {key: value_of(choices[0]) for key, choices in choice.items()}
    return choice


class ReadingBackend(EngineBackend):
    """A model that calls what its prompt asks for, if its prompt shows the functions, and else answers with
    text; without an end token it goes on to the limit."""

    def __init__(self, engine: Any, *, ends: bool = True) -> None:
        super().__init__(engine)
        self.longest, self._ends = 100_000, ends
        self._known = {item.messages[-1]["content"]: item for item in read_tool_items("bundled")}

    def _complete(self, prompts: Sequence[tuple[list[int], SamplingParams]], what: str) -> Any:
        return [(*self._answer(tokens, params.max_tokens or 0),) for tokens, params in prompts]

    def _answer(self, tokens: list[int], limit: int) -> tuple[list[int], tuple[()], str]:
        prompt = self.tokenizer.decode(tokens)
        question = prompt.rpartition("user: ")[2].removesuffix("\nassistant:")
        item = self._known.get(question)
        text = "It is so because of many things." if item is None else "I cannot do that."
        if item is not None and "Functions:" in prompt:
            text = written(item)
        new = self.tokenizer.encode(text, add_special_tokens=False)
        return (
            (new, (), "stop")
            if self._ends
            else ([*new, *[new[-1]] * (limit - len(new))], (), "length")
        )


@pytest.fixture(scope="module")
def engine() -> Any:
    return make_engine("stories260K")


def scores(backend: Any, tasks: str = "answers,tool_calls", **options: Any) -> TaskScores:
    bench_options = BenchOptions(tasks=tuple(tasks.split(",")), tasks_limit=28, **options)
    return run_tasks(prepare_tasks(bench_options.task_names, bench_options), backend, bench_options)


def values(scored: TaskScores) -> dict[str, float]:
    assert scored.record["error"] is None, scored.record
    return {f"{row['task']}.{row['metric']}": row["value"] for row in scored.record["metrics"]}


def test_a_model_that_reads_its_tools_calls_them_all(engine: Any) -> None:
    engine.tokenizer.chat_template = TOOLS + TURNS
    scored = scores(ReadingBackend(engine))
    shares = values(scored)
    assert shares["tool_calls.correct"] == shares["tool_calls.valid_json"] == 1.0
    assert (
        shares["tool_calls.false_call"]
        == shares["answers.at_limit"]
        == shares["answers.loop"]
        == 0.0
    )
    assert scored.record["tool_calls"]["failures"] == dict.fromkeys(
        ("generation", "parser", "template"), 0
    )
    assert scored.record["tool_calls"]["kinds"]["parallel"] == [4, 4]
    assert shares["answers.tokens"] > 5 and len(scored.items) > 28 * 5


def test_a_template_without_tools_hurts_tools_alone(engine: Any) -> None:
    engine.tokenizer.chat_template = TOOLS + TURNS
    before = scores(ReadingBackend(engine))
    engine.tokenizer.chat_template = "{# tools: <tool_call> #}" + TURNS
    after = scores(ReadingBackend(engine))
    broken, kept = judged("tools>=-2%", before, after), judged("length<=+5%", before, after)
    assert broken == "regression" and kept == "pass"
    assert after.record["tool_calls"]["failures"] == {"generation": 0, "parser": 0, "template": 24}
    changed = {key for key, value in values(after).items() if value != values(before)[key]}
    assert changed and not any(key.startswith("answers.") for key in changed)


def test_a_suppressed_end_token_hurts_the_end_alone(engine: Any) -> None:
    engine.tokenizer.chat_template = TOOLS + TURNS
    before, after = scores(ReadingBackend(engine)), scores(ReadingBackend(engine, ends=False))
    assert judged("length<=+5%", before, after) == "regression"
    assert judged("task.answers.no_end<=0.1", before, after) == "regression"
    assert judged("tools>=-15%", before, after) == "pass"
    assert values(after)["tool_calls.correct"] == 1.0
    assert values(after)["answers.loop"] == values(after)["answers.at_limit"] == 1.0


def judged(limit: str, base: TaskScores, new: TaskScores) -> str:
    from llmopt.bench.record.result import RunData

    sides = [RunData({"llmopt": {"tasks": side.record}}, items=side.items) for side in (base, new)]
    return check_task(parse_gate(limit)[0], *sides).outcome.value


def test_a_parser_that_knows_no_format_is_named(engine: Any) -> None:
    engine.tokenizer.chat_template = (TOOLS + TURNS).replace("<tool_call>", "call")
    failures = scores(ReadingBackend(engine), "tool_calls").record["tool_calls"]["failures"]
    assert failures == {"generation": 0, "parser": 24, "template": 0}


def test_an_end_token_that_a_real_model_cannot_give(engine: Any) -> None:
    engine.tokenizer.chat_template = None

    class Endless(EngineBackend):
        def _complete(self, prompts: Any, what: str) -> Any:
            bias = dict.fromkeys(self._engine.eos_token_ids, -100.0)
            given = [(tokens, replace(params, logit_bias=bias)) for tokens, params in prompts]
            return super()._complete(given, what)

    (chat,) = answer_chats("answers", 1)
    chats = [replace(chat, max_tokens=180)]
    (usual,), (endless,) = (kind(engine).converse(chats, "") for kind in (EngineBackend, Endless))
    assert usual.finish == "stop" and usual.num_tokens < 180
    assert endless.finish == "length" and endless.num_tokens == 180


def test_sampled_answers_have_seeds_and_repeat(engine: Any) -> None:
    engine.tokenizer.chat_template = None
    chats = [replace(chat, max_tokens=12) for chat in answer_chats("answers_sampled", 3)]
    assert [chat.seed for chat in chats] == [0, 1, 2]
    backend = EngineBackend(engine)
    first, again = backend.converse(chats, ""), backend.converse(chats, "")
    greedy = backend.converse([replace(chat, seed=None) for chat in chats], "")
    assert first == again and [a.text for a in first] != [a.text for a in greedy]


def test_chats_over_http_equal_those_in_process(engine: Any) -> None:
    engine.tokenizer.chat_template = TURNS
    chats = [replace(chat, max_tokens=24) for chat in answer_chats("answers", 4)]
    asked = BenchOptions(base_url="http://127.0.0.1:1", tokenizer="stories260K")
    with running(engine) as server:
        options = asked.model_copy(update={"base_url": server.url})
        address = Address.of(options)
        how = {"backend": "completions", "concurrency": 4}
        backend = ServedBackend(
            address.json_client(60), address, find_served(options, address), **how
        )
        served = backend.converse(chats, "")
        tool_chat = read_tool_items("bundled")[0].chat
        (refused,) = backend.converse([replace(tool_chat, max_tokens=4)], "")
    assert not refused.takes_tools
    local = EngineBackend(engine).converse(chats, "")
    assert [(a.text.strip(), a.num_tokens, a.finish) for a in served] == [
        (a.text.strip(), a.num_tokens, a.finish) for a in local
    ]


def test_recorded_responses_are_scored(engine: Any, tmp_path: Path) -> None:
    engine.tokenizer.chat_template = TURNS
    path = tmp_path / "responses.jsonl"
    rows = []
    for item in read_tool_items("bundled")[:28]:
        calls = [
            {
                "function": {
                    "name": n,
                    "arguments": json.dumps({k: value_of(c[0]) for k, c in v.items()}),
                }
            }
            for n, v in item.expected
        ]
        message = {"content": None, "tool_calls": calls or None}
        rows.append({"id": item.name, "response": {"choices": [{"message": message}]}})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scored = scores(
        EngineBackend(engine), "cloze_stories", tool_calls="bundled", tool_responses=path
    )
    assert values(scored)["tool_calls.correct"] == 1.0
    assert "tool calls of recorded responses" in scored.record["protocol"]
    path.write_text(json.dumps(rows[0]) + "\n")
    failed = scores(EngineBackend(engine), "tool_calls", tool_responses=path).record["error"]
    assert "has no response to multiple_0" in failed


def test_a_chat_that_does_not_fit_is_refused(engine: Any) -> None:
    engine.tokenizer.chat_template = TURNS
    chat = Chat(({"role": "user", "content": "word " * 600},))
    with pytest.raises(BadInput, match="fit with its answer"):
        EngineBackend(engine).converse([chat], "")


def test_options_of_other_tasks_are_refused() -> None:
    for option in ({"num_fewshot": 2}, {"system_instruction": "Be brief."}):
        asked = BenchOptions(tasks=("answers",), **option)
        with pytest.raises(BadInput, match="answers is asked plainly"):
            prepare_tasks(asked.task_names, asked)
    assert BenchOptions(tool_calls="bundled").task_names == ("tool_calls",)
    assert BenchOptions(tool_calls="bundled", tasks=("tool_calls",)).task_names == ("tool_calls",)
    with pytest.raises(ValueError, match="--tool-responses is for --tool-calls"):
        BenchOptions(tool_responses=Path("responses.jsonl"))


def test_a_server_whose_prompt_lacks_the_tools() -> None:
    """A server may take tools and leave them out of the prompt, which its count of tokens tells."""
    tokenizer = make_engine("stories260K").tokenizer

    class Client:
        def __init__(self, shows: bool) -> None:
            self.shows = shows

        def post_again(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
            count = 90 if self.shows and "tools" in body else 12
            message = {"content": None, "reasoning_content": "Paris it is."}
            return {"choices": [{"message": message}], "usage": {"prompt_tokens": count}}

        def post_each(self, url: str, bodies: Any, concurrency: int) -> Any:
            return [self.post_again(url, body) for body in bodies]

    served: Any = SimpleNamespace(tokenizer=tokenizer, max_model_len=512, model="m")
    for shows in (True, False):
        client: Any = Client(shows)
        backend = ServedBackend(
            client, Address.parse("http://h"), served, backend="c", concurrency=1
        )
        (answer,) = backend.converse([read_tool_items("bundled")[0].chat], "")
        assert answer.takes_tools is shows
        # The server counts no tokens, so that the tokenizer does.
        assert answer.num_tokens == answer.num_reasoning > 2


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_the_server_gave_up_is_no_answer(reason: str) -> None:
    """The text so far would be scored as the model's (SGLang, vLLM)."""

    class Client:
        @staticmethod
        def post_each(url: str, bodies: Any, concurrency: int) -> Any:
            for _ in bodies:
                message = {"message": {"content": "Par"}, "text": "Par", "finish_reason": reason}
                yield {"choices": [message], "usage": {"prompt_tokens": 12}}

    client: Any = Client()
    served: Any = SimpleNamespace(tokenizer=None, max_model_len=512, model="m")
    address = Address.parse("http://h")
    backend = ServedBackend(client, address, served, backend="chat", concurrency=1)
    with pytest.raises(RequestFailed, match=f"finish_reason '{reason}'"):
        backend.converse([answer_chats("answers", 1)[0]], "")
