"""`--version` and shell completion: answered without torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import sys
from llmopt.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""


def told(*arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | variables,
    )
    assert (done.returncode, done.stderr.split()) == (0, ["False"])
    return done.stdout


def test_the_version_is_printed() -> None:
    from importlib.metadata import version

    assert told("--version") == f"llmopt {version('llmopt')}\n"


@pytest.mark.parametrize(
    ("line", "word", "wanted"),
    [
        ("llmopt qu", "1", ["quantize"]),
        ("llmopt quantize --meth", "2", ["--method"]),
        ("llmopt bench --result-d", "2", ["--result-dir"]),
    ],
)
def test_commands_and_options_are_completed(line: str, word: str, wanted: list[str]) -> None:
    found = told(_LLMOPT_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=word)
    assert found.split() == wanted
