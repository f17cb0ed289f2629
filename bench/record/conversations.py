"""Conversations in the record: what the workload has of them, and what was measured by turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..metrics.trace import LoadPass
from ..metrics.turns import turn_figures
from ..workloads.workload import Workload


def conversations_part(
    passes: Sequence[LoadPass], workload: Workload, block_size: int | None
) -> dict[str, Any]:
    """`{"conversations": …}` for the record; empty for a workload of single requests.

    `block_size` is that of an engine in this process with prefix caching, else None.
    """
    if not workload.is_multi_turn:
        return {}
    part = {
        "num_conversations": len(workload.items),
        **conversation_words(workload),
        **turn_figures(passes, block_size),
    }
    return {"conversations": part}


def conversation_words(workload: Workload) -> dict[str, Any]:
    """History and think time of conversations; empty for a workload of single requests."""
    if not workload.is_multi_turn:
        return {}
    return {"history": workload.history, "mean_think_seconds": workload.mean_think_seconds}
