"""CPU topology of made-up machines: cores and hyperthreads, NUMA nodes, quotas, masks."""

from __future__ import annotations

from pathlib import Path

import pytest
from llmopt.engine.base.host import (
    Placement,
    cache_bytes,
    cgroup_quota,
    parse_cpus,
    place,
    read_topology,
    usable_cores,
)


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return root


def server(root: Path, nodes: int, cores: int, threads: int = 2) -> Path:
    """Nodes of so many cores; as on real servers, sibling threads are numbered after all first ones."""
    total = nodes * cores
    files: dict[str, object] = {"devices/system/cpu/online": f"0-{total * threads - 1}"}
    for core in range(total):
        siblings = [core + i * total for i in range(threads)]
        for cpu in siblings:
            files[f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = ",".join(
                map(str, siblings)
            )
    for node in range(nodes):
        runs = (node * cores + i * total for i in range(threads))
        listed = ",".join(f"{first}-{first + cores - 1}" for first in runs)
        files[f"devices/system/node/node{node}/cpulist"] = listed
    return write(root, files)


EVERY = range(10_000)


def test_hyperthreads_are_not_counted(tmp_path: Path) -> None:
    topology = read_topology(server(tmp_path, nodes=1, cores=4), EVERY)
    assert len(topology.cpus) == 8
    assert [cpu.number for cpu in topology.cores] == [0, 1, 2, 3]
    assert place(topology) == Placement(4)


def test_one_process_takes_one_node_and_shards_one_each(tmp_path: Path) -> None:
    topology = read_topology(server(tmp_path, nodes=2, cores=4), EVERY)
    first = Placement(4, (0, 1, 2, 3, 8, 9, 10, 11), 0)
    second = Placement(4, (4, 5, 6, 7, 12, 13, 14, 15), 1)
    assert place(topology) == first
    assert [place(topology, rank, 2) for rank in (0, 1)] == [first, second]
    assert [place(topology, rank, 4).num_threads for rank in range(4)] == [2, 2, 2, 2]
    assert [place(topology, rank, 3).num_threads for rank in range(3)] == [2, 4, 2]
    assert [place(topology, rank, 3).node for rank in range(3)] == [0, 1, 0]


def test_affinity_may_leave_one_sibling_or_most_of_a_node(tmp_path: Path) -> None:
    root = server(tmp_path, nodes=2, cores=4)
    siblings = read_topology(root, {0, 8, 9, 10})
    assert [cpu.number for cpu in siblings.cores] == [0, 9, 10]
    assert place(siblings) == Placement(3)
    uneven = read_topology(root, {3, 4, 5, 6})
    assert uneven.nodes == (1, 0)
    assert place(uneven) == Placement(3, (4, 5, 6), 1)


def test_a_cpuset_and_cpus_that_are_offline(tmp_path: Path) -> None:
    root = server(tmp_path, nodes=1, cores=8, threads=1)
    write(root, {"fs/cgroup/cpuset.cpus.effective": "2-5"})
    assert [cpu.number for cpu in read_topology(root, EVERY).cpus] == [2, 3, 4, 5]
    write(root, {"devices/system/cpu/online": "0-3"})
    assert [cpu.number for cpu in read_topology(root, EVERY).cpus] == [2, 3]


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu.max": "nonsense"}, None),
    ],
)
def test_quotas_of_both_versions_of_cgroups(
    tmp_path: Path, files: dict[str, str], quota: int | None
) -> None:
    root = server(tmp_path, nodes=1, cores=4)
    write(root, {f"fs/cgroup/{name}": content for name, content in files.items()})
    assert cgroup_quota(root) == quota
    assert place(read_topology(root, EVERY)).num_threads == min(4, quota or 4)


def test_a_quota_is_shared_by_shards(tmp_path: Path) -> None:
    root = server(tmp_path, nodes=2, cores=8)
    write(root, {"fs/cgroup/cpu.max": "600000 100000"})
    topology = read_topology(root, EVERY)
    assert place(topology).num_threads == 6
    assert [place(topology, rank, 2).num_threads for rank in (0, 1)] == [3, 3]


def test_slow_cores_are_not_waited_for(tmp_path: Path) -> None:
    root = server(tmp_path, nodes=1, cores=6, threads=1)
    for cpu, capacity in enumerate([300, 300, 300, 300, 1024, 900]):
        write(root, {f"devices/system/cpu/cpu{cpu}/cpu_capacity": capacity})
    topology = read_topology(root, EVERY)
    assert [cpu.number for cpu in topology.cores] == [4, 5]


def test_data_caches_by_level(tmp_path: Path) -> None:
    caches = [(1, "Data", 48), (1, "Instruction", 32), (2, "Unified", 1280), (3, "Unified", 49152)]
    for index, (level, kind, size) in enumerate(caches):
        folder = f"devices/system/cpu/cpu0/cache/index{index}"
        facts = {"level": level, "type": kind, "size": f"{size}K"}
        write(tmp_path, {f"{folder}/{name}": fact for name, fact in facts.items()})
    assert cache_bytes(tmp_path) == {"L1": 48 * 1024, "L2": 1280 * 1024, "L3": 49152 * 1024}
    assert cache_bytes(tmp_path / "none") == {}


def test_a_system_without_sysfs(tmp_path: Path) -> None:
    topology = read_topology(tmp_path / "none")
    assert topology.num_usable >= 1 and len(topology.nodes) == 1
    assert place(topology, 3, 1000).num_threads == 1


def test_usable_cores_are_physical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("llmopt.engine.base.host.affinity", lambda: frozenset(EVERY))
    root = server(tmp_path, nodes=1, cores=4)
    assert usable_cores(root) == 4
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert usable_cores(root) == 3


def test_lists_of_cpus() -> None:
    assert parse_cpus("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert parse_cpus("") == parse_cpus("none") == []
