"""Generated sections of documents, between two marker lines that name the script."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def put_part(page: str, script: str, about: str | None, make: Callable[[], str]) -> None:
    """Have a document hold what `make` gives, or say with `--check` that it does not.

    `page` is the document's path from the root, `script` the name in the two lines, `about` its help.
    Exits with 1 where a line is missing, and where a check fails.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    path = ROOT / page
    first, last = (f"<!-- made by tools/{script}: {side} -->" for side in ("begin", "end"))
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        sys.exit(f"{path} lacks the lines {first} and {last}")
    made = f"{before}{first}\n\n{make()}\n\n{last}{after}"
    if options.check and made != text:
        sys.exit(f"the table in {path} is not the present one: run python tools/{script}")
    if made != text:
        path.write_text(made, encoding="utf-8")
