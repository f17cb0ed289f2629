"""What every command shares: exit codes, one-line errors, --debug."""

from __future__ import annotations

import errno
import logging

import pytest
import typer
from llmopt.base.errors import BadInput
from llmopt.cli.main import COMMANDS, application, main, run_guarded


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    captured = capsys.readouterr()
    assert isinstance(stop.value.code, int)
    return stop.value.code, captured.out, captured.err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["bogus"], "No such command 'bogus'"),
        (["bench", "--bogus"], "No such option"),
        (["bench", "--num-prompts", "many"], "--num-prompts"),
        (["serve-local", "--port", "99999"], "--port"),
        (["kv-plan"], "--model"),
        (["verify"], "folder"),
        (["compare", "only-one"], "new"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(capsys, arguments, complaint):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert complaint.lower() in err.lower()
    assert "--help" in err


def test_help_lists_every_command(capsys):
    for arguments in ([], ["--help"], ["-h"]):
        code, out, _ = run(capsys, *arguments)
        assert code == 0
        assert all(name in out for name in COMMANDS)


def test_the_list_of_commands_says_what_each_says_of_itself():
    for command in application().registered_commands:
        assert command.name and command.callback and command.callback.__doc__
        assert " ".join(command.callback.__doc__.split()).startswith(COMMANDS[command.name])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(capsys, command):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert "Usage: llmopt" in out


def raising(error: BaseException):
    def call():
        raise error

    return call


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (BadInput("what, where"), 2, "error: what, where\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (typer.Abort(), 130, "interrupted\n"),
        (OSError(errno.ENOSPC, "No space left on device", "x.bin"), 2,
         "error: cannot write x.bin: No space left on device\n"),
    ],
)  # fmt: skip
def test_errors_become_lines_and_codes(capsys, error, code, line):
    assert run_guarded(raising(error), debug=False) == code
    assert capsys.readouterr().err == line


def test_debug_shows_the_traceback_and_a_bug_is_never_hidden():
    with pytest.raises(BadInput):
        run_guarded(raising(BadInput("x")), debug=True)
    with pytest.raises(ZeroDivisionError):
        run_guarded(raising(ZeroDivisionError()), debug=False)


def test_debug_logs_what_is_kept_off_the_screen(capsys, monkeypatch) -> None:
    logger = logging.getLogger("llmopt")
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    for words, level in (
        (["--version"], logging.NOTSET),
        (["--debug", "--version"], logging.DEBUG),
    ):
        monkeypatch.setattr(logger, "level", logging.NOTSET)
        assert run(capsys, *words)[0] == 0
        assert logger.level == level
