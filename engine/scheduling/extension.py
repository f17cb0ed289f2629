"""Parts of the scheduler that are attached where configured: state slots, a KV budget, swap space."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .request import Request
from .step_plan import ScheduledRow, StepPlan


class SchedulerExtension:
    """Hooks at the events of a sequence's way through the scheduler, which by default change nothing.

    The scheduler calls those of its extensions in their order: each takes what the one before it left.
    """

    @property
    def has_free(self) -> bool:
        """Whether one more sequence can run."""
        return True

    def chunk(self, request: Request, num_new: int) -> int:
        """At most `num_new` tokens of a sequence, so that the step ends where the extension needs it to."""
        return num_new

    def num_reusable(self, request: Request, num_blocks: int) -> int:
        """Blocks, of `num_blocks` that the prefix cache has, that a waiting sequence may share."""
        return num_blocks

    def num_restored(self, request: Request, num_computed: int) -> int:
        """Tokens of a waiting sequence that need no computing, where `num_computed` are in shared blocks."""
        return num_computed

    def num_admitted(self, request: Request, num_tokens: int) -> int:
        """Tokens, of `num_tokens`, that a waiting sequence gets blocks for."""
        return num_tokens

    def admit(self, request: Request, num_hits: int, new: Mapping[int, int]) -> None:
        """Admit a sequence behind `num_hits` shared blocks; `new` are its own by their place in its table."""

    def mark(self, request: Request, row: ScheduledRow) -> ScheduledRow:
        """The row with what the step is to do for the extension."""
        return row

    def end_row(self, request: Request | None, row: ScheduledRow) -> None:
        """Process a row of a step that has ended; `request` is None where its sequence ended before."""

    def fork(self, parent: Request, child: Request) -> None:
        """Have a sequence run that is split off another."""

    def preempt(self, request: Request) -> None:
        """Keep what a running sequence needs later, before its blocks are freed."""

    def leave(self, request: Request) -> None:
        """Free what a running sequence holds, as it ends or waits again."""

    def forget(self, request: Request) -> None:
        """Free what a waiting sequence holds, as it ends or begins anew."""

    def skip_step(self, waiting: Iterable[Request]) -> None:
        """Drop what the step was to do, as it has no rows and is not executed."""

    def complete(self, plan: StepPlan) -> StepPlan:
        """The plan with the copies that come before its forward pass."""
        return plan

    def reset_in_flight(self) -> None:
        """Drop what in-flight steps were to do, because one failed."""
