"""A benchmark session: a target that is open and warmed up, measured pass by pass, then recorded."""

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


class Session(ABC):
    """What every session does: passes over one workload, and a record of them. A context manager.

    Several sessions may be open at once and take turns, so that what the machine does meanwhile hits all
    of them alike. `paired_runs` is then the same text in each: their results are compared pass by pass.
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:  # noqa: B027 - what has nothing to end does nothing
        """End what the session has started."""

    @property
    def name(self) -> str:
        """How the record and its reports call what is measured."""
        return self._name

    @property
    def workload(self) -> Workload:
        """What every pass sends."""
        return self._workload

    @property
    def passes(self) -> Sequence[LoadPass]:
        """The passes so far."""
        return [measured.load for measured in self._passes]

    @property
    def hit_rates(self) -> Sequence[float | None]:
        """Of each pass, the share of prompt tokens that the prefix cache gave; None where it is unknown."""
        return [measured.prefix_cache_hit_rate for measured in self._passes]

    @property
    def has_passes(self) -> bool:
        """Whether there is anything to finish."""
        return bool(self._passes)

    def say_notes(self) -> None:
        """Tell the person what to know about the workload."""
        for note in self._workload.notes:
            self._progress.note(f"{self._workload.name}: {note}")

    def run_pass(self) -> bool:
        """One more pass over the workload; False when it was interrupted."""
        number = len(self._passes) + 1
        self._passes.append(
            self._measure(number, f"{self.name}, pass {number} of {self._options.num_runs}")
        )
        return not self._passes[-1].load.interrupted

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What is measured and how, as far as the session knows."""

    @abstractmethod
    def finish(self, *, interrupted: bool = False) -> BenchRun:
        """The run with its record. Needs one pass.

        `interrupted` tells of an interrupt elsewhere; one of a pass is known.
        """

    @abstractmethod
    def _measure(self, number: int, description: str) -> MeasuredPass:
        """Pass `number`, from 1."""

    def _was_interrupted(self) -> bool:
        return any(load.interrupted for load in self.passes)

    def _measurement(self, *, interrupted: bool) -> Measurement:
        return Measurement(
            options=self._options,
            name=self._name,
            paired_runs=self._paired_runs,
            workload=self._workload,
            passes=self._passes,
            metrics=distributions(self.passes, self._options.seed),
            machine=self._machine,
            interrupted=interrupted or self._was_interrupted(),
        )
