"""Which cases of a sweep `make test` runs; `make test-all` runs every one.

A test is marked `whole` where it is slow for the sake of certainty (soak, kills at many places, statistics of
large samples), `sweep(most)` where it is slow for the sake of breadth: `most` of its cases then show as many
values of its parameters as they can, spread over their order, and the others are marked `whole`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

Values = Mapping[str, Any]
"""A case's value of each parameter."""


def spread(cases: Sequence[Values], most: int) -> list[int]:
    """Positions of the cases to run: each next one shows the most values not seen yet, and of those that show
    as many it is the farthest from the ones before."""
    chosen: list[int] = []
    seen: set[tuple[str, Any]] = set()
    while len(chosen) < min(most, len(cases)):
        left = (position for position in range(len(cases)) if position not in chosen)
        position = max(
            left,
            key=lambda place: (
                len(set(cases[place].items()) - seen),
                min((abs(place - other) for other in chosen), default=0),
                -place,
            ),
        )
        chosen.append(position)
        seen |= set(cases[position].items())
    return sorted(chosen)


def mark_unswept(items: Sequence[pytest.Item]) -> None:
    """Mark `whole` the cases of sweeps that `make test` leaves out."""
    sweeps: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sweep"):
            sweeps[item.nodeid.partition("[")[0]].append(item)
    for cases in sweeps.values():
        mark = cases[0].get_closest_marker("sweep")
        assert mark is not None
        # The place of a value in its parametrize: the values themselves need not be hashable.
        chosen = spread([case.callspec.indices for case in cases], *mark.args)
        for position, case in enumerate(cases):
            if position not in chosen:
                case.add_marker("whole")
