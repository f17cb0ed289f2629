"""The progress of a whole run: one share, corrected by what is measured, and lines where nothing advances."""

from __future__ import annotations

import os
import time
from collections import Counter
from types import SimpleNamespace

import pytest
from llmopt.base.progress import SHARE, Silent, in_words
from llmopt.bench.machine.machine_meter import CpuTimes
from llmopt.bench.options.options import BenchOptions
from llmopt.bench.session.run_sessions import run_bench
from llmopt.bench.session.session import LOAD, PASS, QUALITY, REPORT, RunProgress
from llmopt.cli.output import console
from llmopt.cli.output.console import TerminalProgress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Shown(Silent):
    """The tasks that were begun, their totals, and the shares and texts shown."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int, str]] = []
        self.share = 0.0
        self.texts: list[str] = []

    def start(self, description: str, total: int, unit: str) -> None:
        self.begun.append((description, total, unit))

    def advance(self, count: float = 1) -> None:
        self.share += count

    def status(self, text: str) -> None:
        self.texts.append(text)


def test_what_is_left_follows_from_what_was_measured() -> None:
    clock, shown = Clock(), Shown()
    run = RunProgress(shown, "bench", Counter({LOAD: 1, PASS: 3, QUALITY: 1}), clock)
    run.begin(LOAD, "loading")
    clock.now = 10.0
    run.begin(PASS, "pass 1 of 3")
    run.start("pass 1 of 3", 100, "requests")
    clock.now = 20.0
    run.advance(25)  # 10 s for a quarter
    run.expect(QUALITY, 60.0)
    assert run.seconds_left == pytest.approx(30 + 2 * 40 + 60)
    run.advance(0)
    assert shown.texts[-1] == "pass 1 of 3, 25/100 requests"
    clock.now = 60.0
    run.advance(75)
    run.end()
    assert run.seconds_left == pytest.approx(2 * 50 + 60)
    run.begin(PASS, "pass 2 of 3")
    clock.now = 90.0
    run.end()
    assert run.seconds_left == pytest.approx(40 + 60)  # the mean of 50 and 30
    run.begin(PASS, "pass 3 of 3")
    clock.now = 130.0
    run.begin(QUALITY, "quality")
    assert run.seconds_left == pytest.approx(60)
    clock.now = 200.0  # longer than expected
    run.start("quality", 100, "tokens")
    assert run.seconds_left == pytest.approx(70 / 4) and shown.share < 1000
    run.advance(10)  # 70 s for a tenth
    assert run.seconds_left == pytest.approx(9 * 70) and shown.share == 1000 * 200 // 830
    run.end()
    assert shown.share == 1000
    assert shown.begun == [("bench", 1000, SHARE)]


def test_a_run_has_one_progress_and_names_its_stages() -> None:
    shown = Shown()
    options = BenchOptions(model="stories260K", num_prompts=4, output_len=4, num_runs=2)
    run_bench(options, shown)
    assert shown.begun == [("bench", 1000, SHARE)]
    assert shown.share == 1000
    said = "\n".join(shown.texts)
    for stage in ("loading stories260K", "pass 1 of 2", "pass 2 of 2"):
        assert stage in said
    assert RunProgress.of(None, options.model_copy(update={"report": True})).seconds_left > 0
    assert REPORT != LOAD


def test_a_line_comes_where_nothing_advances(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TerminalProgress, "SILENT_SECONDS", 0.01)
    with TerminalProgress() as progress:
        progress.start("bench", 1000, SHARE)
        progress.status("loading tiny")
        deadline, said = time.monotonic() + 30, ""
        while "loading tiny" not in said:
            assert time.monotonic() < deadline
            time.sleep(0.01)
            said += capsys.readouterr().err
        assert "\nbench: 0 %, loading tiny\n" in f"\n{said}"
    time.sleep(0.05)
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().err == ""  # it is over


@pytest.mark.parametrize(
    ("busy", "words"),
    [
        (200.0, "about 3 min left at this pace: other programs take 75% of the processors\n"),
        (60.0, "about 3 min left\n"),
    ],
)
def test_an_estimate_names_what_other_programs_take(
    busy: float, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 100 seconds of two processors this process took 50."""
    times = [CpuTimes(0.0, 1000.0, 0.0), CpuTimes(100.0, 1000.0 + busy, 50.0)]
    clock = Clock()
    monkeypatch.setattr(CpuTimes, "now", lambda: times[0] if len(times) == 1 else times.pop(0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=clock))
    progress = TerminalProgress(names_load=True)
    progress.start("quantizing", 30, "layers")
    clock.now = 100.0
    progress.advance(10)
    assert words in capsys.readouterr().err
    progress.finish()


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(3.4, "3 s"), (99, "99 s"), (1500, "25 min"), (61_472, "17 h"), (400_000, "5 days")],
)
def test_times_are_said_as_people_say_them(seconds: float, words: str) -> None:
    assert in_words(seconds) == words
