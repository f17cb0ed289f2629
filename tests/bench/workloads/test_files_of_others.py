"""Files of data sets as other tools and people write them: line ends, keys, roles and parts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.base.json_lines import json_lines
from llmopt.bench.record.result import RunData
from llmopt.bench.workloads.custom import custom_workload, hub_workload
from llmopt.bench.workloads.datasets import is_frozen, read_frozen, write_frozen
from llmopt.bench.workloads.sharegpt import sharegpt_workload
from llmopt.bench.workloads.traces import read_trace
from llmopt.bench.workloads.workload import Workload
from llmopt.quant.source.load_processor import load_tokenizer
from llmopt.quant.source.models import resolve_model
from llmopt.quant.stream.sources import read_documents

LM_EVAL = Path(__file__).parents[1] / "record" / "results" / "lm-eval"
ENDS = ("\u2028", "\u2029", "\u0085")
"""Line ends of Unicode that a JSON text may hold unescaped, and at which `str.splitlines` breaks it."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(resolve_model("stories3M"))


def custom(tokenizer: Any, path: Path, *rows: str) -> Workload:
    path.write_text("".join(row + "\n" for row in rows), encoding="utf-8")
    return custom_workload(
        tokenizer,
        path,
        num_prompts=len(rows),
        max_model_len=512,
        shuffle=False,
        oversample=False,
    )


def test_a_line_ends_at_a_line_feed_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    text = "\ufeff" + '{"a": "x\u2028y\u0085z"}\r\n\n["b\u2029"]\n3'
    path.write_bytes(text.encode())
    assert list(json_lines(path, "data")) == [
        (f"data {path}, line 1", {"a": "x\u2028y\u0085z"}),
        (f"data {path}, line 3", ["b\u2029"]),
        (f"data {path}, line 4", 3),
    ]


@pytest.mark.parametrize(
    "bad",
    ['{"a": "x\fy"}', '{"a": 1', '{"a": 1}{"a": 2}', "9" * 5000, "[" * 100_000],
    ids=["form feed", "cut", "two", "huge", "deep"],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n' + bad + "\n")
    with pytest.raises(BadInput, match=r"a\.jsonl, line 2: not JSON"):
        list(json_lines(path))


@pytest.mark.parametrize("end", ENDS)
def test_every_reader_keeps_line_ends_of_unicode(tokenizer: Any, tmp_path: Path, end: str) -> None:
    path = tmp_path / "a.jsonl"
    row = json.dumps({"prompt": f"Once upon{end}a time", "output_len": 5}, ensure_ascii=False)
    workload = custom(tokenizer, path, row)
    assert [item.output_len for item in workload.items] == [5]
    frozen = tmp_path / "frozen.jsonl"
    write_frozen(workload, frozen, model="m")
    frozen.write_text(frozen.read_text().replace('"source": "', f'"source": "{end}'))
    assert is_frozen(frozen)
    assert read_frozen(frozen, tokenizer, max_model_len=512).items == workload.items
    call = {"timestamp": 0, "input_length": 7, "output_length": 3, "text": f"a{end}b"}
    path.write_text(2 * (json.dumps(call, ensure_ascii=False) + "\n"), encoding="utf-8")
    assert len(read_trace("trace", path)) == 2
    path.write_text(json.dumps({"text": f"a{end}b"}, ensure_ascii=False), encoding="utf-8")
    assert read_documents(path) == ("a.jsonl", [f"a{end}b"])


def test_samples_of_lm_eval_keep_line_ends_of_unicode(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(LM_EVAL / "real_base", folder)
    plain = RunData.read(folder).items
    (samples,) = folder.glob("samples_*.jsonl")
    rows = [row for _, row in json_lines(samples)]
    rows[0]["doc"]["query"] += "\u2028x"
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    samples.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert plain is not None and RunData.read(folder).items == plain
    samples.write_text("\n".join([*lines[:3], lines[3][:-9]]), encoding="utf-8")
    with pytest.raises(BadInput, match=r"samples_.*\.jsonl, line 4: not JSON"):
        RunData.read(folder)


@pytest.mark.parametrize(
    "key", ["output_len", "output_tokens", "max_tokens", "max_new_tokens", "output_length"]
)
def test_lengths_of_other_tools(tokenizer: Any, tmp_path: Path, key: str) -> None:
    found = custom(tokenizer, tmp_path / "a.jsonl", json.dumps({"prompt": "a b", key: 10}))
    assert [item.output_len for item in found.items] == [10]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"ouput_tokens": 10, "output_tokns": 9}, '"output_tokns" is no known key'),
        ({"maxTokens": 10}, '"maxTokens" is no known key'),
        ({"output_len": 3, "max_tokens": 4}, "output_len and max_tokens differ"),
        ({"output_tokens": "10"}, "\"output_tokens\" is '10', not a positive whole number"),
    ],
)
def test_a_length_that_is_not_understood_is_refused(
    tokenizer: Any, tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=f"line 1: {message}"):
        custom(tokenizer, tmp_path / "a.jsonl", json.dumps({"prompt": "a b", **row}))


