"""Number formatting for reports."""

from __future__ import annotations

MISSING = "n/a"


def number(value: float | None, digits: int = 2) -> str:
    """A number with `digits` decimals and thousands separators, or `n/a`."""
    return MISSING if value is None else f"{value:,.{digits}f}"


def percent(value: float | None, digits: int = 1, *, signed: bool = False) -> str:
    """0.123 as `12.3 %`."""
    if value is None:
        return MISSING
    return f"{value * 100:{'+' if signed else ''}.{digits}f} %"


def size(num_bytes: float | None) -> str:
    """Bytes in the binary unit that leaves one to four digits before the point."""
    if num_bytes is None:
        return MISSING
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"


def per_second(value: float, unit: str) -> str:
    """A rate with a decimal prefix: `3.21 GB/s`."""
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {prefix}{unit}/s"
    return f"{value:.3g} {unit}/s"


def interval(bounds: tuple[float, float] | list[float] | None, digits: int = 2) -> str:
    """`1.00 to 2.00`, or `n/a`."""
    return MISSING if bounds is None else f"{bounds[0]:,.{digits}f} to {bounds[1]:,.{digits}f}"


def bounds(
    interval_: tuple[float | None, float | None] | list[float | None] | None, digits: int = 2
) -> str:
    """An interval of which a side may be open: `1.00 to unbounded`."""
    if interval_ is None:
        return MISSING
    low, high = (None if side is None else f"{side:,.{digits}f}" for side in interval_)
    return "unbounded" if low is high is None else f"{low or 'unbounded'} to {high or 'unbounded'}"
