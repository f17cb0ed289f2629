"""Commands shown in the README and the docs parse."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer.main
from llmopt.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINES = [
    (page.name, line.strip())
    for page in PAGES
    for line in page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    if re.match(r"^ {4}llmopt ", line)
]


@pytest.fixture(scope="module")
def commands():
    return typer.main.get_command(main.application()).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize(("page", "line"), LINES)
def test_commands_in_the_docs_parse(commands, page, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "serve.yaml").write_text("model: stories3M\n")  # of --config
    _, name, *arguments = shlex.split(line, comments=True)
    assert name in commands
    command = commands[name]
    while arguments and arguments[0] in getattr(command, "commands", {}):
        command = command.commands[arguments.pop(0)]
    command.make_context(name, arguments)
