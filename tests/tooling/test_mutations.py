"""Seeded mistakes: where they are made, and that what is left is still a program."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools import mutations
from tools.structure import Module

SOURCE = '''"""Text, and 1."""
LIMIT = 3

def clip(values: "list[int]", most: int = 4) -> int:
    """Not 2."""
    if len(values) > 5:
        values.clear()
    return 0.5 if f"{6}" else True
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Module:
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    path = tmp_path / "clip.py"
    path.write_text(SOURCE)
    return Module("clip", path)


def test_mistakes_are_made_in_what_functions_run(module: Module) -> None:
    """Not in annotations, defaults, docstrings and parts of texts."""
    found = {(m.kind, SOURCE[m.start : m.end], m.text) for m in mutations.mutations(module)}
    assert found == {
        ("condition", "len(values) > 5", "(not len(values) > 5)"),
        ("comparison", "len(values) > 5", "(len(values) >= 5)"),
        ("off by one", "5", "(6)"),
        ("statement", "values.clear()", "pass"),
        ("condition", 'f"{6}"', "(not f'{6}')"),
        ("constant", "0.5", "(1.0)"),
        ("constant", "True", "(False)"),
    }


def test_a_mutated_file_is_still_a_program(module: Module) -> None:
    trees = [ast.dump(ast.parse(m.apply(SOURCE.encode()))) for m in mutations.mutations(module)]
    assert len({*trees, ast.dump(ast.parse(SOURCE))}) == len(trees) + 1


def test_a_line_is_that_of_its_statement(module: Module) -> None:
    assert {m.lines for m in mutations.mutations(module)} == {(6, 6), (7, 7), (8, 8)}
