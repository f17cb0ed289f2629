"""Kernel dispatch: per operation, the first candidate that supports a kernel query.

A candidate supports a query (device, dtype, shape, scheme) or gives the reason why not. On a CUDA device it
must also have earned its place (`verdicts.py`). `llmopt doctor --all` prints the same table for this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Generic

from .verdicts import Candidate, Implementation, KernelQuery, Trial, current_verdicts


class NoKernel(RuntimeError):
    """No candidate supports a kernel query; the message lists each one's reason."""


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """Dispatch decision: the selected candidate, and each candidate's reason for no support."""

    operation: str
    kernel_query: str
    chosen: str | None
    reasons: tuple[tuple[str, str | None], ...]


class Operation(Generic[KernelQuery, Implementation]):
    """Operation and its candidates, in order of preference; `trial` makes inputs to compare them on CUDA."""

    def __init__(
        self,
        name: str,
        candidates: Sequence[Candidate[KernelQuery, Implementation]],
        trial: Callable[[KernelQuery], Trial[Implementation] | None] = lambda _: None,
    ) -> None:
        self.name = name
        self.candidates = tuple(candidates)
        self.trial = trial

    def select(
        self,
        kernel_query: KernelQuery,
        trial: Callable[[], Trial[Implementation] | None] | None = None,
    ) -> Candidate[KernelQuery, Implementation]:
        """First candidate that supports a query, and on CUDA has earned its place; callers may pass a
        `trial`.

        Raises:
            NoKernel: none does.
            Failure: a candidate that was tried left the device unusable.
        """
        supported = [c for c in self.candidates if c.refuses(kernel_query) is None]
        if not supported:
            reasons = "; ".join(f"{c.name}: {c.refuses(kernel_query)}" for c in self.candidates)
            raise NoKernel(f"no kernel for {self.name} with {kernel_query}: {reasons}")
        verdicts = current_verdicts() if is_tried(kernel_query) else None
        if len(supported) == 1 or verdicts is None:
            return supported[0]
        make = trial or (lambda: self.trial(kernel_query))
        dropped = verdicts.judge(self.name, str(kernel_query), supported, make)
        return next(c for c in supported if c.name not in dropped)

    def explain(self, kernel_query: KernelQuery) -> KernelChoice:
        """Decision of `select`, with every candidate's reason; nothing is tried."""
        verdicts = current_verdicts() if is_tried(kernel_query) else None
        dropped = {} if verdicts is None else verdicts.dropped(self.name, str(kernel_query))
        reasons = tuple(
            (c.name, c.refuses(kernel_query) or dropped.get(c.name)) for c in self.candidates
        )
        chosen = next((name for name, reason in reasons if reason is None), None)
        return KernelChoice(self.name, str(kernel_query), chosen, reasons)


def lazily(module: str, name: str) -> Any:
    """Function of a module of kernels, imported by its first call, as Triton loads slowly."""

    @cache
    def function() -> Any:
        return getattr(import_module(f"..{module}", __package__), name)

    def call(*arguments: Any, **named: Any) -> Any:
        return function()(*arguments, **named)

    return call


def is_tried(kernel_query: object) -> bool:
    return getattr(kernel_query, "device", None) == "cuda"
