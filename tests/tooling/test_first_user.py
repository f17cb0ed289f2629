"""The first user's flow on the bundled model, and that a number shown otherwise is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli_process import run_llmopt
from tools.first_day import MISTAKES, STEPS, Timed, command_of
from tools.first_user import LOAD, QUANTIZATIONS, FirstUser, agrees, rows

SMALL = ("--num-prompts", "8", "--output-len", "8", "--num-runs", "2", "--quality-tokens", "512")


@pytest.mark.whole
@pytest.mark.timeout(900)
def test_every_pair_has_a_verdict_and_every_number_is_one(tmp_path: Path) -> None:
    # Beside other tests no number of passes is sure to tell a limit: that is the machine's, and no problem.
    user = FirstUser(tmp_path, (*LOAD, *SMALL), more_passes=(4,))
    given = tmp_path / "given.gguf"
    user.call("quantize", "stories3M", *QUANTIZATIONS["q8"], "-o", given)
    kept = {name: QUANTIZATIONS[name] for name in ("gptq4", "w8a8")}
    user.go(given, "stories3M", kept)
    assert user.problems == [] and len(user.outcomes) == 6
    assert user.compared > 100, "disturbed passes print fewer numbers"


def test_a_number_agrees_with_its_rounding_alone() -> None:
    assert agrees("1,583.59 tokens/s", 1583.592) and not agrees("1,575", 1583.59)
    assert agrees("5.88 MiB", 5.88 * 2**20) and not agrees("5.88 MiB", 5.9 * 2**20)
    assert agrees("+53.7 %", 53.71) and not agrees("+53.7 %", 74.6)
    page = "| | base | new\n\n| metric | base |\n| --- | --- |\n| a | 1 |\n| b | 2 |\n\ntext\n"
    assert list(rows(page, "metric", "base")) == [
        {"metric": "a", "base": "1"},
        {"metric": "b", "base": "2"},
    ]


@pytest.mark.whole
@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_refused_with_one_line(line: str, tmp_path: Path) -> None:
    _, *words = command_of(line, "stories3M", tmp_path)
    given = tmp_path / "report.html"
    given.touch()
    done = run_llmopt(*words, cwd=tmp_path)
    given.unlink()
    refused = Timed(line, done.returncode, done.stderr.strip(), 0.0, 0.0)
    assert refused.problem is None
    assert not list(tmp_path.iterdir()), "nothing half-written"


def test_the_walk_has_twenty_mistakes() -> None:
    assert len(set(MISTAKES)) == 20
    late = Timed(MISTAKES[0], 2, "error: no", 9.0, 1.5)
    assert late.problem is not None and "after 1.5 s of processor time" in late.problem
    assert Timed(MISTAKES[0], 2, "error: no\nTraceback", 0.1, 0.1).problem is not None


def test_the_walk_goes_the_whole_way(tmp_path: Path) -> None:
    commands = {line.split()[0] for line in STEPS if line}
    whole = {"quantize", "verify", "serve-local", "bench", "compare", "best", "run", "report"}
    assert whole <= commands and sum(" -o OUT/" in s for s in STEPS if "quantize" in s) == 5
    program, option, code = command_of("python README", "MODEL", tmp_path)
    assert (program, option) == (tmp_path / "env" / "bin" / "python", "-c")
    compile(str(code), "README.md", "exec")
