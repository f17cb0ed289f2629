"""Processes of `doctor --gpu`: what raises, hangs or crashes is a finding, and the rest goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.bench.gpu_check import run
from llmopt.bench.gpu_check.run import STAGES, WHOLE, Record, Stage, add_stage, check_gpu, failures

SCRIPT = """
import os, sys, time
from functools import partial
from pathlib import Path
from llmopt.bench.gpu_check.run import Case, Finding, run_cases
from llmopt.base.errors import BadInput

def good(): yield Finding("good", "1", "1", True)
def wrong(): yield Finding("wrong", "1", "2", False)
def raises():
    yield Finding("before it raised", "1", "1", True)
    raise RuntimeError("CUDA error\\nof a kernel")
def hangs(): time.sleep(60); yield
def crashes(): os.kill(os.getpid(), 11); yield
lost = []
def loses(): lost.append(1); yield Finding("the last of a card", "1", "1", True)
def answers():
    if lost: raise RuntimeError("CUDA error: illegal access")
def unopened():
    yield Case("good", good)
    raise ValueError("no room for the model")
def refuses():
    raise BadInput("NVIDIA L4 is in use")
    yield
def in_pool(index):
    time.sleep(0.2)
    if index == 3: os.kill(os.getpid(), 11)
    numbers = {"threads": os.environ["OMP_NUM_THREADS"]}
    yield Finding(f"case {index - (index > 3)}", "", str(os.getpid()), True, numbers)

cases = {
    "machine": lambda: [Case("good", good)],
    "faults": lambda: [Case("raises", raises), Case("hangs", hangs, 0.5), Case("crashes", crashes),
                       Case("loses", loses), Case("wrong", wrong), Case("good", good)],
    "unopened": unopened,
    "slow": lambda: [Case("good", good), Case("hangs", hangs)],
    "refuses": refuses,
    "pool": lambda: [Case(str(index), partial(in_pool, index)) for index in range(7)],
}
stage, lines = sys.argv[1], Path(sys.argv[2])
print("started", flush=True)
sys.exit(run_cases(cases[stage](), lines.with_name(stage), lines, answers))
"""
MACHINE, FAULTS = Stage("machine", 60), Stage("faults", 120)


@pytest.fixture(autouse=True)
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages of a script in place of a card's."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(run, "COMMAND", (sys.executable, str(script)))


def made(out: Path, *stages: Stage, first: Stage = MACHINE) -> tuple[Record, list[str]]:
    said: list[str] = []
    record = check_gpu(out, said.append, (first, *stages))
    assert json.loads(out.read_text()) == record
    return record, said


def test_the_stages_end_within_nine_minutes() -> None:
    """And the first result is there within one."""
    assert sum(stage.seconds for stage in STAGES) <= 540
    assert STAGES[0].seconds <= 60


def test_what_raises_hangs_or_crashes_is_a_finding_and_the_others_go_on(tmp_path: Path) -> None:
    record, said = made(tmp_path / "a.json", FAULTS)
    assert [stage["ended"] for stage in record["stages"]] == [WHOLE] * 2
    found = record["stages"][1]["findings"]
    assert [(each["what"], each["seen"], each["met"]) for each in found] == [
        ("before it raised", "1", True),
        ("raises", "RuntimeError: CUDA error", False),
        ("hangs", "hung: no end in 0 s", False),
        ("crashes", "killed by SIGSEGV", False),
        ("the last of a card", "1", True),
        ("loses", "RuntimeError: CUDA error: illegal access", False),
        ("wrong", "2", False),
        ("good", "1", True),
    ]
    assert len(failures(record)) == 5
    assert "faults: FAILED: crashes: killed by SIGSEGV (expected: ends)" in said
    assert "faults: good: 1 (expected: 1)" in said and said[-1].startswith("faults: whole in")


@pytest.mark.whole
def test_a_stage_that_cannot_begin_or_is_late_is_told(tmp_path: Path) -> None:
    # What one stage leaves of its time, the next may take.
    stages = Stage("unopened", 8), Stage("slow", 2)
    record, _ = made(tmp_path / "a.json", *stages, first=Stage("machine", 8))
    ended = {stage["name"]: stage["ended"] for stage in record["stages"]}
    assert ended["unopened"] == "ValueError: no room for the model"
    assert ended["slow"] == "cut off at its limit"
    slow = record["stages"][-1]
    assert slow["findings"][-1]["what"] == "hangs" and slow["log"] == "started\n"
    assert "unopened: ValueError: no room for the model" in failures(record)


def test_a_machine_that_is_refused_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"^NVIDIA L4 is in use$"):
        check_gpu(tmp_path / "a.json", print, [Stage("refuses", 60)])
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_a_pooled_stage_has_a_process_for_each_core_and_each_case_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A case that ends its process takes no other with it."""
    monkeypatch.setattr(run, "usable_cores", lambda: 3)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    record, _ = made(tmp_path / "a.json", Stage("pool", 120, is_pooled=True))
    found = record["stages"][1]["findings"]
    names = sorted(each["what"] for each in found if each["met"])
    assert names == [f"case {index}" for index in range(6)]
    assert [each["seen"] for each in found if not each["met"]] == ["killed by SIGSEGV"]
    processes = {each["seen"] for each in found if each["met"]}
    # On a busy machine one process may do the cases of another that has not begun.
    assert 1 <= len(processes) <= 4
    assert {each["numbers"]["threads"] for each in found if each["met"]} == {"1"}


