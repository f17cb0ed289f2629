"""Parsing of the load list of a sweep (`1,2,4` or `auto`)."""

from __future__ import annotations

import math
from typing import Literal

from ...quant.base.errors import BadInput

Kind = Literal["concurrency", "rate"]


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
