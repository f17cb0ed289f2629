"""Parsing and formatting of sizes in bytes and tokens."""

from __future__ import annotations

import re

from ...quant.base.errors import BadInput

_BYTES = {
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


def parse_tokens(text: str) -> int:
    """`4096`, `128k` (k = 1024) or `1M` (M = 1024 x 1024) as a number of tokens.

    Raises:
        BadInput: it is none of these.
    """
    match = re.fullmatch(
        r"(\d+(?:\.\d+)?)([kKmM]?)", text.strip().replace(",", "").replace("_", "")
    )
    number = float(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2].lower()] if match else 0
    if number < 1 or number != int(number):
        raise BadInput(f"{text!r} is no number of tokens: write 4096, 128k or 1M")
    return int(number)


def parse_bytes(text: str) -> int:
    """`80GiB` (2^30) or `80GB` (10^9) in bytes; the unit is needed, because the two differ by 7 %.

    Raises:
        BadInput: it has no unit, or is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?b)", text.strip().lower())
    if not match or float(match[1]) == 0:
        raise BadInput(f"{text!r} is no size: write it with its unit, as in 80GiB or 80GB")
    return int(float(match[1]) * _BYTES[match[2]])


def parse_size(text: str) -> int:
    """A number of bytes, plain or with a unit as `parse_bytes` takes it.

    Raises:
        BadInput: it is neither.
    """
    return int(text) if text.strip().isdecimal() else parse_bytes(text)


def format_gib(num_bytes: float) -> str:
    """In GiB (2^30), or MiB or KiB where it is small."""
    gib = num_bytes / 2**30
    if gib >= 0.1 or num_bytes == 0:
        return f"{gib:,.2f} GiB"
    return (
        f"{num_bytes / 2**20:,.2f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:,.4g} KiB"
    )


def format_tokens(count: int) -> str:
    """`128k` where it is a whole number of 1024, else the digits."""
    for size, letter in ((2**20, "M"), (2**10, "k")):
        if count >= size and count % size == 0:
            return f"{count // size}{letter}"
    return f"{count:,}"
