"""Names that a user chooses of a list: the refusal of an unknown one offers the nearest."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches


def offer(name: str, known: Collection[str]) -> str:
    """The second half of a refusal: the known names most like `name`, if any is, and all of them."""
    near = get_close_matches(name, known, n=2, cutoff=0.6)
    start = f"the nearest is {' or '.join(near)}; " if near else ""
    return f"{start}choose one of {', '.join(known)}"
