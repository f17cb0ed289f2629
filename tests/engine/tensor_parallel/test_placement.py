"""Threads and NUMA node of a shard: what the user says, what the machine has, what was measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from llmopt.engine.base.host import Topology, read_topology
from llmopt.engine.execution import worker
from llmopt.engine.execution.worker import bind_shard, share_of
from llmopt.engine.kernels.common.cpu_measurements import ThreadChoice, choose_by, choose_threads

from ..base.test_topology import EVERY, server


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The sets of CPUs that the process binds itself to, without being bound."""
    sets: list[set[int]] = []
    monkeypatch.setattr(
        worker.os, "sched_setaffinity", lambda pid, cpus: sets.append({*cpus}), raising=False
    )
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(worker, "choose_threads", lambda most: ThreadChoice(most - 1))
    return sets


def two_nodes(root: Path) -> Topology:
    return read_topology(server(root, nodes=2, cores=4), EVERY)


def test_a_process_alone_is_bound_and_measures(bound: list[set[int]], tmp_path: Path) -> None:
    assert bind_shard(two_nodes(tmp_path), 0, 1, None) == 3
    assert bound == [{0, 1, 2, 3, 8, 9, 10, 11}]


def test_shards_are_bound_to_a_node_each(bound: list[set[int]], tmp_path: Path) -> None:
    topology = two_nodes(tmp_path)
    assert [bind_shard(topology, rank, 2, None) for rank in (0, 1)] == [4, 4]
    assert bound == [{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}]
    assert share_of(topology, 1, 2, None) == 4 and len(bound) == 2


def test_one_node_binds_nothing(bound: list[set[int]], tmp_path: Path) -> None:
    topology = read_topology(server(tmp_path, nodes=1, cores=4), EVERY)
    assert bind_shard(topology, 0, 1, None) == 3
    assert bound == []


def test_the_users_number_counts(
    bound: list[set[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = two_nodes(tmp_path)
    assert bind_shard(topology, 0, 1, 16) == 16
    assert bound == [], "more threads than the node has are of the whole machine"
    assert bind_shard(topology, 0, 1, 2) == 2 and len(bound) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert bind_shard(topology, 0, 1, None) == 2


def timed(seconds: dict[int, float]) -> Callable[[int], float]:
    return lambda count: seconds[count]


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({8: 1.0, 6: 0.99, 4: 0.95, 2: 1.5}, 8),  # not clearly faster
        ({8: 1.0, 6: 0.8, 4: 0.7, 2: 1.5}, 4),  # bandwidth is spent, or neighbours are busy
        ({8: 15.0, 6: 9.0, 4: 4.0, 2: 1.0}, 2),
    ],
)
def test_fewer_threads_are_taken_where_they_are_clearly_faster(
    seconds: dict[int, float], chosen: int
) -> None:
    choice = choose_by(timed(seconds), 8)
    assert choice.num_threads == chosen
    assert dict(choice.seconds) == seconds


def test_the_measurement_runs_on_this_machine() -> None:
    choice = choose_threads(2)
    assert choice.num_threads in (1, 2)
    assert choice.reason or {count for count, _ in choice.seconds} == {1, 2}
    assert choose_threads(1) == ThreadChoice(1, reason="one core")
