"""A contact's processes: what raises, hangs or crashes is a row, and the same command goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llmopt.bench.contact import run
from llmopt.bench.contact.record import (
    STAGES,
    VLLM,
    WHOLE,
    Finding,
    Record,
    Stage,
    failures,
    new_record,
    page,
    summarize,
)
from llmopt.bench.contact.run import ContactRequest, contact
from llmopt.quant.base.errors import BadInput

SCRIPT = """
import os, sys, time
from pathlib import Path
from llmopt.bench.contact.record import Finding
from llmopt.bench.contact.run import Case, Refused, lines_of, run_cases

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
    raise Refused("NVIDIA L4 is in use")
    yield

cases = {
    "machine": lambda: [Case("good", good)],
    "faults": lambda: [Case("raises", raises), Case("hangs", hangs, 0.5), Case("crashes", crashes),
                       Case("loses", loses), Case("wrong", wrong), Case("good", good)],
    "unopened": unopened,
    "slow": lambda: [Case("good", good), Case("hangs", hangs)],
    "refuses": refuses,
}
stage, folder = sys.argv[1], Path(sys.argv[2])
print("started", flush=True)
environment = {"gpu": {"name": os.environ.get("CARD", "NVIDIA L4")}, "gpus": 1, "commit": "abc"}
sys.exit(run_cases(cases[stage](), lines_of(folder, stage), answers, lambda: environment))
"""
MACHINE, FAULTS = Stage("machine", 60), Stage("faults", 120)


@pytest.fixture(autouse=True)
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages of a script in place of a card's."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(run, "COMMAND", (sys.executable, str(script)))


def made(
    out: Path, *stages: Stage, first: Stage = MACHINE, **given: Any
) -> tuple[Record, list[str]]:
    said: list[str] = []
    path, record = contact(ContactRequest(output=out, **given), said.append, (first, *stages))
    assert path == out and json.loads(out.read_text()) == record
    assert out.with_suffix(".md").read_text() == page(record)
    return record, said


def test_the_stages_of_one_card_end_within_nine_minutes() -> None:
    """And the first result is there within one."""
    assert sum(stage.seconds for stage in STAGES if stage.cards < 2) <= 540
    assert STAGES[0].seconds <= 60


def test_what_raises_hangs_or_crashes_is_a_row_and_the_others_go_on(tmp_path: Path) -> None:
    record, said = made(tmp_path / "a.json", FAULTS)
    assert [stage["ended"] for stage in record["stages"]] == [WHOLE] * 2
    found = record["stages"][1]["findings"]
    assert [(each["what"], each["seen"], each["met"]) for each in found] == [
        ("before it raised", "1", True),
        ("raises", "RuntimeError: CUDA error", False),
        ("hangs", "hung: no end after 0 s", False),
        ("crashes", "killed by SIGSEGV", False),
        ("the last of a card", "1", True),
        ("wrong", "2", False),
        ("good", "1", True),
    ]
    assert len(failures(record)) == 4
    assert said[-1].endswith(", 4 expectations failed")
    text = page(record)
    assert text.startswith("# First contact: NVIDIA L4") and "4 of 8 expectations hold" in text
    failed = text[text.index("## Expectations that failed") : text.index("## machine")]
    assert "| faults | crashes | ends | killed by SIGSEGV |" in failed and "good" not in failed


@pytest.mark.whole
def test_a_stage_that_cannot_begin_or_is_late_says_after_what(tmp_path: Path) -> None:
    # What one stage leaves of its time, the next may take.
    stages = Stage("unopened", 8), Stage("slow", 2)
    record, _ = made(tmp_path / "a.json", *stages, first=Stage("machine", 8))
    ended = {stage["name"]: stage["ended"] for stage in record["stages"]}
    assert ended["unopened"] == "failed: ValueError: no room for the model, after good"
    assert ended["slow"].startswith("cut off after")
    slow = record["stages"][-1]
    assert slow["findings"][-1]["what"] == "hangs" and slow["log"] == "started\n"
    assert "* unopened: failed: ValueError: no room" in page(record)


def test_the_same_command_goes_on_where_it_was_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished stage is not repeated, one that did not end is; and nothing is mixed."""
    out, second = tmp_path / "a.json", Stage("unopened", 60)
    made(out, FAULTS, second)
    before = json.loads(out.read_text())
    _, said = made(out, FAULTS, second)
    assert said[1] == "faults: whole, of the run before" and said[2].startswith("unopened: failed")
    assert json.loads(out.read_text())["stages"][1] == before["stages"][1]
    _, said = made(out, FAULTS, stages=("faults",), again=True)
    assert said[1].startswith("faults: whole in")
    with pytest.raises(BadInput, match="differs in sizes: --again begins anew"):
        made(out, FAULTS, small=True)
    monkeypatch.setenv("CARD", "NVIDIA L40S")
    with pytest.raises(BadInput, match="differs in gpu"):
        made(out, FAULTS)
    out.write_text("{}")
    monkeypatch.setattr(run, "COMMAND", ("no stage is run before that",))
    for again in (False, True):
        with pytest.raises(BadInput, match="is no record of llmopt contact"):
            made(out, FAULTS, again=again)
    assert out.read_text() == "{}"


