"""Processor cores and memory available to this process."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
from llmopt.engine.base.host import available_memory_bytes, usable_cores


@pytest.mark.parametrize(
    ("asked", "most"), [("1", 1), ("1,4", 1), ("100000", 100000), ("", 100000)]
)
def test_threads_that_the_user_asked_for_are_an_upper_bound(
    monkeypatch: pytest.MonkeyPatch, asked: str, most: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    free = usable_cores()
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert usable_cores() == min(free, most)


@pytest.mark.parametrize("asked", ["0", "many", "-1"])
def test_a_thread_count_that_is_no_number_is_ignored(
    monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    free = usable_cores()
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert usable_cores() == free


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"memory.max": "3000000", "memory.current": "1000000"}, 2000000),
        (
            {
                "memory.max": "3000000",
                "memory.current": "2900000",
                "memory.stat": "anon 5\ninactive_file 600000\nactive_file 7",
            },
            700000,
        ),
        ({"memory.max": "3000000", "memory.current": "3000000"}, 0),
        (
            {
                "memory/memory.limit_in_bytes": "3000000",
                "memory/memory.usage_in_bytes": "2000000",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 50000",
            },
            1050000,
        ),
    ],
)
def test_free_memory_is_what_the_cgroup_has_left(
    tmp_path: Path, files: dict[str, str], free: int
) -> None:
    for name, text in files.items():
        path = tmp_path / "fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert available_memory_bytes(tmp_path) == free


@pytest.mark.parametrize(
    "files",
    [
        {"memory.max": "max", "memory.current": "1000"},
        {
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "memory/memory.usage_in_bytes": "1000",
        },
        {},
    ],
)
def test_without_a_limit_free_memory_is_the_machines(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = tmp_path / "fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert available_memory_bytes(tmp_path) > 2**28


FREED_BY_A_THREAD = """
import re, threading
from pathlib import Path
from llmopt.engine.base.host import give_back_freed_memory, use_one_arena

def resident():
    return int(re.search(r"VmRSS:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10

use_one_arena()
bytes(24 << 20)  # glibc keeps twice as much free as the largest block that it gave back
before = resident()
thread = threading.Thread(target=lambda: [b'x' * 50_000 for _ in range(800)])
thread.start()
thread.join()
give_back_freed_memory()
print(resident() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
@pytest.mark.parametrize(("arenas", "least", "most"), [(None, -5, 10), ("8", 30, 50)])
def test_memory_that_a_thread_freed_goes_back(
    monkeypatch: pytest.MonkeyPatch, arenas: str | None, least: int, most: int
) -> None:
    """MiB that stay; with a number of arenas that the user has set, those of the thread's own."""
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    if arenas is not None:
        monkeypatch.setenv("MALLOC_ARENA_MAX", arenas)
    kept = int(subprocess.check_output([sys.executable, "-c", FREED_BY_A_THREAD]))
    assert least <= kept <= most
