"""Integrity of the scheduler's queues: each unfinished sequence is in one of them, as its status says."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .request import Request, RequestStatus
from .scheduler_config import SchedulerConfig


def check_queues(
    running: Sequence[Request],
    waiting: Sequence[Request],
    requests: Collection[Request],
    config: SchedulerConfig,
) -> None:
    """Assert that the queues agree with all unfinished `requests`, and tokens with blocks."""
    assert {id(r) for r in requests} == {id(r) for r in [*running, *waiting]}
    assert len(requests) == len(running) + len(waiting)
    assert len(running) <= config.max_num_seqs
    for request in waiting:
        assert request.status is RequestStatus.WAITING
        assert not request.block_ids and request.num_computed_tokens == 0
        assert not request.evicted and not request.num_evicted_tokens
        assert not request.state_slot
    for request in running:
        assert request.status is RequestStatus.RUNNING
        assert request.num_computed_tokens <= request.num_tokens
        assert len(request.block_ids) >= config.num_blocks(request.num_slots)
