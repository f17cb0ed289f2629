"""The task `tool_calls`: single-turn items that call functions, scored as BFCL scores them by syntax tree.

Items and expected calls have BFCL's form (github.com/ShishirPatil/gorilla, bfcl_eval/data and
eval_checker/ast_eval/ast_checker.py in berkeley-function-call-leaderboard, 2025): each argument has a list of
values of which one must be given, and an empty text in the list means that it may be left out. Texts are
compared without case, spaces and `,./-_*^`; an integer may stand for a number, and nothing else for another
type. Parallel calls may come in any order.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...base.errors import BadInput
from ...base.json_lines import json_lines
from ...engine.server.parsing.formats import json_value
from ...recipes import DATA
from .chat_items import TOOL_CALLS, Chat, ChatAnswer, TaskScoring

BUNDLED = "bundled"
BUNDLED_ITEMS = DATA / "tool_calls.jsonl.xz"
VERSION = 1.0
MAX_CALL_TOKENS = 256
# BFCL's names of types that JSON schemas call otherwise.
SCHEMA_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}
KNOWN_TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")
NO_CALL = ("irrelevance", "live_irrelevance", "none")
Failure = Literal["generation", "parser", "template"]
Call = tuple[str, Mapping[str, Sequence[Any]]]
"""Name and acceptable values of each argument."""


@dataclass(frozen=True, slots=True)
class ToolItem:
    """A request with its functions, and the calls that are due; none are if `expected` is empty."""

    name: str
    kind: str
    messages: tuple[Mapping[str, Any], ...]
    functions: tuple[Mapping[str, Any], ...]
    expected: tuple[Call, ...]

    @property
    def chat(self) -> Chat:
        tools = tuple({"type": "function", "function": function} for function in self.functions)
        return Chat(self.messages, tools, MAX_CALL_TOKENS)

    @property
    def declared(self) -> set[str]:
        return {function["name"] for function in self.functions}


def read_tool_items(where: str) -> list[ToolItem]:
    """The bundled items, or those of a file of BFCL v3 or v4 with its `possible_answer/` next to it. Raises
    BadInput: no such file, or items of another kind, such as several turns."""
    path = BUNDLED_ITEMS if where == BUNDLED else Path(where)
    answers: dict[str, Any] = {}
    rows = list(json_lines(path, "--tool-calls"))
    answer_path = path.parent / "possible_answer" / path.name
    if answer_path.is_file():
        answers = {row["id"]: row["ground_truth"] for _, row in json_lines(answer_path)}
    items = [_item(origin, row, answers) for origin, row in rows]
    if not items:
        raise BadInput(f"--tool-calls {path} has no items")
    return items


def _item(where: str, row: Any, answers: Mapping[str, Any]) -> ToolItem:
    try:
        name, turns = row["id"], row["question"]
        functions = tuple(map(_function, row["function"]))
        kind = re.sub(r"_\d[\d-]*$", "", name)
        if len(turns) != 1:
            raise BadInput(f"{where}: {len(turns)} turns: items of one turn are scored")
        truth = row.get("ground_truth", answers.get(name))
        if truth is None and kind not in NO_CALL:
            raise BadInput(
                f"{where}: {name} has no ground_truth, and no possible_answer/ file next to its own has one"
            )
        expected = tuple((_plain(due), call[due]) for call in truth or () for due in call)
        return ToolItem(name, kind, tuple(turns[0]), functions, expected)
    except (LookupError, TypeError, AttributeError) as error:
        raise BadInput(f"{where}: not an item of BFCL: it lacks {error}") from error


def _plain(name: str) -> str:
    """A function's name for OpenAI's API, which takes no dots; BFCL replaces them too."""
    return name.replace(".", "_")


def _function(function: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": _plain(function["name"]),
        "description": function.get("description", ""),
        "parameters": _schema(function["parameters"]),
    }


def _schema(schema: Any) -> Any:
    """A JSON schema with JSON's names of types. Raises BadInput: Java's or JavaScript's."""
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    if isinstance(kind := made.get("type"), str):
        kind = SCHEMA_TYPES.get(kind, kind)
        if kind is None:
            del made["type"]
        elif kind not in KNOWN_TYPES:
            raise BadInput(f"--tool-calls: type {kind!r} is not one of JSON: give Python's items")
        else:
            made["type"] = kind
    if isinstance(made.get("properties"), Mapping):
        made["properties"] = {key: _schema(value) for key, value in made["properties"].items()}
    if "items" in made:
        made["items"] = _schema(made["items"])
    return made


def read_responses(path: Path, items: Sequence[ToolItem]) -> list[ChatAnswer]:
    """Recorded answers: JSON lines with the `id` of an item and a chat completion as `response`. Raises
    BadInput: no such file, no completion, or an item without a response."""
    answers = {}
    for origin, row in json_lines(path, "--tool-responses"):
        try:
            answers[row["id"]] = ChatAnswer.of(row["response"])
        except (LookupError, TypeError, AttributeError) as error:
            raise BadInput(f"{origin}: write an id and a chat completion as response") from error
    if missing := [item.name for item in items if item.name not in answers]:
        raise BadInput(f"--tool-responses {path} has no response to {missing[0]}")
    return [answers[item.name] for item in items]


