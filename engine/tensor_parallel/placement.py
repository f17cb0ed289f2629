"""Placement of a process's shard: its NUMA node, and the threads that a step takes."""

from __future__ import annotations

import os
from functools import cache

from ..base.host import thread_limit
from ..base.topology import Topology, place, read_topology
from ..kernels.common.thread_choice import choose_threads


@cache
def machine() -> Topology:
    """The CPUs that this process was started on: read once, before it binds itself to some of them."""
    return read_topology()


def bind_shard(topology: Topology, rank: int, size: int, num_threads: int | None) -> int:
    """Bind the calling thread, and those that it starts, to the shard's NUMA node; the threads of a step.

    They are `num_threads` where the user chose; else the physical cores of the node, or fewer where a
    process alone measures that these are clearly faster.
    """
    placement = place(topology, rank, size)
    if placement.cpus and (num_threads or 1) <= len(placement.cpus):
        os.sched_setaffinity(0, placement.cpus)
    most = share_of(topology, rank, size, num_threads)
    if num_threads is not None or thread_limit() is not None or size > 1:
        return most
    return choose_threads(most).num_threads


def share_of(topology: Topology, rank: int, size: int, num_threads: int | None) -> int:
    """The threads of a shard without a measurement and without binding, as beside a GPU."""
    if num_threads is not None:
        return num_threads
    most = place(topology, rank, size).num_threads
    return min(most, thread_limit() or most)
