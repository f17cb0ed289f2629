"""Allocation of bytes to linears as a mixed-integer program, solved by HiGHS.

Each choice takes one of its candidates; what they cost adds up, and so do their bytes, which have a bound:
the multiple-choice knapsack problem. Its front is made by sweeping the bound.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .candidates import too_small

_SECONDS = 60.0  # a hundred layers of twenty candidates take less than one
_GAP = 1e-4


@dataclass(frozen=True, slots=True)
class Choice:
    """Linears that share one scheme, with bytes and cost of each candidate.

    Attributes:
        costs: expected KL divergence of the model's output, in nats a token.
    """

    modules: tuple[str, ...]
    bytes: tuple[int, ...]
    costs: tuple[float, ...]

    @property
    def efficient(self) -> list[int]:
        """The candidates that no other beats in both bytes and cost, the smallest first."""
        kept: list[int] = []
        for number in sorted(range(len(self.bytes)), key=lambda n: (self.bytes[n], self.costs[n])):
            if not kept or self.costs[number] < self.costs[kept[-1]]:
                kept.append(number)
        return kept


@dataclass(frozen=True, slots=True)
class Allocation:
    """A candidate for each choice.

    Attributes:
        bytes, cost: of all together.
        gap: how much less the least cost may be at most, as a share of the cost.
    """

    chosen: tuple[int, ...]
    bytes: int
    cost: float
    gap: float


def allocate(choices: Sequence[Choice], budget: int, *, exclusive: bool = False) -> Allocation:
    """The candidates of least total cost within `budget` bytes.

    Args:
        exclusive: all choices take the same candidate, for formats that hold one scheme.

    Raises:
        BadInput: even the smallest candidates are too large.
    """
    if exclusive:
        choices_of_all = _joined(choices)
        found = allocate([choices_of_all], budget)
        return Allocation(found.chosen * len(choices), found.bytes, found.cost, found.gap)
    pairs = [(at, number) for at, choice in enumerate(choices) for number in choice.efficient]
    least = sum(min(choice.bytes) for choice in choices)
    if least > budget:
        raise too_small(budget, least)
    taken, gap = _solved(choices, pairs, budget)
    return Allocation(
        taken,
        sum(choice.bytes[number] for choice, number in zip(choices, taken, strict=True)),
        sum(choice.costs[number] for choice, number in zip(choices, taken, strict=True)),
        gap,
    )


def front(choices: Sequence[Choice], points: int) -> list[Allocation]:
    """Allocations from the fewest bytes to the most that lower the cost, by evenly spaced bounds."""
    low = sum(min(choice.bytes) for choice in choices)
    high = sum(choice.bytes[choice.efficient[-1]] for choice in choices)
    found: dict[int, Allocation] = {}
    for bound in np.linspace(low, high, points):
        allocation = allocate(choices, int(bound))
        found[allocation.bytes] = allocation
    return [found[size] for size in sorted(found)]


def _joined(choices: Sequence[Choice]) -> Choice:
    """All choices as one."""
    return Choice(
        tuple(module for choice in choices for module in choice.modules),
        tuple(map(sum, zip(*(choice.bytes for choice in choices), strict=True))),
        tuple(map(sum, zip(*(choice.costs for choice in choices), strict=True))),
    )


def _solved(
    choices: Sequence[Choice], pairs: Sequence[tuple[int, int]], budget: int
) -> tuple[tuple[int, ...], float]:
    """The candidate of each choice, and the gap to the optimum."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    costs = np.array([choices[at].costs[number] for at, number in pairs])
    sizes = np.array([choices[at].bytes[number] for at, number in pairs], dtype=np.int64)
    # Whole numbers of the largest unit, bounded by half a one more: the solver's tolerances let no more in.
    unit = np.gcd.reduce(sizes)
    sizes, most = sizes // unit, budget // unit + 0.5
    columns = np.arange(len(pairs))
    one_each = csr_array((np.ones(len(pairs)), ([at for at, _ in pairs], columns)))
    scale = costs.max() or 1.0
    with c_prints_on_stderr():
        result = milp(
            costs / scale,
            integrality=np.ones(len(pairs)),
            bounds=Bounds(0, 1),
            constraints=[
                LinearConstraint(one_each, 1, 1),
                LinearConstraint((sizes / sizes.max())[None], ub=most / sizes.max()),
            ],
            options={"time_limit": _SECONDS, "mip_rel_gap": _GAP},
        )
    if result.x is None:
        raise RuntimeError(f"HiGHS found no allocation: {result.message}")
    taken = {at: number for (at, number), on in zip(pairs, result.x > 0.5, strict=True) if on}
    return tuple(taken[at] for at in range(len(choices))), float(result.mip_gap or 0.0)


@contextlib.contextmanager
def c_prints_on_stderr() -> Iterator[None]:
    """HiGHS prints from C where it repairs a rounded solution, and stdout is the result's alone."""
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, TypeError):
            ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
