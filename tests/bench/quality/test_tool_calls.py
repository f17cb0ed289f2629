"""Items that call functions: how calls are matched, files of BFCL, and what failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.bench.quality.chat_items import ChatAnswer
from llmopt.bench.quality.tool_calls import (
    ToolItem,
    call_sentence,
    cause,
    item_scores,
    read_tool_items,
    scored_calls,
)
from llmopt.recipes import DATA

from tools import chat_items

PLAN = {
    "name": "trip.plan",
    "description": "Plan a trip.",
    "parameters": {
        "type": "dict",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "budget": {"type": "float"},
            "is_direct": {"type": "boolean"},
            "stops": {"type": "array", "items": {"type": "string"}},
            "rooms": {"type": "dict", "properties": {"beds": {"type": "integer"}}},
            "note": {"type": "any"},
        },
        "required": ["city"],
    },
}
DUE = {
    "city": ["New York", "NYC"],
    "days": [3, ""],
    "budget": [100, ""],
    "is_direct": [True, ""],
    "stops": [["Lyon", "Nice"], ""],
    "rooms": [{"beds": [2], "view": ["sea", ""]}, ""],
}


def write(
    folder: Path, rows: list[dict[str, Any]], truths: list[dict[str, Any]] | None = None
) -> str:
    path = folder / "BFCL_v4_simple_python.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if truths is not None:
        (folder / "possible_answer").mkdir()
        text = "".join(json.dumps(row) + "\n" for row in truths)
        (folder / "possible_answer" / path.name).write_text(text)
    return str(path)


def row(name: str = "simple_python_0", turns: int = 1, **more: Any) -> dict[str, Any]:
    question = [[{"role": "user", "content": "Plan it."}]] * turns
    return {"id": name, "question": question, "function": [PLAN], **more}


@pytest.fixture
def item(tmp_path: Path) -> ToolItem:
    truth = {"id": "simple_python_0", "ground_truth": [{"trip.plan": DUE}]}
    (only,) = read_tool_items(write(tmp_path, [row()], [truth]))
    return only


def called(item: ToolItem, name: str = "trip_plan", **arguments: Any) -> dict[str, float]:
    return item_scores(item, ChatAnswer("", calls=((name, json.dumps(arguments)),)))


def test_a_file_of_bfcl_has_schemas_in_json_and_names_without_dots(item: ToolItem) -> None:
    assert item.kind == "simple_python" and item.declared == {"trip_plan"}
    parameters = item.functions[0]["parameters"]
    assert parameters["type"] == "object" and "type" not in parameters["properties"]["note"]
    assert parameters["properties"]["budget"] == {"type": "number"}
    assert parameters["properties"]["rooms"]["type"] == "object"


@pytest.mark.parametrize(
    ("arguments", "is_right"),
    [
        ({"city": "new york"}, True),  # without case and spaces, as BFCL compares
        ({"city": "nyc", "days": 3, "budget": 100.0, "is_direct": True}, True),
        ({"city": "NYC", "stops": ["lyon", "Nice"], "rooms": {"beds": 2}}, True),
        ({"city": "NYC", "rooms": {"beds": 2, "view": "Sea"}}, True),
        ({}, False),
        ({"city": "Boston"}, False),
        ({"city": "NYC", "days": "3"}, False),
        ({"city": "NYC", "days": 3.0}, False),
        ({"city": "NYC", "is_direct": 1}, False),
        ({"city": "NYC", "is_direct": "true"}, False),
        ({"city": "NYC", "budget": True}, False),
        ({"city": "NYC", "stops": ["Nice", "Lyon"]}, False),
        ({"city": "NYC", "stops": "Lyon"}, False),
        ({"city": "NYC", "rooms": {"beds": 3}}, False),
        ({"city": "NYC", "rooms": {}}, False),
        ({"city": "NYC", "colour": "red"}, False),
    ],
)
def test_arguments_match_by_type_and_value(
    item: ToolItem, arguments: dict[str, Any], is_right: bool
) -> None:
    answer = called(item, **arguments)
    assert answer["correct"] == answer["arguments"] == float(is_right)
    assert answer["valid_json"] == answer["declared_name"] == answer["right_name"] == 1.0


def test_names_and_json_are_scored_apart(item: ToolItem) -> None:
    other = called(item, "trip_cancel", city="NYC")
    assert (other["valid_json"], other["declared_name"], other["right_name"]) == (1.0, 0.0, 0.0)
    cut = item_scores(item, ChatAnswer("", calls=(("trip_plan", '{"city": "N'),)))
    assert (cut["valid_json"], cut["declared_name"], cut["correct"]) == (0.0, 1.0, 0.0)
    assert sum(item_scores(item, ChatAnswer("No.")).values()) == 0.0


def test_parallel_calls_come_in_any_order() -> None:
    item = next(i for i in read_tool_items("bundled") if i.name == "parallel_17")
    calls = [
        (name, json.dumps({k: v[0] for k, v in values.items()})) for name, values in item.expected
    ]
    for order, right in ((calls, 1.0), (calls[::-1], 1.0), (calls[:1], 0.0), (calls[:1] * 2, 0.0)):
        assert item_scores(item, ChatAnswer("", calls=tuple(order)))["correct"] == right


def test_a_call_that_is_not_due_is_counted() -> None:
    item = next(i for i in read_tool_items("bundled") if i.kind == "none")
    assert item_scores(item, ChatAnswer("Sorry.")) == {"correct": 1.0, "false_call": 0.0}
    called_first = ChatAnswer("", calls=((item.functions[0]["name"], "{}"),))
    assert item_scores(item, called_first) == {"correct": 0.0, "false_call": 1.0}


def test_failures_name_the_part(item: ToolItem) -> None:
    hidden = ChatAnswer("No.", takes_tools=False)
    lost = [
        '{"name": "trip_plan", "arguments": {}}',
        "<function=trip_plan>",
        "[trip_plan(city='NYC')]",
        "[TOOL_CALLS] trip_plan",
    ]
    assert cause(item, hidden) == "template" and cause(item, ChatAnswer("Gladly.")) == "generation"
    assert {cause(item, ChatAnswer(text)) for text in lost} == {"parser"}
    assert cause(item, ChatAnswer("I use trip_plan.")) == "generation"
    _, counts = scored_calls([item] * 3, [hidden, ChatAnswer(lost[0]), ChatAnswer("Gladly.")])
    assert counts["failures"] == {"generation": 1, "parser": 1, "template": 1}
    assert counts["kinds"] == {"simple_python": [0, 3]}
    sentence = (
        "Right tool calls: simple_python 0 of 3. Failed in: generation 1, parser 1, template 1."
    )
    assert call_sentence(counts) == sentence


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    irrelevant = read_tool_items(write(tmp_path, [row("live_irrelevance_0-0-0")]))
    assert irrelevant[0].expected == () and irrelevant[0].kind == "live_irrelevance"
    java = {**PLAN, "parameters": {"type": "HashMap", "properties": {}}}
    cases = {
        "has no ground_truth": row("live_relevance_0-0-0"),
        "2 turns: items of one turn": row(turns=2),
        "type 'HashMap'": row(function=[java], ground_truth=[]),
        "it lacks 'function'": {"id": "x_0", "question": []},
    }
    for complaint, bad in cases.items():
        with pytest.raises(BadInput, match=complaint):
            read_tool_items(write(tmp_path, [bad]))
    with pytest.raises(BadInput, match="no items"):
        read_tool_items(write(tmp_path, []))
    with pytest.raises(BadInput, match="is not a file"):
        read_tool_items(str(tmp_path / "absent.json"))


def test_the_bundled_items_are_those_of_the_generator() -> None:
    items = read_tool_items("bundled")
    assert len(items) >= 400 and len(set().union(*(item.declared for item in items))) >= 40
    assert {item.kind for item in items} == {*chat_items.KINDS}
    assert len({(str(item.messages), str(item.functions)) for item in items}) >= 400
    made = chat_items.tool_rows()
    assert [item.name for item in items] == [made_row["id"] for made_row in made]
    assert chat_items.packed(made) == (DATA / "tool_calls.jsonl.xz").read_bytes()
    assert chat_items.packed(list(chat_items.prompts())) == (DATA / "answers.jsonl.xz").read_bytes()
