"""Which implementation serves an operation, and why the others cannot.

Each operation has candidates in order of preference. A candidate looks at the situation and either
serves it or says why not; the first that serves is taken, and when none does, the error lists every
reason. `llmopt doctor` prints the same table for this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

KernelQuery = TypeVar("KernelQuery")
Implementation = TypeVar("Implementation")


class NoKernel(RuntimeError):
    """No candidate can serve an operation; the message holds each one's reason."""


@dataclass(frozen=True, slots=True)
class Candidate(Generic[KernelQuery, Implementation]):
    """One implementation. `refuses` returns the reason why it cannot serve a situation, or None."""

    name: str
    refuses: Callable[[KernelQuery], str | None]
    run: Implementation


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision of the table: what was chosen, and each candidate's reason against itself."""

    operation: str
    kernel_query: str
    chosen: str | None
    reasons: tuple[tuple[str, str | None], ...]


class Operation(Generic[KernelQuery, Implementation]):
    """An operation and its candidates, best first."""

    def __init__(
        self, name: str, candidates: Sequence[Candidate[KernelQuery, Implementation]]
    ) -> None:
        self.name = name
        self.candidates = tuple(candidates)

    def select(self, kernel_query: KernelQuery) -> Candidate[KernelQuery, Implementation]:
        """The first candidate that serves `kernel_query`.

        Raises:
            NoKernel: none does.
        """
        for candidate in self.candidates:
            if candidate.refuses(kernel_query) is None:
                return candidate
        reasons = "; ".join(f"{c.name}: {c.refuses(kernel_query)}" for c in self.candidates)
        raise NoKernel(f"no kernel for {self.name} with {kernel_query}: {reasons}")

    def explain(self, kernel_query: KernelQuery) -> Choice:
        """What `select` would do, with every reason."""
        reasons = tuple((c.name, c.refuses(kernel_query)) for c in self.candidates)
        chosen = next((name for name, reason in reasons if reason is None), None)
        return Choice(self.name, str(kernel_query), chosen, reasons)
