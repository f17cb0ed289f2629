"""Generated parts of documents, between two marker lines that name what makes them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def part_of(path: Path, name: str) -> str:
    """Read what a document holds between the lines of `name`."""
    return _divided(path, name)[1].strip("\n")


def write_part(path: Path, name: str, made: str) -> None:
    """Have a document hold `made` between the lines of `name`."""
    before, _, after = _divided(path, name)
    path.write_text(f"{before}\n\n{made}\n\n{after}", encoding="utf-8")


def _divided(path: Path, name: str) -> tuple[str, str, str]:
    first, last = (f"<!-- made by tools/{name}: {side} -->" for side in ("begin", "end"))
    before, begin, rest = path.read_text(encoding="utf-8").partition(first)
    part, end, after = rest.partition(last)
    if not begin or not end:
        sys.exit(f"{path} lacks the lines {first} and {last}")
    return before + begin, part, end + after


def put_part(page: str, script: str, about: str | None, make: Callable[[], str]) -> None:
    """Have the document `page`, a path from the root, hold what `make` gives between the lines of `script`.

    With `--check` nothing is written, and another part than that ends with 1. `about` is the help.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    path, made = ROOT / page, make()
    if parser.parse_args().check:
        if part_of(path, script) != made:
            sys.exit(f"the table in {path} is not the present one: run python tools/{script}")
        return
    write_part(path, script, made)