def test_keys_that_are_not_read_are_counted_once(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "a b", "id": 1, "category": "x"}, {"prompt": "a b", "id": 2}]
    found = custom(tokenizer, tmp_path / "a.jsonl", *map(json.dumps, rows))
    assert "keys of rows that are not read: category (1), id (2)" in found.notes


def test_prompts_without_the_chat_template_of_vllm_are_named(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = json.dumps({"prompt": "a b"})
    assert custom(tokenizer, tmp_path / "a.jsonl", row).notes == ()
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages }}")
    (note,) = custom(tokenizer, tmp_path / "a.jsonl", row).notes
    assert "chat template first, unless it has --skip-chat-template" in note


QUESTION, ANSWER = "Tell me of Tom and his dog.", "Tom had a dog who liked to run and play."
SYSTEM = "You are a helpful person."


def part(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


CHATS = {
    "chat": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}],
    "parts": [
        {"role": "user", "content": part(QUESTION)},
        {"role": "assistant", "content": part(ANSWER)},
    ],
    "sharegpt": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}],
    "texts": [QUESTION, ANSWER],
    "answer first": [
        {"from": "gpt", "value": "and then he went home to his mother."},
        {"from": "human", "value": QUESTION},
        {"from": "gpt", "value": ANSWER},
    ],
}


# Texts alone have no roles.
@pytest.mark.parametrize(
    ("form", "system"),
    [*((form, "") for form in CHATS), *((f, SYSTEM) for f in CHATS if f != "texts")],
)
def test_the_prompt_is_the_question_and_the_length_the_answers(
    tokenizer: Any, tmp_path: Path, form: str, system: str
) -> None:
    turns: list[Any] = CHATS[form]
    turns = [{"role": "system", "content": system}, *turns] if system else turns
    prompt = f"{system}\n\n{QUESTION}" if system else QUESTION
    path = tmp_path / "s.json"
    path.write_text(json.dumps([{"conversations": turns}, {"messages": turns}]))
    found = [
        hub_workload(
            tokenizer, [{"messages": turns}], source="x", num_prompts=1, max_model_len=512
        ),
        sharegpt_workload(tokenizer, num_prompts=2, max_model_len=512, path=path, oversample=False),
    ]
    items = [item for workload in found for item in workload.items]
    expected = (tuple(tokenizer.encode(prompt)), len(tokenizer.encode(ANSWER)))
    assert [(tuple(i.prompt_token_ids), i.output_len) for i in items] == [expected] * 3


def test_a_conversation_without_a_question_is_counted(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    no_questions: list[list[Any]] = [
        CHATS["answer first"][:1] * 2,
        [{"role": "user", "content": image}, CHATS["chat"][1]],
        [{"role": "tool", "content": "a"}, *CHATS["chat"]],
    ]
    threads = [*no_questions, CHATS["chat"]]
    path.write_text(json.dumps([{"conversations": turns} for turns in threads]))
    found = sharegpt_workload(
        tokenizer, num_prompts=9, max_model_len=512, path=path, oversample=False
    )
    assert len(found.items) == 1
    assert found.notes[0].startswith("3 conversations dropped: its first messages are not")
    rows = [{"messages": turns} for turns in threads]
    found = hub_workload(tokenizer, rows, source="x", num_prompts=9, max_model_len=512)
    assert found.notes[0] == "3 rows left out: no question with text at their start"


def test_half_surrogate_pairs_become_question_marks(tokenizer: Any, tmp_path: Path) -> None:
    """As tools write them that cut a text within an emoji; whole pairs stay."""
    cut = {"prompt": "Once \ud835 upon \U0001f600"}
    (item,) = custom(tokenizer, tmp_path / "a.jsonl", json.dumps(cut)).items
    assert list(item.prompt_token_ids) == tokenizer.encode("Once ? upon \U0001f600")
    path = tmp_path / "s.json"
    turns = [{"from": "human", "value": QUESTION + "\ud83d"}, CHATS["sharegpt"][1]]
    path.write_text(json.dumps([{"conversations": turns}]))
    (item,) = sharegpt_workload(tokenizer, num_prompts=1, max_model_len=512, path=path).items
    assert list(item.prompt_token_ids) == tokenizer.encode(QUESTION + "?")
    path.write_text(json.dumps([{"text": "a \udc00 b"}]))
    assert read_documents(path)[1] == ["a ? b"]
