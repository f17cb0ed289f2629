"""`--version`, help and shell completion: answered without torch, help without numpy too."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from llmopt.cli.main import COMMANDS

CODE = """
import sys
from llmopt.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""

HELP = """
import contextlib, io, json, sys, typer.main
from llmopt.cli import main
def help_of(command, *words):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main.main([*words, "--help"])
    found.append([words, sorted({name.partition(".")[0] for name in sys.modules})])
    for name, inner in getattr(command, "commands", {}).items():
        help_of(inner, *words, name)
found = []
help_of(typer.main.get_command(main.application()))
print(json.dumps(found))
"""
PACKAGES = (
    "annotated_doc annotated_types llmopt pydantic pydantic_core shellingham typer "
    "typing_extensions typing_inspection"
)
"""The top-level packages of every help screen; numpy alone took a tenth of a second of `best --help`."""


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


def test_help_imports_few_packages() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    screens = json.loads(done.stdout)
    assert {words[0] for words, _ in screens if words} == {*COMMANDS}
    for words, packages in screens:
        # Python itself imports `sitecustomize` where a machine has one.
        more = {name for name in packages if not name.startswith("_")} - {"sitecustomize"}
        assert more <= {*PACKAGES.split(), *sys.stdlib_module_names}, words
