"""Regular expressions on what clients send and models write: none that can backtrack far.

Python's `re` holds the lock of all threads while it matches. Every call of it in the folders that see requests
is found in the source, and the parsed pattern must take linear time on any text:

* no repetition without a bound within a repetition;
* what follows such a repetition begins with other characters than it repeats, so that there is one way to match;
* a pattern that is searched for does not begin with characters of such a repetition, unless that ends it:
  else the text after each beginning is looked at again.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

import pytest
from llmopt.engine.server import batch

ENGINE = Path(batch.__file__).resolve().parents[1]
FOLDERS = ("server", "sampling", "multimodal")
CALLS = {"compile", "match", "fullmatch", "search", "sub", "subn", "split", "findall", "finditer"}
SEARCHES = CALLS - {"compile", "match", "fullmatch"}
AT_RUN_TIME = {"_tight_class": "a single character class"}
"""Functions whose patterns are not constants of a module, and what they are."""
ALPHABET = [chr(code) for code in (*range(0x250), 0x2581, 0xFF5C, 0x1F600)]
Chars = frozenset[str]


def pattern_calls() -> Iterator[tuple[str, str, str | None]]:
    """(place, method, pattern) of each call of `re`; the pattern is None if it is made at run time."""
    for folder in FOLDERS:
        for path in sorted((ENGINE / folder).rglob("*.py")):
            tree = ast.parse(path.read_text())
            if not any(isinstance(n, ast.Import) and n.names[0].name == "re" for n in tree.body):
                continue
            name = ".".join(path.relative_to(ENGINE).with_suffix("").parts)
            module = importlib.import_module(f"llmopt.engine.{name}")
            for function in ast.walk(tree):
                for node in ast.iter_child_nodes(function):
                    yield from calls_in(node, function, name, vars(module))


def calls_in(
    node: ast.AST, parent: ast.AST, place: str, names: dict[str, Any]
) -> Iterator[tuple[str, str, str | None]]:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return
    method, owner = node.func.attr, node.func.value
    if method not in CALLS or not isinstance(owner, ast.Name):
        return
    where = f"{place}:{node.lineno}"
    if isinstance(names.get(owner.id), re.Pattern):
        yield where, method, names[owner.id].pattern
    elif owner.id == "re":
        try:
            made = eval(compile(ast.Expression(node.args[0]), place, "eval"), names)
        except NameError:
            made = None
        yield where, method, made.decode("latin-1") if isinstance(made, bytes) else made


FOUND = sorted({*pattern_calls()}, key=str)


def chars_of(item: Any) -> Chars:
    """Characters that a single-character item matches."""
    tree = _parser.SubPattern(_parser.State(), [item])
    matches = re._compiler.compile(tree).fullmatch  # type: ignore[attr-defined]
    return frozenset(filter(matches, ALPHABET))


def first_of(items: list[Any]) -> tuple[Chars, bool]:
    """Characters that a sequence may begin with, and whether it may be empty."""
    chars: Chars = frozenset()
    for item in items:
        kind, value = item
        own, may_be_empty = frozenset[str](), False
        if kind is _constants.SUBPATTERN:
            own, may_be_empty = first_of([*value[3]])
        elif kind is _constants.BRANCH:
            parts = [first_of([*branch]) for branch in value[1]]
            own = frozenset().union(*(part for part, _ in parts))
            may_be_empty = any(empty for _, empty in parts)
        elif kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
            own, may_be_empty = first_of([*value[2]])
            may_be_empty |= value[0] == 0
        elif kind in (_constants.AT, _constants.ASSERT, _constants.ASSERT_NOT):
            may_be_empty = True
        else:
            own = chars_of(item)
        chars |= own
        if not may_be_empty:
            return chars, False
    return chars, True


def problems(items: list[Any], after: list[Any], *, is_repeated: bool = False) -> Iterator[str]:
    """What may make a sequence, which `after` follows, take more than linear time."""
    for index, (kind, value) in enumerate(items):
        rest = [*items[index + 1 :], *after]
        if kind is _constants.SUBPATTERN:
            yield from problems([*value[3]], rest, is_repeated=is_repeated)
        elif kind is _constants.BRANCH:
            for branch in value[1]:
                yield from problems([*branch], rest, is_repeated=is_repeated)
        elif kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
            is_endless = value[1] is _constants.MAXREPEAT
            if is_endless and is_repeated:
                yield "a repetition within a repetition"
            if is_endless and (shared := first_of([*value[2]])[0] & first_of(rest)[0]):
                yield f"what follows a repetition begins as it does, with {sorted(shared)[:3]}"
            yield from problems([*value[2]], rest, is_repeated=is_repeated or value[1] > 1)


def repeated_chars(items: list[Any], *, is_last: bool = True) -> Chars:
    """Characters of endless repetitions after which a match may still fail."""
    chars: Chars = frozenset()
    for index, (kind, value) in enumerate(items):
        ends = is_last and all(first_of([item])[1] for item in items[index + 1 :])
        if kind is _constants.SUBPATTERN:
            chars |= repeated_chars([*value[3]], is_last=ends)
        elif kind is _constants.BRANCH:
            for branch in value[1]:
                chars |= repeated_chars([*branch], is_last=ends)
        elif kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
            if value[1] is _constants.MAXREPEAT and not ends:
                chars |= first_of([*value[2]])[0]
            chars |= repeated_chars([*value[2]], is_last=ends)
    return chars


def all_problems(pattern: str, method: str) -> list[str]:
    items = [*_parser.parse(pattern)]
    found = [*problems(items, [])]
    if method in SEARCHES and first_of(items)[0] & repeated_chars(items):
        found.append("a search begins with what it repeats")
    return found


@pytest.mark.parametrize(("place", "method", "pattern"), FOUND)
def test_expressions_take_linear_time(place: str, method: str, pattern: str | None) -> None:
    if pattern is None:
        source = (ENGINE / Path(*place.partition(":")[0].split("."))).with_suffix(".py").read_text()
        line = int(place.partition(":")[2])
        functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
        around = [n.name for n in functions if n.lineno <= line <= (n.end_lineno or 0)]
        assert {*around} & {*AT_RUN_TIME}, f"{place}: a pattern that is made at run time"
    else:
        assert not all_problems(pattern, method), pattern


def test_all_places_are_found() -> None:
    assert len(FOUND) > 20
    assert any("formats" in place for place, _, _ in FOUND)


@pytest.mark.parametrize(
    ("pattern", "method"),
    [
        (r"\{\{(-?)\s*(.*?)\s*(-?)\}\}", "match"),
        (r"(a+)+b", "match"),
        (r"(?:a|b*)*c", "match"),
        (r"\s*\n", "match"),
        (r"\s+x", "search"),
        (r"\[\^?\]?(?:\\.|[^\]\\])*\]", "sub"),
        (r"(?m)^\s*(%llguidance\b|start\s*:)", "search"),
    ],
)
def test_expressions_that_backtrack_are_told(pattern: str, method: str) -> None:
    assert all_problems(pattern, method)
