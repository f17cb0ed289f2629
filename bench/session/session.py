"""Benchmark session: a warmed-up target, measured pass by pass, scored, then recorded; with its progress.

Stages share one bar, by the mean time of those before of the kind, at first a guess: it falls where a stage
takes longer.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Self

from ...base.atomic_io import interrupts_held
from ...base.progress import SHARE, Progress, Silent
from ..metrics.run_statistics import distributions
from ..metrics.trace import LoadPass
from ..options.options import BenchOptions
from ..record.result import BenchRun
from ..record.run_record import MeasuredPass, Measurement, build_run
from ..workloads.synthetic import warmup_workload
from ..workloads.workload import Workload
from .quality import ScoredQuality
from .tasks import TaskBackend, TaskScores, TaskSet, run_tasks

LOAD, WARM_UP, PASS, QUALITY = "load", "warm-up", "pass", "quality"
TASKS, REPORT = "tasks", "report"
# Seconds where nothing is known, such that the first pass counts most.
_GUESSES = {LOAD: 5.0, WARM_UP: 2.0, PASS: 30.0, QUALITY: 15.0, TASKS: 60.0, REPORT: 10.0}
_OVERDUE = 0.25  # of the time so far is left of a stage that takes longer than expected
_PARTS = 1000


class RunProgress:
    """A `Progress` for each stage's own units, shown as one for the run. `stages` counts each kind."""

    def __init__(
        self,
        progress: Progress,
        description: str,
        stages: Counter[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress, self._clock = progress, clock
        self._left = Counter(stages)
        self._expected = dict(_GUESSES)
        self._measured: Counter[str] = Counter()
        self._stage: str | None = None
        self._total = self._shown = 0
        self._done = 0.0
        self._unit = self._what = ""
        self._began = self._stage_began = clock()
        self.note = progress.note
        progress.start(description, _PARTS, SHARE)

    @classmethod
    def of(cls, progress: Progress | None, options: BenchOptions, sessions: int = 1) -> RunProgress:
        """The progress itself if it is a run's already, else a new one for the stages of `options`."""
        if isinstance(progress, cls):
            return progress
        stages = Counter({LOAD: 1, WARM_UP: int(options.warmups > 0), PASS: options.num_runs})
        stages += Counter({QUALITY: int(options.quality), TASKS: int(bool(options.task_names))})
        stages += Counter({REPORT: int(options.report)})
        every = Counter({kind: count * sessions for kind, count in stages.items()})
        return cls(progress or Silent(), "bench", every)

    def begin(self, stage: str, what: str) -> None:
        self.end()
        self._left[stage] = max(0, self._left[stage] - 1)
        self._stage, self._stage_began = stage, self._clock()
        self.start(what, 0, "")

    def end(self) -> None:
        if self._stage is None:
            return
        seconds, count = self._clock() - self._stage_began, self._measured[self._stage]
        known = self._expected[self._stage] * count
        self._expected[self._stage] = (known + seconds) / (count + 1)
        self._measured[self._stage] += 1
        self._stage = None
        self._total = self._done = 0
        self._show()

    def expect(self, stage: str, seconds: float) -> None:
        if not self._measured[stage]:
            self._expected[stage] = seconds

    @property
    def seconds_left(self) -> float:
        after = sum(count * self._expected[stage] for stage, count in self._left.items())
        if self._stage is None:
            return after
        passed = self._clock() - self._stage_began
        if self._done and self._total:
            return after + passed * (self._total - self._done) / self._done
        return after + max(self._expected[self._stage] - passed, _OVERDUE * passed)

    def start(self, description: str, total: int, unit: str) -> None:
        self._what, self._total, self._unit, self._done = description, total, unit, 0
        self._show()

    def advance(self, count: float = 1) -> None:
        self._done += count
        if self._stage is not None and self._done and self._total:
            passed = self._clock() - self._stage_began
            self.expect(self._stage, passed * self._total / self._done)
        self._show()

    def status(self, text: str) -> None:
        self._progress.status(f"{self._what}, {text}")

    def finish(self) -> None:
        """No stage's end: what follows of it counts no units."""

    def _show(self) -> None:
        passed, left = self._clock() - self._began, self.seconds_left
        share = int(_PARTS * passed / max(passed + left, 1e-9))
        added, self._shown = share - self._shown, share
        counted = f", {self._done:.0f}/{self._total} {self._unit}" if self._total else ""
        self._progress.status(f"{self._what}{counted}")
        self._progress.advance(added)


class BenchSession(ABC):
    """Passes over one workload, and their record. A context manager; a subclass knows one kind of target.
    Several sessions may be open at once with interleaved passes (paired runs), so that drift of the machine
    affects all alike. They share the id `paired_runs`, and their results are compared pass by pass."""

    def __init__(
        self,
        measured: Measurement,
        progress: Progress | None,
        tasks: TaskSet | None = None,
    ) -> None:
        self.measured, self._options = measured, measured.options
        self.name, self.workload = measured.name, measured.workload
        self._progress = RunProgress.of(progress, self._options)
        self._quality = ScoredQuality()
        self._tasks = tasks
        self._task_scores: TaskScores | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:  # noqa: B027 - sessions without resources do nothing
        """Release the session's resources."""

    @property
    def passes(self) -> Sequence[LoadPass]:
        return self.measured.loads

    def say_model(self) -> None:  # noqa: B027 - of a server nothing is known
        """Print the model's facts."""

    def say_notes(self) -> None:
        for note in self.workload.notes:
            self._progress.note(f"{self.workload.name}: {note}")

    def run_pass(self) -> bool:
        """Run a pass; False: interrupted. Disturbed passes are redone, to `max_redone_passes` in all."""
        passes, rejected = self.measured.passes, self.measured.rejected
        number = len(passes) + 1
        description = f"{self.name}, pass {number} of {self._options.num_runs}"
        while True:
            self._progress.begin(PASS, description)
            measured = self._measure(number + len(rejected), description)
            self._progress.end()
            spent = len(rejected) >= self._options.max_redone_passes
            if spent or not measured.disturbed or measured.load.interrupted:
                break
            rejected.append(measured)
        passes.append(measured)
        return not measured.load.interrupted

    def finish(self, *, interrupted: bool = False) -> BenchRun:
        """Score quality and tasks, and build the run; after an interrupt it is marked, without those."""
        interrupted = interrupted or any(load.interrupted for load in self.passes)
        self._progress.end()
        if not interrupted:
            try:
                self._score()
                self._progress.end()
            except KeyboardInterrupt:
                interrupted = True
        with interrupts_held():
            self.measured.metrics = distributions(self.passes, self._options.seed)
            self.measured.interrupted = interrupted
            run = build_run(self.measured, self._facts(), self._quality.series)
        run.items = None if self._task_scores is None else self._task_scores.items
        return run

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """The run's identity, as far as the session knows it."""

    @abstractmethod
    def _measure(self, number: int, description: str) -> MeasuredPass:
        """The `number`-th pass that is measured, from 1, rejected ones included."""

    @abstractmethod
    def _score(self) -> None:
        """Score what was asked for, one by one, so that an interrupt keeps the finished scores."""

    @abstractmethod
    def _facts(self) -> dict[str, Any]:
        """The parts of the record that only this kind of target has, with its scores."""

    def _score_tasks(self, backend: Callable[[], TaskBackend]) -> None:
        if self._tasks is not None:
            self._progress.begin(TASKS, "tasks")
            self._task_scores = run_tasks(self._tasks, backend(), self._options)

    @property
    def _task_record(self) -> dict[str, Any] | None:
        return None if self._task_scores is None else self._task_scores.record

    def _warm_up(
        self, count: int, tokenizer: Any, drive: Callable[[Workload, str], LoadPass]
    ) -> None:
        """Send `count` requests like those of the workload, which are not recorded."""
        self._progress.begin(WARM_UP, f"{self.name}, warm-up")
        warmup = warmup_workload(self.workload, count, tokenizer, seed=self._options.seed)
        if warmup is not None and drive(warmup, f"{self.name}, warm-up").interrupted:
            raise KeyboardInterrupt
