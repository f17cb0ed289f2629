"""Base class of benchmark sessions: a warmed-up target, measured pass by pass, then recorded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

from ...quant.base.progress import Progress, Silent
from ..machine.machine_meter import MachineMeter
from ..metrics.run_statistics import distributions
from ..metrics.trace import LoadPass
from ..options.options import BenchOptions
from ..record.result import BenchRun
from ..record.run_record import MeasuredPass, Measurement
from ..workloads.workload import Workload


class BenchSession(ABC):
    """Passes over one workload, and their record. A context manager.

    Several sessions may be open at once with interleaved passes (paired runs), so that drift of the machine
    affects all alike. They share the id `paired_runs`, and their results are compared pass by pass.
    """

    def __init__(
        self,
        options: BenchOptions,
        name: str,
        workload: Workload,
        machine: MachineMeter,
        progress: Progress | None,
        paired_runs: str | None,
    ) -> None:
        self._options = options
        self._name = name
        self._workload = workload
        self._machine = machine
        self._progress = progress or Silent()
        self._paired_runs = paired_runs
        self._passes: list[MeasuredPass] = []
        self._rejected: list[MeasuredPass] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:  # noqa: B027 - sessions without resources do nothing
        """Release the session's resources."""

    @property
    def name(self) -> str:
        """The name of the target in the record and its reports."""
        return self._name

    @property
    def workload(self) -> Workload:
        """The workload of every pass."""
        return self._workload

    @property
    def passes(self) -> Sequence[LoadPass]:
        """The completed passes."""
        return [measured.load for measured in self._passes]

    @property
    def hit_rates(self) -> Sequence[float | None]:
        """Prefix-cache hit rate (fraction of prompt tokens) per pass; None where unknown."""
        return [measured.prefix_cache_hit_rate for measured in self._passes]

    @property
    def has_passes(self) -> bool:
        """Whether there is at least one pass to record."""
        return bool(self._passes)

    def say_notes(self) -> None:
        """Print notes on the workload."""
        for note in self._workload.notes:
            self._progress.note(f"{self._workload.name}: {note}")

    def run_pass(self) -> bool:
        """Run a pass over the workload; False when it was interrupted.

        A pass that was disturbed by its own evidence is rejected and measured again, up to
        `max_redone_passes` times in the session.
        """
        number = len(self._passes) + 1
        description = f"{self.name}, pass {number} of {self._options.num_runs}"
        while True:
            measured = self._measure(number + len(self._rejected), description)
            spent = len(self._rejected) >= self._options.max_redone_passes
            if spent or not measured.disturbed or measured.load.interrupted:
                break
            self._rejected.append(measured)
        self._passes.append(measured)
        return not measured.load.interrupted

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """The run's identity, as far as the session knows it."""

    @abstractmethod
    def finish(self, *, interrupted: bool = False) -> BenchRun:
        """Build the run with its record. Needs one pass.

        `interrupted` reports an interrupt outside the passes.
        """

    @abstractmethod
    def _measure(self, number: int, description: str) -> MeasuredPass:
        """The `number`-th pass that is measured, from 1, rejected ones included."""

    def _was_interrupted(self) -> bool:
        return any(load.interrupted for load in self.passes)

    def _measurement(self, *, interrupted: bool) -> Measurement:
        return Measurement(
            options=self._options,
            name=self._name,
            paired_runs=self._paired_runs,
            workload=self._workload,
            passes=self._passes,
            rejected=self._rejected,
            metrics=distributions(self.passes, self._options.seed),
            machine=self._machine,
            interrupted=interrupted or self._was_interrupted(),
        )
