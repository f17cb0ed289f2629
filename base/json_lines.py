"""JSON lines: a JSON value on each line, as data sets, traces and results of other tools have them."""

from __future__ import annotations

import json
import lzma
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import BadInput

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def is_number(value: Any) -> bool:
    """True for a finite number, which a boolean is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def parse_json(text: str) -> Any:
    """`json.loads`, with question marks in place of half surrogate pairs.

    Tools that cut a text within an emoji write them as escapes. No encoding has them, and tokenizers refuse
    them."""
    value = json.loads(text)
    if _SURROGATE.search(text):
        value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    return value


def json_lines(path: Path, what: str = "") -> Iterator[tuple[str, Any]]:
    """(place, value) of each line that is not blank; the place names the file and the line. `path` is UTF-8
    text, with or without a byte order mark, and `.xz` is decompressed; `what` is the kind of the file, which
    begins each message. Raises BadInput: no such file, no UTF-8, or a line that is not JSON.

    A line ends at "\\n" or "\\r\\n" alone. A JSON text may hold other line ends of Unicode unescaped (U+2028,
    U+0085), at which `str.splitlines` breaks it."""
    name = f"{what} {path}".strip()
    opened = lzma.open if path.suffix == ".xz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline="\n") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    value = parse_json(line)
                except (ValueError, RecursionError) as error:
                    reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
                    raise BadInput(f"{name}, line {number}: not JSON ({reason})") from error
                yield f"{name}, line {number}", value
    except (FileNotFoundError, IsADirectoryError) as error:
        raise BadInput(f"{name} is not a file") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{name} is not UTF-8 text: {error.reason}") from error


def json_objects(path: Path, what: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of `json_lines`, each of which has to be an object. Raises BadInput: as `json_lines`, or a
    line that holds another value."""
    for where, value in json_lines(path, what):
        if not isinstance(value, dict):
            raise BadInput(f"{where}: wants an object")
        yield where, value
