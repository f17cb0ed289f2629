"""Benchmark session: a warmed-up target, measured pass by pass, scored, then recorded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

from ...quant.base.atomic_io import interrupts_held
from ...quant.base.progress import Progress
from ..machine.machine_meter import MachineMeter
from ..metrics.run_statistics import distributions
from ..metrics.trace import LoadPass
from ..options.options import BenchOptions
from ..record.result import BenchRun
from ..record.run_record import MeasuredPass, Measurement, TargetFacts, build_run
from ..workloads.synthetic import warmup_workload
from ..workloads.workload import Workload
from .quality import ScoredQuality
from .run_progress import PASS, TASKS, WARM_UP, RunProgress
from .tasks import TaskBackend, TaskScores, TaskSet, run_tasks


class BenchSession(ABC):
    """Passes over one workload, and their record. A context manager.

    A subclass knows one kind of target: how to warm it up, measure a pass, score it, and state its facts.

    Several sessions may be open at once with interleaved passes (paired runs), so that drift of the machine
    affects all alike. They share the id `paired_runs`, and their results are compared pass by pass.

    Attributes:
        name: of the target in the record and its reports.
        workload: of every pass.
    """

    def __init__(
        self,
        options: BenchOptions,
        name: str,
        workload: Workload,
        machine: MachineMeter,
        progress: Progress | None,
        paired_runs: str | None,
        tasks: TaskSet | None = None,
    ) -> None:
        self._options = options
        self.name = name
        self.workload = workload
        self._machine = machine
        self._progress = RunProgress.of(progress, options)
        self._paired_runs = paired_runs
        self._passes: list[MeasuredPass] = []
        self._rejected: list[MeasuredPass] = []
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
        """The completed passes."""
        return [measured.load for measured in self._passes]

    @property
    def hit_rates(self) -> Sequence[float | None]:
        """Prefix-cache hit rate (fraction of prompt tokens) per pass; None where unknown."""
        return [measured.prefix_cache_hit_rate for measured in self._passes]

    def say_model(self) -> None:  # noqa: B027 - of a server nothing is known
        """Print the model's facts."""

    def say_notes(self) -> None:
        """Print notes on the workload."""
        for note in self.workload.notes:
            self._progress.note(f"{self.workload.name}: {note}")

    def run_pass(self) -> bool:
        """Run a pass over the workload; False when it was interrupted.

        A pass that was disturbed by its own evidence is rejected and measured again, up to
        `max_redone_passes` times in the session.
        """
        number = len(self._passes) + 1
        description = f"{self.name}, pass {number} of {self._options.num_runs}"
        while True:
            self._progress.begin(PASS, description)
            measured = self._measure(number + len(self._rejected), description)
            self._progress.end()
            spent = len(self._rejected) >= self._options.max_redone_passes
            if spent or not measured.disturbed or measured.load.interrupted:
                break
            self._rejected.append(measured)
        self._passes.append(measured)
        return not measured.load.interrupted

    def finish(self, *, interrupted: bool = False) -> BenchRun:
        """Score quality and tasks, and build the run with its record. Needs one pass.

        After an interrupt (of a pass, of scoring, or elsewhere: `interrupted`) unfinished scores are left out
        and the record is marked.
        """
        interrupted = interrupted or any(load.interrupted for load in self.passes)
        self._progress.end()
        if not interrupted:
            try:
                self._score()
                self._progress.end()
            except KeyboardInterrupt:
                interrupted = True
        with interrupts_held():
            measured = Measurement(
                options=self._options,
                name=self.name,
                paired_runs=self._paired_runs,
                workload=self.workload,
                passes=self._passes,
                rejected=self._rejected,
                metrics=distributions(self.passes, self._options.seed),
                machine=self._machine,
                interrupted=interrupted,
            )
            run = build_run(measured, self._facts(measured), self._quality.series)
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
    def _facts(self, measured: Measurement) -> TargetFacts:
        """The facts about the target, with its scores."""

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
