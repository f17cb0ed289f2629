"""Processes whose passes take turns."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from llmopt.base.errors import BadInput
from llmopt.bench.session.run_sessions import PassTurns, TurnPipe, give_turns

# A benchmark in small: as many passes as it is told, then what `finish` does. Needs nothing of torch.
CHILD = """
import os, sys
log, name, passes = sys.argv[1:]
read, write, _ = os.environ["LLMOPT_PASS_TURNS"].split(",")
def wait():
    os.write(int(write), b"r")
    os.read(int(read), 1)
for _ in range(int(passes)):
    wait()
    open(log, "a").write(name)
wait()
open(log, "a").write(name.lower())
"""


def start_in_turns(command: Sequence[str], turn: TurnPipe) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        command, env={**os.environ, **turn.environment}, pass_fds=turn.descriptors
    )
    turn.started()
    return process


@pytest.mark.parametrize(
    ("passes", "order"), [((3, 3), "ABBAABba"), ((2, 4), "ABBAaBBb"), ((0, 1), "aBb")]
)
def test_turns_go_there_and_back(tmp_path: Path, passes: tuple[int, int], order: str) -> None:
    log = tmp_path / "log"
    turns = [TurnPipe("pair"), TurnPipe("pair")]
    processes = []
    for turn, name, count in zip(turns, "AB", passes, strict=True):
        command = [sys.executable, "-c", CHILD, str(log), name, str(count)]
        processes.append(start_in_turns(command, turn))
    assert all(turn.ready() for turn in turns)
    give_turns(turns)
    assert [process.wait(120) for process in processes] == [0, 0]
    assert log.read_text() == order


def test_a_process_that_takes_no_turns_is_not_waited_for() -> None:
    turn = TurnPipe("pair")
    process = start_in_turns([sys.executable, "-c", "pass"], turn)
    assert not turn.ready() and process.wait(120) == 0
    assert not turn.give()


def test_a_process_goes_on_alone_when_nobody_gives_turns() -> None:
    turn = TurnPipe("pair")
    side = PassTurns.from_environment({"LLMOPT_PASS_TURNS": turn.environment["LLMOPT_PASS_TURNS"]})
    assert (side.read, side.write, side.pair) == (*turn.descriptors, "pair")
    turn.close()
    side.wait()
    PassTurns().wait()
    with pytest.raises(BadInput, match="read,write,pair"):
        PassTurns.from_environment({"LLMOPT_PASS_TURNS": "3"})
