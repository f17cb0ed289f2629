"""Help screens: whole at every width, with examples that parse, and short where a command has many options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from llmopt.cli import main
from llmopt.cli.options.command import MOST_SHOWN
from llmopt.cli.output.help_screen import CHOICES, EXAMPLES, QUESTIONS
from llmopt.quant.methods.registry import AUTO, METHODS

ROOT: Any = typer.main.get_command(main.application())
MOST_COMMON = 20
WIDEST_EXAMPLE = 76


def every_command(command: Any = ROOT, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words that name each command, sub-commands too; none for `llmopt` itself."""
    yield words
    for name, inner in getattr(command, "commands", {}).items():
        yield from every_command(inner, (*words, name))


COMMANDS = [*every_command()]
each_command = pytest.mark.parametrize(
    "words", COMMANDS, ids=lambda words: " ".join(words) or "llmopt"
)


def found(words: tuple[str, ...]) -> Any:
    command = ROOT
    for word in words:
        command = command.commands[word]
    return command


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert not ROOT.main([*arguments], prog_name="llmopt", standalone_mode=False)
    return capsys.readouterr().out


def rows(words: tuple[str, ...]) -> list[tuple[str, str]]:
    """List what a screen must say of each option: its spellings with its type, and its help."""
    command = found(words)
    with command.make_context(command.name, [], resilient_parsing=True) as context:
        records = (one.get_help_record(context) for one in command.get_params(context))
        return [record for record in records if record is not None]


def flat(text: str) -> str:
    return " ".join(text.split())


@each_command
@pytest.mark.parametrize("width", [80, 120])
def test_a_help_screen_is_whole(words, width, capsys, monkeypatch) -> None:
    """Every name, type and help is on it to the last letter, brackets too, and no line is wider."""
    monkeypatch.setenv("COLUMNS", str(width))
    screen = shown(capsys, *words, "--help-all" if is_long(words) else "--help")
    for label, text in rows(words):
        assert flat(label) in flat(screen)
        assert flat(text) in flat(screen)
    for name, inner in getattr(found(words), "commands", {}).items():
        assert flat(f"{name} {inner.help}") in flat(screen)
    assert "…" not in screen
    assert max(map(len, screen.splitlines())) <= width


@each_command
def test_every_command_takes_help_all(words, capsys) -> None:
    whole = shown(capsys, *words, "--help-all")
    assert is_long(words) or whole == shown(capsys, *words, "--help")


@each_command
def test_a_help_screen_ends_with_examples(words, capsys) -> None:
    if not words:
        return
    lines = EXAMPLES[" ".join(words)]
    assert 2 <= len(lines) <= 3
    screen = shown(capsys, *words, "--help").splitlines()
    assert [f"  {line}" for line in lines] == [line for line in screen if line[2:] in lines]
    assert max(map(len, lines)) <= WIDEST_EXAMPLE


ANSWERS = [line for lines in QUESTIONS.values() for line in lines.values()]


@pytest.mark.parametrize(
    "line", [*ANSWERS, *(line for lines in EXAMPLES.values() for line in lines)]
)
def test_an_example_parses(line, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, *arguments = shlex.split(line)
    command: Any = ROOT
    while arguments and arguments[0] in getattr(command, "commands", {}):
        command = command.commands[arguments.pop(0)]
    command.make_context(command.name, arguments)
    assert not list(Path(tmp_path).iterdir())


def test_llmopt_alone_begins_with_questions(capsys) -> None:
    screens = []
    for arguments in ([], ["--help"]):
        with pytest.raises(SystemExit) as stop:
            main.main(arguments)
        assert not stop.value.code
        screens.append(capsys.readouterr().out)
    screen, whole = screens
    assert screen == whole
    assert len(ANSWERS) == 5 and max(map(len, ANSWERS)) <= WIDEST_EXAMPLE
    texts = [text for pair in QUESTIONS["llmopt"].items() for text in pair]
    places = [
        screen.index(text) for text in (*texts, "\nCommands\n", *main.COMMANDS, "\nOptions\n")
    ]
    names = [screen.index(f"\n  {name} ") for name in main.COMMANDS]
    assert places[:10] == sorted(places[:10]) and names == sorted(names)
    assert max(places[:10]) < places[10] < min(names) and max(names) < places[-1]


def test_every_method_is_told_when_to_take_it_in_half_a_line(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    screen = shown(capsys, "quantize", "--help").splitlines()
    told = CHOICES["quantize"]["Methods"]
    known = {*METHODS, AUTO, "Q4_K_M"}
    assert sorted(name for names, _ in told for name in names.split(", ")) == sorted(known)
    for names, text in told:
        assert len(text) <= 60 and any(names in line and text in line for line in screen)


def test_an_example_that_does_not_parse_is_noticed(tmp_path) -> None:
    with pytest.raises(Exception, match="No such option"):
        ROOT.commands["bench"].make_context("bench", ["--no-such-option"])


def is_long(words: tuple[str, ...]) -> bool:
    return any(one.name == "help_all" for one in found(words).params)


def flags_on(screen: str) -> set[str]:
    """The first long spelling of every option on a screen, but for those that ask for the screen."""
    flags = re.findall(r"^  (?:-\w, )?(--[a-z][\w-]*)", screen, re.MULTILINE)
    return {*flags} - {"--help", "--help-all"}


@each_command
def test_a_long_screen_shows_what_people_use_first(words, capsys) -> None:
    command = found(words)
    visible = [param for param in command.params if not getattr(param, "hidden", False)]
    if sum(not param.is_eager for param in visible) <= MOST_SHOWN:
        assert not is_long(words)
        return
    short, whole = shown(capsys, *words, "--help"), shown(capsys, *words, "--help-all")
    assert 8 <= len(flags_on(short)) <= MOST_COMMON
    assert flags_on(short) < flags_on(whole)
    assert len(short.splitlines()) < 90
    # Every option is on the short screen or counted below its heading.
    counted = re.search(r"(\d+) more options, which --help-all shows: ([^.]*)", flat(short))
    assert counted
    assert int(counted[1]) == sum(map(int, re.findall(r"\((\d+)\)", counted[2])))
    assert int(counted[1]) + len(flags_on(short)) == len(flags_on(whole))


def test_bench_shows_twenty_options_first(capsys) -> None:
    assert len(flags_on(shown(capsys, "bench", "--help"))) == MOST_COMMON


def test_brackets_are_printed_as_they_are(capsys) -> None:
    from llmopt.cli.output.console import people, say, stdout, table_of

    assert "database or folder ([mlflow])" in flat(shown(capsys, "bench", "--help-all"))
    for console in (people, stdout):
        say("a folder [mlflow] and [red]", console)
        console.print(table_of(["what"], [["llmopt[eval]"]]))
    captured = capsys.readouterr()
    for text in (captured.out, captured.err):
        assert "a folder [mlflow] and [red]" in text and "llmopt[eval]" in text
