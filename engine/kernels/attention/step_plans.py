"""Plans of a captured step: what a library computes on the host before each replay of a graph.

A graph holds the launches of a step; a plan, which splits the work of the sequences at hand over them
(FlashInfer), lies in buffers that the launches read. The first run of a step makes its plans, before it is
captured, and `renew` precedes each replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar


class Plan(Protocol):
    """A kernel's plan of a step."""

    def renew(self, num_held: Sequence[int]) -> None:
        """Plan a step whose sequences have so many tokens in their blocks."""
        ...


Planned = TypeVar("Planned", bound=Plan)


class StepPlans:
    """The plans of one graph, which outlive the captured call.

    Attributes:
        num_held: tokens in the blocks of each of its sequences.
    """

    def __init__(self, num_held: Sequence[int]) -> None:
        self.num_held = num_held
        self._plans: dict[object, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._plans)

    def of(self, kind: object, make: Callable[[], Planned]) -> Planned:
        """The plan of a kind, made by the first call."""
        if kind not in self._plans:
            self._plans[kind] = make()
        return self._plans[kind]

    def renew(self, num_held: Sequence[int]) -> None:
        """Plan the step that is replayed next."""
        self.num_held = num_held
        for plan in self._plans.values():
            plan.renew(num_held)
