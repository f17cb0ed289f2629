"""Values of options as a command line writes them: durations, pairs, lists, and the loads of a sweep."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any, Literal

from ...quant.base.errors import BadInput
from ...quant.base.option import Limit

Kind = Literal["concurrency", "rate"]
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(text: str) -> float:
    """Seconds of `90`, `90s`, `1.5m` or `1h`.

    Raises:
        ValueError: not a positive number with one of the units.
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*([smh]?)\s*", text)
    try:
        seconds = float(match[1]) * _UNITS[match[2]] if match else math.nan
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError("write a duration such as 60s, 1.5m or 1h")
    return seconds


def pairs(flag: str, words: Sequence[str]) -> dict[str, str]:
    """{key: value} of words KEY=VALUE."""
    found = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise BadInput(f"{flag} {word!r}: write KEY=VALUE")
        found[key] = value
    return found


def json_object(text: str) -> dict[str, Any]:
    """The object of `--extra-body`."""
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise BadInput(f"--extra-body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadInput("--extra-body is not a JSON object")
    return found


def listed(text: str) -> list[str]:
    """The names between commas."""
    return [word.strip() for word in text.split(",")]


def each(limit: Limit) -> Limit:
    """A limit that every one of several values must hold."""
    return lambda values: next(filter(None, map(limit, values)), None)


def parse_loads(text: str, kind: Kind) -> list[float] | None:
    """`1,2,4` as numbers, ascending; None for `auto`.

    Raises:
        BadInput: neither numbers nor `auto`, or an invalid load.
    """
    if text.strip() == "auto":
        return None
    flag = f"--sweep-{kind}"
    try:
        values = sorted({float(word) for word in text.split(",")})
    except ValueError as error:
        raise BadInput(f"{flag} {text!r}: write auto, or numbers such as 1,2,4") from error
    for value in values:
        if not 0 < value < math.inf or (kind == "concurrency" and value != int(value)):
            raise BadInput(f"{flag} {text!r}: {value:g} is no {kind} to measure at")
    return values
