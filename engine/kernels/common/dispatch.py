"""Kernel dispatch: per operation, the first candidate that supports a kernel query.

Each operation has candidates in order of preference. A candidate either supports a kernel query (device,
dtype, shape, scheme) or gives the reason why not; the first that does is selected, and if none does, the
error lists every reason. `llmopt doctor` prints the same table for this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

KernelQuery = TypeVar("KernelQuery")
Implementation = TypeVar("Implementation")


class NoKernel(RuntimeError):
    """No candidate supports a kernel query; the message lists each one's reason."""


@dataclass(frozen=True, slots=True)
class Candidate(Generic[KernelQuery, Implementation]):
    """One implementation. `refuses` returns the reason why it does not support a kernel query, or None."""

    name: str
    refuses: Callable[[KernelQuery], str | None]
    run: Implementation


@dataclass(frozen=True, slots=True)
class Choice:
    """A dispatch decision: the selected candidate, and each candidate's reason for no support."""

    operation: str
    kernel_query: str
    chosen: str | None
    reasons: tuple[tuple[str, str | None], ...]


class Operation(Generic[KernelQuery, Implementation]):
    """An operation and its candidates, in order of preference."""

    def __init__(
        self, name: str, candidates: Sequence[Candidate[KernelQuery, Implementation]]
    ) -> None:
        self.name = name
        self.candidates = tuple(candidates)

    def select(self, kernel_query: KernelQuery) -> Candidate[KernelQuery, Implementation]:
        """The first candidate that supports `kernel_query`.

        Raises:
            NoKernel: none does.
        """
        for candidate in self.candidates:
            if candidate.refuses(kernel_query) is None:
                return candidate
        reasons = "; ".join(f"{c.name}: {c.refuses(kernel_query)}" for c in self.candidates)
        raise NoKernel(f"no kernel for {self.name} with {kernel_query}: {reasons}")

    def explain(self, kernel_query: KernelQuery) -> Choice:
        """The decision of `select`, with every candidate's reason."""
        reasons = tuple((c.name, c.refuses(kernel_query)) for c in self.candidates)
        chosen = next((name for name, reason in reasons if reason is None), None)
        return Choice(self.name, str(kernel_query), chosen, reasons)
