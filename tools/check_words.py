"""Refuse retired names and phrases in code, documents and help texts: `python tools/check_words.py`.

The patterns are tools/retired_words.txt. Every hit is a line `file:line: match`; any hit makes the exit
code 1. Checked are the tracked files of the folders below and the output of `llmopt --help` and `llmopt
COMMAND --help`. Exempt are the page of old names, measured records, bundled models and texts, and the
patterns themselves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATTERNS = ROOT / "tools" / "retired_words.txt"
CHECKED = ("cli", "bench", "engine", "quant", "recipes", "tests", "tools", "docs")
CHECKED_PAGES = ("README.md", "CONTRIBUTING.md")
EXEMPT = (
    "docs/names.md",
    "docs/measured/",
    "recipes/data/",
    "recipes/models/",
    "tools/retired_words.txt",
)
BREAK = r"\s+(?:(?:#|//|\*)\s*)?"
"""What a space of a pattern matches: also the break of a line of prose, or of a comment."""


def retired() -> re.Pattern[str]:
    """One expression for all patterns; a pattern that is not one is an error that names its line."""
    patterns = []
    for number, line in enumerate(PATTERNS.read_text(encoding="utf-8").splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        try:
            patterns.append(re.compile(line.replace(" ", BREAK)).pattern)
        except re.error as error:
            sys.exit(f"{PATTERNS.relative_to(ROOT)}:{number}: not a regular expression: {error}")
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))


def sources() -> Iterator[tuple[str, str]]:
    """Path and text of every tracked text file that is checked."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--", *CHECKED, *CHECKED_PAGES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for path in filter(None, listing.stdout.split("\0")):
        file = ROOT / path
        if path.startswith(EXEMPT) or not file.is_file():
            continue
        try:
            yield path, file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # an image, or a table


def helps() -> Iterator[tuple[str, str]]:
    """What every command prints for --help, on lines too long to wrap."""
    os.environ["TERMINAL_WIDTH"] = "400"  # typer reads it when it is imported
    from llmopt.cli.main import COMMANDS, application
    from typer.testing import CliRunner

    app, runner = application(), CliRunner()
    for words in ([], *([name] for name in COMMANDS)):
        result = runner.invoke(app, [*words, "--help"])
        command = " ".join(["llmopt", *words, "--help"])
        if result.exit_code:
            sys.exit(f"{command}: exit code {result.exit_code}\n{result.output}")
        yield command, result.output


def hits(pattern: re.Pattern[str], text: str) -> Iterator[tuple[int, str]]:
    """Number of the line, and the words, of every match."""
    for match in pattern.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, " ".join(match.group().split())


def main() -> int:
    pattern = retired()
    count = 0
    for part in (sources(), helps()):
        for place, text in part:
            for line, words in hits(pattern, text):
                print(f"{place}:{line}: {words}")
                count += 1
    if count:
        print(f"{count} retired words; docs/names.md says what replaced them", file=sys.stderr)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
