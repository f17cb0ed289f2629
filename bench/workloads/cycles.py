"""Cycles over a workload: its items once, or again and again for a run of fixed duration.

Every cycle behind the first gets a first token of its own: its prompts miss what earlier cycles left in a
prefix cache, and still share what they share among themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import NamedTuple

from ...quant.base.errors import BadInput
from .workload import Workload, WorkloadItem


class Opening(NamedTuple):
    """An item that begins `due` seconds after the start of the pass."""

    cycle: int
    item: WorkloadItem
    due: float


def openings(workload: Workload, *, endless: bool) -> Iterator[Opening]:
    """The items in the order of their arrival; `endless` repeats them, shifted by a period per cycle."""
    ordered = sorted(workload.items, key=lambda item: item.arrival_seconds)
    period = cycle_seconds(workload)
    names = first_tokens_of_cycles(workload) if endless else ()
    for cycle in count():
        for item in ordered:
            again = with_first_token(item, names[cycle % len(names)]) if cycle else item
            yield Opening(cycle, again, item.arrival_seconds + cycle * period)
        if not endless:
            return


def cycle_seconds(workload: Workload) -> float:
    """Seconds from one cycle's arrivals to the next one's; 0 in a closed loop."""
    last = max(item.arrival_seconds for item in workload.items)
    first = min(item.arrival_seconds for item in workload.items)
    if first > 0 or len(workload.items) == 1:
        return last  # sampled arrivals: the first waits for one gap too
    return last * len(workload.items) / (len(workload.items) - 1)


def check_endless(workload: Workload, max_concurrency: int | None) -> None:
    """Raises:
    BadInput: nothing limits how many requests a run of fixed duration sends at once.
    """
    if max_concurrency is None and cycle_seconds(workload) == 0:
        raise BadInput(
            "--duration repeats the workload, and nothing limits it: give --max-concurrency or a finite "
            "--request-rate"
        )


def first_tokens_of_cycles(workload: Workload) -> list[int]:
    """Different token ids for the cycles, taken from within the prompts; the first is not used."""
    first = {item.prompt_token_ids[0] for item in workload.items}
    inner = {token for item in workload.items for token in item.prompt_token_ids[1:]}
    return [min(first), *(sorted(inner - first) or sorted(first))]


def with_first_token(item: WorkloadItem, token: int) -> WorkloadItem:
    return replace(item, prompt_token_ids=(token, *item.prompt_token_ids[1:]))
