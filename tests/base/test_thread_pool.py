"""The thread pool of the C kernels: every item once, nobody left within a call, and nobody late."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from typing import Any

import pytest
from llmopt.base import build
from llmopt.base.build import HEADERS, BuildFailed, compiled, parallel_start

from ..support.native_paths import native_paths

WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@pytest.fixture(scope="module")
def run() -> Any:
    try:
        library = ctypes.CDLL(str(compiled(HEADERS / "pool.c", ("-pthread",))))
    except BuildFailed as error:
        pytest.skip(str(error))
    return library.llmopt_pool_run


class Items:
    """A call's items, divided as the kernels divide them, and who was within it when."""

    def __init__(self, count: int) -> None:
        self.left, self.done = list(range(count)), list[int]()
        self.inside, self.is_open, self.late = set[int](), True, False
        self.threads = set[int]()

    def work(self, _argument: object) -> None:
        self.late |= not self.is_open
        me = threading.get_ident()
        self.inside.add(me)
        self.threads.add(me)
        while True:
            try:
                item = self.left.pop()
            except IndexError:
                break
            self.done.append(item)
        self.inside.discard(me)


def test_every_item_is_done_once_and_nobody_stays(run: Any) -> None:
    for number in range(400):
        items, threads = Items(number % 37), 1 + number % 6
        run(WORK(items.work), None, threads, 0)
        assert not items.inside
        items.is_open = False
        assert sorted(items.done) == list(range(number % 37))
        assert not items.late
        assert threading.get_ident() in items.threads
        assert len(items.threads) <= threads


def test_a_call_from_within_a_call_runs_on_its_own_thread(run: Any) -> None:
    inner: list[Items] = []

    def outer(_argument: object) -> None:
        items = Items(3)
        run(WORK(items.work), None, 4, 0)
        assert items.threads == {threading.get_ident()}
        inner.append(items)

    run(WORK(outer), None, 3, 0)
    assert inner and all(sorted(items.done) == [0, 1, 2] for items in inner)


def test_callers_on_several_threads(run: Any) -> None:
    calls = [Items(50) for _ in range(40)]

    def call(some: list[Items]) -> None:
        for items in some:
            run(WORK(items.work), None, 3, 0)

    callers = [threading.Thread(target=call, args=(calls[i::4],)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(sorted(items.done) == list(range(50)) and not items.inside for items in calls)


FORKED = """
import ctypes, os, sys
run = ctypes.CDLL(sys.argv[1]).llmopt_pool_run
count = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: seen.append(os.getpid()))
seen = []
run(count, None, 3, 0)
child = os.fork()
seen.clear()
for _ in range(50):
    run(count, None, 3, 0)
right = len(seen) >= 50 and set(seen) == {os.getpid()}
if child == 0:
    os._exit(not right)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or not right)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="fork")
def test_a_forked_process_starts_workers_of_its_own(run: Any) -> None:
    library = str(compiled(HEADERS / "pool.c", ("-pthread",)))
    command = [sys.executable, "-W", "ignore", "-c", FORKED, library]
    assert subprocess.run(command, timeout=120, check=False).returncode == 0


def test_spinning_openmp_threads_are_not_competed_with(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = parallel_start.__wrapped__
    monkeypatch.setattr(build, "openmp_start", lambda: 4096)
    monkeypatch.setattr(build, "sleeps_soon", lambda: False)
    assert choose() == build.ParallelStart(4096, "torch's OpenMP")
    monkeypatch.setattr(build, "sleeps_soon", lambda: True)
    if native_paths():  # the pool is compiled
        assert choose().name == "a pool"
    monkeypatch.setenv("CC", "no-such-compiler")
    assert choose().name == "torch's OpenMP"
    monkeypatch.setattr(build, "openmp_start", lambda: None)
    assert choose() == build.ParallelStart(None, "the caller")


@pytest.mark.parametrize(
    ("bounded", "spins", "policy", "sleeps"),
    [
        (True, "2000", None, True),
        (True, "300000", None, False),
        (False, "2000", None, False),
        (False, None, "passive", True),
        (True, None, "active", False),
    ],
)
def test_openmp_is_asked_how_long_it_spins(
    monkeypatch: pytest.MonkeyPatch,
    bounded: bool,
    spins: str | None,
    policy: str | None,
    sleeps: bool,
) -> None:
    monkeypatch.setattr(build, "OPENMP_SPINS_ARE_BOUNDED", bounded)
    monkeypatch.setattr(build.sys, "platform", "linux")
    for name, value in (("GOMP_SPINCOUNT", spins), ("OMP_WAIT_POLICY", policy)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert build.sleeps_soon() is sleeps


def test_the_engine_bounds_the_spins_before_torch_is_loaded() -> None:
    show = "import llmopt.engine, os; from llmopt.base import processor as e; print(e.OPENMP_SPINS_ARE_BOUNDED, os.environ['GOMP_SPINCOUNT'])"
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "True"