def scored_calls(
    items: Sequence[ToolItem], answers: Sequence[ChatAnswer]
) -> tuple[TaskScoring, dict[str, Any]]:
    """Scores of the items, and the counts of `llmopt.tasks.tool_calls`: right answers by kind, and failures
    by their cause."""
    scoring = TaskScoring(TOOL_CALLS, VERSION)
    kinds: dict[str, list[int]] = {}
    failures = Counter(dict.fromkeys(("generation", "parser", "template"), 0))
    for number, (item, answer) in enumerate(zip(items, answers, strict=True)):
        scores = item_scores(item, answer)
        response = json.dumps([answer.text, *answer.calls], ensure_ascii=False)
        row = [item.name, *map(dict, item.messages), *item.functions, item.expected]
        scoring.add_item(number, row, response, json.dumps(item.expected), "none", **scores)
        counts = kinds.setdefault(item.kind, [0, 0])
        counts[0] += int(scores["correct"])
        counts[1] += 1
        if not scores["correct"]:
            failures[cause(item, answer)] += 1
    for metric in ("correct", "valid_json", "declared_name", "right_name", "arguments"):
        scoring.add_metric(metric)
    scoring.add_metric("false_call", False)
    return scoring, {"kinds": kinds, "failures": dict(failures)}


def call_sentence(counts: Mapping[str, Any]) -> str:
    """The counts of `scored_calls` for readers."""
    kinds = ", ".join(
        f"{kind} {right} of {count}" for kind, (right, count) in counts["kinds"].items()
    )
    causes = ", ".join(f"{name} {count}" for name, count in counts["failures"].items())
    return f"Right tool calls: {kinds}. Failed in: {causes}."


def item_scores(item: ToolItem, answer: ChatAnswer) -> dict[str, float]:
    """Scores of 0 and 1: `correct` of every item, `false_call` where no call is due, else of the calls."""
    if not item.expected:
        return {"correct": float(not answer.calls), "false_call": float(bool(answer.calls))}
    parsed = [(name, _arguments(text)) for name, text in answer.calls]
    names = [name for name, _ in parsed]
    is_right = len(parsed) == len(item.expected) and _matches(item, parsed, item.expected)
    return {
        "correct": float(is_right),
        "valid_json": float(bool(parsed) and all(value is not None for _, value in parsed)),
        "declared_name": float(bool(parsed) and item.declared.issuperset(names)),
        "right_name": float(Counter(names) == Counter(name for name, _ in item.expected)),
        "arguments": float(is_right),
    }


def cause(item: ToolItem, answer: ChatAnswer) -> Failure:
    """The part that failed: the template does not show the tools, the parser leaves a written call in the
    text, or the model generated another answer."""
    if not answer.takes_tools:
        return "template"
    names = "|".join(re.escape(name) for name in sorted(item.declared))
    written = (
        rf'"name"\s*:\s*"(?:{names})"|(?:<function=|\[TOOL_CALLS\]\s*)(?:{names})|\b(?:{names})\('
    )
    is_lost = not answer.calls and re.search(written, answer.text) is not None
    return "parser" if is_lost else "generation"


def _arguments(text: str) -> Any:
    try:
        value = json_value(text or "{}")
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _matches(item: ToolItem, calls: Sequence[tuple[str, Any]], expected: Sequence[Call]) -> bool:
    if not calls:
        return not expected
    (name, given), *others = calls
    schemas = {function["name"]: function["parameters"] for function in item.functions}
    for index, (due, values) in enumerate(expected):
        is_same = name == due and given is not None and _fits(given, values, schemas.get(name, {}))
        if is_same and _matches(item, others, [*expected[:index], *expected[index + 1 :]]):
            return True
    return False


def _fits(given: Mapping[str, Any], values: Mapping[str, Any], schema: Mapping[str, Any]) -> bool:
    """True if each argument has an acceptable value, and those left out may be."""
    absent = (choices for name, choices in values.items() if name not in given)
    if not given.keys() <= values.keys() or not all("" in choices for choices in absent):
        return False
    kinds = schema.get("properties") or {}
    return all(
        any(_is_same(value, choice, kinds.get(name) or {}) for choice in values[name])
        for name, value in given.items()
    )


def _is_same(value: Any, choice: Any, schema: Mapping[str, Any]) -> bool:
    """True if a value is the acceptable one: of the type of the schema, and equal."""
    if isinstance(choice, bool) or isinstance(value, bool) or choice is None:
        return value is choice
    if isinstance(choice, int | float):
        is_whole = schema.get("type") == "integer"
        return isinstance(value, int if is_whole else int | float) and value == choice
    if isinstance(choice, str):
        return isinstance(value, str) and _comparable(value) == _comparable(choice)
    if isinstance(choice, Mapping):
        return isinstance(value, dict) and _fits(value, choice, schema)
    is_list = isinstance(value, list) and len(value) == len(choice)
    inner = schema.get("items") or {}
    return is_list and all(_is_same(v, c, inner) for v, c in zip(value, choice, strict=True))


def _comparable(text: str) -> str:
    return re.sub(r"[ ,./\-_*^]", "", text).lower().replace("'", '"')
