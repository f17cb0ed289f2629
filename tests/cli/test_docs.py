"""Commands shown in the README and the docs parse, and print what is shown below them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

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
SHOWN = [
    (page.name, line, shown)
    for page in PAGES
    for line, shown in re.findall(
        r"^ {4}\$ (llmopt .+)\n((?: {4}(?!\$).+\n)+)",
        page.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
]
OMITTED = "…\n"


@pytest.mark.parametrize(("page", "line", "shown"), SHOWN)
def test_what_the_docs_show_is_printed(page, line, shown, tmp_path, monkeypatch):
    """In an empty folder; a line of … stands for any lines."""
    monkeypatch.setenv("COLUMNS", "100")
    command = [sys.executable, "-m", "llmopt.cli.main", *shlex.split(line)[1:]]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    pieces = map(re.escape, dedent(shown).split(OMITTED))
    said = re.sub(r"\n\s*\n", "\n", run.stdout + run.stderr)
    assert re.fullmatch("(?s:.*)".join(pieces), said), said


def test_the_docs_show_help_and_an_error():
    assert {"--help" in line for _, line, _ in SHOWN} == {True, False}


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
