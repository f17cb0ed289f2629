"""Sizes in bytes and tokens as people write them, and the grammar of limits on latencies (SLO).

A benchmark's `--slo` and `--goodput` measure loads, a plan's `--slo` simulates them; both search the highest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...base.errors import BadInput

_BYTES = {f"{letter}ib": 2 ** (10 * power) for power, letter in enumerate("kmgt", start=1)}
_BYTES |= {f"{letter}b": 10 ** (3 * power) for power, letter in enumerate("kmgt", start=1)}


def parse_tokens(text: str) -> int:
    """`4096`, `128k` (k = 1024) or `1M` (M = 1024 x 1024) as a number of tokens; else BadInput."""
    match = re.fullmatch(
        r"(\d+(?:\.\d+)?)([kKmM]?)", text.strip().replace(",", "").replace("_", "")
    )
    number = float(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2].lower()] if match else 0
    if number < 1 or number != int(number):
        raise BadInput(f"{text!r} is no number of tokens: write 4096, 128k or 1M")
    return int(number)


def parse_bytes(text: str) -> int:
    """`80GiB` (2^30) or `80GB` (10^9) in bytes; BadInput without a unit, as the two differ by 7 %."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?b)", text.strip().lower())
    if not match or float(match[1]) == 0:
        raise BadInput(f"{text!r} is no size: write it with its unit, as in 80GiB or 80GB")
    return int(float(match[1]) * _BYTES[match[2]])


def parse_size(text: str) -> int:
    """A number of bytes, plain or with a unit as `parse_bytes` takes it; else BadInput. Too few bytes for any
    tensor are a number whose unit was forgotten."""
    if not text.strip().isdecimal():
        return parse_bytes(text)
    if 0 < int(text) < 1024:
        raise BadInput(f"{text!r} bytes: a size has a unit, such as {text.strip()}MB")
    return int(text)


def format_gib(num_bytes: float) -> str:
    gib = num_bytes / 2**30
    if gib >= 1 or num_bytes == 0:
        return f"{gib:,.2f} GiB"
    return (
        f"{num_bytes / 2**20:,.2f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:,.4g} KiB"
    )


def format_tokens(count: int) -> str:
    for size, letter in ((2**20, "M"), (2**10, "k")):
        if count >= size and count % size == 0:
            return f"{count // size}{letter}"
    return f"{count:,}"


SLO_METRICS = ("ttft", "tpot", "e2el")
SLO_SHARE = 0.95
PRECISION = 0.05
# A rate is sustained if this fraction of it completes, over the whole pass including its drain. Below
# it, the target is saturated, or the pass is too short relative to the latency.
KEPT_UP = 0.8
_ALIASES = {"e2e": "e2el"}
_MILLISECONDS = {"": 1.0, "us": 1e-3, "ms": 1.0, "s": 1e3, "m": 60e3, "min": 60e3}


def parse_slo(entries: Iterable[str], option: str = "--goodput") -> dict[str, float]:
    """`["ttft:200", "tpot:20ms"]`, or one text with both, as {metric: milliseconds}; else BadInput. A number
    may have a unit (us, ms, s, min); without one it is in milliseconds. `e2e` is `e2el`."""
    limits: dict[str, float] = {}
    for word in " ".join(entries).replace(",", " ").split():
        name, _, value = word.partition(":")
        metric = _ALIASES.get(name, name)
        match = re.fullmatch(r"([\d.]+(?:e-?\d+)?)([a-z]*)", value.lower())
        try:
            limit = float(match[1]) * _MILLISECONDS[match[2]] if match else math.nan
        except (ValueError, KeyError):
            limit = math.nan
        if metric not in SLO_METRICS or not limit >= 0:
            raise BadInput(
                f"{option} {word!r}: write metric:milliseconds, or a time with its unit, with a metric of "
                f"{', '.join(SLO_METRICS)}, such as ttft:200, tpot:20ms or e2el:30s"
            )
        limits[metric] = limit
    return limits


def required_slo(text: str) -> dict[str, float]:
    """The limits of an `--slo`; BadInput if it names none, or is malformed."""
    if limits := parse_slo((text,), "--slo"):
        return limits
    raise BadInput('--slo names no limit: write such as "ttft:200 tpot:50" or "ttft:1s tpot:20ms"')


@dataclass(frozen=True, slots=True)
class SloResult:
    """Highest load that met the limits, None if none did, and lowest that failed above it, if any."""

    best: float | None
    failed: float | None


def highest_near(
    keeps: Callable[[float], bool], guess: float, least: float, most: float, *, whole: bool
) -> SloResult:
    """Highest load from `least` to `most` that keeps the limits. Steps away from `guess` until one load keeps
    them and one fails, then bisects to 5 %, or adjacent ones."""
    number = round if whole else float
    load, factor = number(min(max(guess, least), most)), 1.25
    good = bad = None
    while good is None or bad is None:
        if keeps(load):
            good = load
            if load >= most:
                break
            load = min(most, max(load + whole, number(load * factor)))
        else:
            bad = load
            if load <= least:
                break
            load = max(least, min(load - whole, number(load / factor)))
        factor *= factor
    while (
        good is not None and bad is not None and bad / good > 1 + PRECISION and bad - good > whole
    ):
        middle = number(math.sqrt(good * bad))
        middle = min(max(middle, good + whole), bad - whole)
        if keeps(middle):
            good = middle
        else:
            bad = middle
    return SloResult(good, bad)
