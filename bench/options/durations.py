"""Durations of the command line: `90`, `90s`, `1.5m`, `1h` as seconds."""

from __future__ import annotations

import math
import re

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(text: str) -> float:
    """Seconds of a duration.

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