@pytest.mark.skipif(sys.platform != "linux", reason="a parent's death is told on Linux alone")
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_a_stage_ends_with_the_command(sent: signal.Signals, tmp_path: Path) -> None:
    """A process that went on would hold the card; the folder of checkpoints may lie in memory."""
    command = f"""
import sys
from llmopt.bench.gpu_check import run
from llmopt.cli.main import main
run.COMMAND = {run.COMMAND!r}
run.check_gpu.__defaults__ = ((run.Stage("slow", 60),),)
main(["doctor", "--gpu"])
"""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    words = [sys.executable, "-c", command]
    parent = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        lines = wait_for(lambda: next(tmp_path.glob("llmopt-gpu-*/slow.0.jsonl"), None))
        child = wait_for(lambda: next(iter(children(parent.pid)), None))
        wait_for(lambda: "hangs" in lines.read_text())
    finally:
        parent.send_signal(sent)
        _, errors = parent.communicate(timeout=120)
    wait_for(lambda: has_ended(child))
    if sent == signal.SIGTERM:
        assert parent.returncode == 130 and "Traceback" not in errors
        assert not lines.parent.exists()


def children(parent: int) -> list[str]:
    return Path(f"/proc/{parent}/task/{parent}/children").read_text().split()


def has_ended(process: str) -> bool:
    """Whether a process runs no longer; where nobody waits for it, its entry stays."""
    try:
        return ") Z " in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return True


def wait_for(found: Callable[[], Any]) -> Any:
    while not (value := found()):
        time.sleep(0.02)
    return value


def test_a_record_tells_roofs_and_shares_of_the_whole_model_alone() -> None:
    record: Record = {"environment": {}, "roofs": {}, "shares": {}, "stages": []}
    case = {"model": "m", "weights": "bf16", "phase": "decode", "batch": 1, "context": 128}
    numbers = [
        {"environment": {"gpu": {"name": "NVIDIA L4"}}},
        {"phase": "bandwidth", "rate": 3e11},
        case | {"seconds": 2e-3, "share": 0.75},
        case | {"seconds": 4e-3, "share": 0.5, "batch": 32},
    ]
    rows = [{"what": "a", "expected": "", "seen": "", "met": None, "numbers": n} for n in numbers]
    add_stage(record, {"name": "x", "ended": WHOLE, "seconds": 1.0, "findings": rows})
    assert record["environment"]["gpu"]["name"] == "NVIDIA L4"
    assert record["roofs"] == {"bandwidth": 3e11}
    assert record["shares"] == {"bf16": {"decode": 0.75}}
