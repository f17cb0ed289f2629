"""CPU usage of a pass: the accounting of a process tree, and what rejects a pass."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from llmopt.bench.machine import pass_usage
from llmopt.bench.machine.pass_usage import (
    LEAST_JUDGED_SECONDS,
    InstructionCounter,
    PassMeter,
    ThreadUsage,
    TreeUsage,
    cpu_between,
    disturbance,
    process_cpu_seconds,
    process_tree,
    steal_seconds,
    thread_usage,
    threads_between,
    tree_usage,
    why_not_counted,
)


def fake_process(proc: Path, pid: int, parent: int, *threads: int) -> None:
    for thread in threads or (pid,):
        folder = proc / f"{pid}/task/{thread}"
        folder.mkdir(parents=True)
        (folder / "schedstat").write_text("2500000000 500000000 70\n")
        (folder / "status").write_text(
            "Name:\tx\nvoluntary_ctxt_switches:\t9\nnonvoluntary_ctxt_switches:\t7\n"
        )
    (proc / f"{pid}/stat").write_text(f"{pid} (a ) name) S {parent} 1 1 0\n")


def test_a_tree_is_the_process_with_its_descendants(tmp_path: Path) -> None:
    fake_process(tmp_path, 10, 1)
    fake_process(tmp_path, 11, 10, 11, 12)
    fake_process(tmp_path, 13, 11)
    fake_process(tmp_path, 20, 1)
    assert sorted(process_tree(10, tmp_path)) == [10, 11, 13]
    assert sorted(tree_usage(10, tmp_path).threads) == [10, 11, 12, 13]
    assert thread_usage(11, 12, tmp_path) == ThreadUsage(2.5, 0.5, 7)
    assert thread_usage(11, 99, tmp_path) is None


def test_without_schedstat_no_thread_is_known(tmp_path: Path) -> None:
    fake_process(tmp_path, 10, 1)
    (tmp_path / "10/task/10/schedstat").unlink()
    assert tree_usage(10, tmp_path).threads == {}


def test_a_child_of_this_process_counts() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in tree_usage(os.getpid()).processes
    assert process_cpu_seconds(child.pid) is None


def test_steal_is_that_of_the_given_cpus(tmp_path: Path) -> None:
    tick = os.sysconf("SC_CLK_TCK")
    rows = [f"cpu{n} 1 1 1 1 1 1 1 {stolen * tick} 0 0" for n, stolen in ((0, 3), (1, 5), (2, 7))]
    (tmp_path / "stat").write_text("\n".join(["cpu 0 0 0 0 0 0 0 0 0 0", *rows]))
    assert steal_seconds({0, 2}, tmp_path) == 10
    assert steal_seconds({9}, tmp_path) is None
    assert steal_seconds({0}, tmp_path / "none") is None


def test_between_two_readings_processes_come_and_go() -> None:
    before = TreeUsage({1: 10.0, 2: 4.0}, {1: ThreadUsage(10, 1, 3), 2: ThreadUsage(4, 0, 0)})
    after = TreeUsage({1: 11.5, 3: 0.5}, {1: ThreadUsage(11.5, 1.25, 5), 3: ThreadUsage(0.5, 0, 1)})
    assert cpu_between(before, after) == 2.0
    assert threads_between(before, after) == {
        1: ThreadUsage(1.5, 0.25, 2),
        3: ThreadUsage(0.5, 0, 1),
    }
    assert cpu_between(before, TreeUsage({}, {})) is None


@pytest.mark.parametrize(
    ("run_delay", "switches", "stolen", "said"),
    [
        (0.01, 20, 0.0, None),
        (0.4, 20, 0.0, "40% of its time in the run queue"),
        (0.0, 20, 0.3, "30% of its time stolen"),
        (None, 900, None, "1000 involuntary switches"),
        (None, None, None, None),
    ],
)
def test_a_pass_is_rejected_by_its_own_evidence(
    run_delay: float | None, switches: int | None, stolen: float | None, said: str | None
) -> None:
    reason = disturbance(1.0, 0.9, run_delay, switches, stolen)
    assert (reason is None) == (said is None)
    assert said is None or said in (reason or "")
    assert disturbance(LEAST_JUDGED_SECONDS / 2, 0.05, run_delay, switches, stolen) is None


def test_a_meter_of_this_process_and_of_one_that_is_gone() -> None:
    meter = PassMeter()
    meter.start()
    usage = meter.stop()
    assert usage.cpu_seconds is not None and usage.cpu_seconds > 0
    assert usage.waiting_seconds is not None and usage.waiting_seconds >= 0
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    meter = PassMeter(child.pid)
    meter.start()
    child.communicate()
    usage = meter.stop()
    assert (usage.cpu_seconds, usage.waiting_seconds, usage.disturbed) == (None, None, False)


def test_instructions_are_counted_or_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    if (reason := why_not_counted()) is None:
        counter = InstructionCounter([0])
        sum(range(10_000))
        assert counter.stop() > 10_000
    else:
        assert reason.startswith("perf_event_open")
    monkeypatch.setattr(pass_usage, "SYSCALLS", {})
    assert "is not known on" in (why_not_counted() or "")