def test_what_a_machine_lacks_is_left_out_and_told(tmp_path: Path) -> None:
    lacking = Stage("vllm", 60, package="no_such_package"), Stage("two-cards", 60, cards=2)
    record, _ = made(tmp_path / "a.json", *lacking)
    seen = [stage["findings"][0]["seen"] for stage in record["stages"][1:]]
    assert seen[0] == "left out: no_such_package is not installed here"
    assert seen[1] == "left out: it needs 2 cards, and the machine has 1"
    assert not failures(record)


def test_a_machine_that_is_refused_and_an_unknown_stage_are_one_line(tmp_path: Path) -> None:
    request = ContactRequest(output=tmp_path / "a.json")
    with pytest.raises(BadInput, match="NVIDIA L4 is in use"):
        contact(request, print, (Stage("refuses", 60),))
    with pytest.raises(BadInput, match="--stages all: choose of machine, kernels, graphs"):
        contact(ContactRequest(stages=("all",)), print)
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


@pytest.mark.skipif(sys.platform != "linux", reason="a parent's death is told on Linux alone")
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_a_stage_ends_with_the_command(
    sent: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that went on would hold the card; the folder of checkpoints may lie in memory."""
    command = f"""
import sys
from llmopt.bench.contact import run
run.COMMAND, run.STAGES = {run.COMMAND!r}, (run.Stage("slow", 60),)
run.roomy = lambda: {str(tmp_path)!r}
sys.exit(run.main())
"""
    words = [sys.executable, "-c", command, "-o", str(tmp_path / "a.json")]
    parent = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        lines = wait_for(lambda: next(tmp_path.glob("llmopt-contact-*/slow.jsonl"), None))
        child = wait_for(lambda: next(iter(children(parent.pid)), None))
        wait_for(lambda: "hangs" in lines.read_text())
    finally:
        parent.send_signal(sent)
        _, said = parent.communicate(timeout=30)
    wait_for(lambda: has_ended(child))
    if sent == signal.SIGTERM:
        assert (parent.returncode, said) == (130, "interrupted: the same command goes on\n")
        assert not lines.parent.exists()
        return
    assert lines.parent.exists()
    monkeypatch.setattr(run, "roomy", lambda: str(tmp_path))
    monkeypatch.setattr(run, "MEMORY", str(tmp_path))
    monkeypatch.setattr(run.tempfile, "tempdir", str(tmp_path))
    with run.work_folder() as other:
        assert not lines.parent.exists(), "the next run removes it"
        with run.work_folder():
            assert other.exists(), "one that is at work is left alone"


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


def test_a_record_tells_shares_and_sets_our_times_beside_those_of_vllm() -> None:
    record = new_record({"gpu": {"name": "NVIDIA L4"}}, "2026-11-26", small=False)
    case = {"model": "m", "weights": "bf16", "phase": "decode", "batch": 1, "context": 128}
    numbers = [
        {"phase": "bandwidth", "rate": 3e11},
        case | {"engine": "llmopt", "seconds": 2e-3, "share": 0.75},
        case | {"engine": "llmopt", "seconds": 4e-3, "share": 0.5, "batch": 32},
        case | {"engine": VLLM, "seconds": 3e-3},
    ]
    rows = [{"what": "a", "expected": "", "seen": "", "met": None, "numbers": n} for n in numbers]
    record["stages"] = [{"name": "x", "ended": WHOLE, "seconds": 1.0, "findings": rows}]
    summarize(record)
    assert record["roofs"] == {"bandwidth": 3e11}
    assert record["shares"] == {"bf16": {"decode": 0.75}}
    assert "| m in bf16, decode, batch 1 at 128 tokens | 3.00 ms | 2.00 ms | 1.50 × |" in page(
        record
    )


def test_a_finding_without_a_verdict_says_so() -> None:
    record = new_record({}, "2026-11-26", small=True)
    untold = Finding("tokens", "the same", "others")
    row = {name: getattr(untold, name) for name in ("what", "expected", "seen", "met", "numbers")}
    record["stages"] = [{"name": "x", "ended": WHOLE, "seconds": 1.0, "findings": [row]}]
    assert "| tokens | the same | others (no verdict) |" in page(record)
