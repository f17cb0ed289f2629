"""Logging of a finished run to the trackers that were asked for, with a line for each on stderr."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...bench.record.tracking import TrackedRun, Tracker


def track(trackers: Sequence[Tracker], run: TrackedRun) -> None:
    """Log a written run to each tracker."""
    from ...bench.record.tracking import log_run
    from .console import people

    log_run(trackers, run, lambda line: people.print(line, markup=False, soft_wrap=True))
