"""Series of paired starts in ABBA order, until the verdict is settled or the budget ends; resumable.

Pairs begin with base and new build in turns, so that steady drift favours neither. Leading passes of a start
are discarded until two agree. The result is `comparison.json`, `.html` and `.md`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from ...base.atomic_io import write_atomically
from ...base.errors import BadInput
from ...base.progress import Progress, Silent
from ..gate.compare import Comparison, judge_starts
from ..gate.limits import MEASURED, GateOutcome, Limit, Measured
from ..gate.measured import value_of_start
from ..page.page import Page
from ..record.result import RunData, has_result, plain, to_json
from ..report.comparison import comparison_page, verdict_of
from .start import (
    Crash,
    OutOfTime,
    Start,
    cpus_of_pair,
    has_option,
    parse_cpus,
    run_alone,
    run_in_turns,
)
from .starts_plan import Build, StartsPlan, check_options

AGREEMENT = 0.03
# At most this fraction of the passes is discarded.
MAX_DISCARDED = 0.5


def num_cold(passes: Sequence[Mapping[str, Any]]) -> int:
    """Leading passes to discard, at most half: those before two whose times differ by at most 3 %."""
    most = int(len(passes) * MAX_DISCARDED)
    for number in range(most):
        times = [
            load.get("cpu_seconds") or load["duration"] for load in passes[number : number + 2]
        ]
        if max(times) <= min(times) * (1 + AGREEMENT):
            return number
    return most


def warm(start: RunData) -> RunData:
    """The start without its cold passes, in its record and in its table of requests."""
    record = start.result["llmopt"]
    cold = 0 if "imported" in record else num_cold(record["runs"])
    if not cold:
        return start
    ours = {**record, "runs": record["runs"][cold:], "num_cold_passes": cold}
    table = start.requests
    if table is not None:
        kept = [row for row, number in enumerate(table["run"]) if number >= cold]
        table = {key: [column[row] for row in kept] for key, column in table.items()}
        table["run"] = [number - cold for number in table["run"]]
    return replace(start, result={**start.result, "llmopt": ours}, requests=table)


# The first pair also writes reports.
PACE_PAIR = 2
CRASH = "the crash of the new build"
URL_NOTE = (
    "a URL names a server that is already running, so only the client starts anew: effects of a start of the "
    "server (memory layout, clocks, compilation) are not seen"
)


@dataclass(slots=True)
class PairedSeries:
    """Starts in a folder, resumed; `run` judges. BadInput: an impossible plan, or a base that crashes."""

    plan: StartsPlan
    folder: Path
    progress: Progress = field(default_factory=Silent)
    base: list[RunData] = field(default_factory=list)
    new: list[RunData] = field(default_factory=list)
    comparison: Comparison = field(init=False)
    stopped_because: str = ""
    _is_current: bool = False

    def __post_init__(self) -> None:
        check_options((self.plan.base, self.plan.new), self.plan.options)
        _ = self.plan.gate(), self.plan.limits.quality
        if self.plan.pin_cpus not in ("auto", "none"):
            parse_cpus(self.plan.pin_cpus)

    def run(self) -> Self:
        """Run pairs until the verdict is settled, the budget ends, or the new build crashes."""
        budget = self.plan.budget
        deadline = time.monotonic() + 60 * budget.max_minutes
        self.progress.start("starts", 2 * budget.max_pairs, "starts")
        # The client of a server is this installation.
        builds = self.plan.base, self.plan.new
        self._is_current = self.plan.has_server or all(map(is_current, builds))
        try:
            for pair in range(1, budget.max_pairs + 1):
                self._run_pair(pair, deadline)
                comparison = self._judge(final=pair >= self.plan.max_pairs)
                self.progress.status(f"{comparison.outcome.value} so far")
                if comparison.settled:
                    reason = "the verdict is settled"
                    if comparison.outcome is GateOutcome.NO_VERDICT:
                        reason = f"--max-minutes {budget.max_minutes:g}"
                        if len(self.new) < self.plan.max_pairs:
                            reason = "more starts would not settle it"
                        elif len(self.new) >= budget.max_pairs:
                            reason = f"--max-starts {budget.max_starts:g}"
                    return self._finished(comparison, reason)
        except Crash as crash:
            return self._crashed(crash)
        except OutOfTime:
            if not self.new:
                raise BadInput(
                    f"no pair of starts was finished within --max-minutes {budget.max_minutes:g}: allow "
                    "more, or make the passes shorter"
                ) from None
        return self._finished(self._judge(final=True), f"--max-minutes {budget.max_minutes:g}")

    def _run_pair(self, pair: int, deadline: float) -> None:
        """Pair `pair`, from 1; both starts of it on the same CPUs."""
        builds = [self.plan.base, self.plan.new]
        order = builds if pair % 2 else builds[::-1]
        began = time.monotonic()
        missing = [build for build in order if not has_result(self._folder_of(build, pair))]
        if missing:
            self._run_missing(missing, pair, deadline)
        for build, starts in zip(builds, (self.base, self.new), strict=True):
            starts.append(warm(RunData.read(self._folder_of(build, pair))))
        self.progress.advance(2)
        now = time.monotonic()
        if self.plan.num_pairs is None and pair >= PACE_PAIR and len(missing) == len(builds):
            self.plan = self.plan.paced(now - began, deadline - now, pair)
            self.plan.write(self.folder)

    def _run_missing(self, builds: Sequence[Build], pair: int, deadline: float) -> None:
        """The starts of a pair that have no run yet, in turns if both are to be made."""
        plan = self.plan
        cpus = cpus_of_pair(plan.pin_cpus, plan.all_options, has_server=plan.has_server)
        starts = [self._start(build, pair) for build in builds]
        try:
            if plan.interleave and self._is_current and len(starts) > 1:
                run_in_turns(starts, cpus=cpus, deadline=deadline)
                return
            for start in starts:
                run_alone(start, cpus=cpus, deadline=deadline)
        except Crash as crash:
            if crash.name == plan.base.name:
                raise BadInput(
                    f"{plan.base.name} ({plan.base.spec}): {crash}: nothing can be compared with it"
                ) from None
            raise

    def _start(self, build: Build, number: int) -> Start:
        folder = self._folder_of(build, number)
        command = self.plan.command(build, number, folder, is_current=self._is_current)
        is_here = self.plan.has_server or not build.is_environment
        made = build.is_other_tool
        return Start(build.name, command, folder, inherit_sources=is_here, makes_folder=made)

    def _crashed(self, crash: Crash) -> Self:
        """The new build crashes where the base runs: that is a regression."""
        outcome, names = GateOutcome.REGRESSION, (self.plan.base.name, self.plan.new.name)
        judged = self._judge(final=True) if self.new else Comparison(outcome, (), *names, 0.0)
        reasons = (f"the new build crashes and the base does not: {crash}",)
        judged = replace(judged, outcome=outcome, reasons=reasons, decided_by=(CRASH,))
        return self._finished(judged, "the new build crashed")

    def _judge(self, *, final: bool) -> Comparison:
        gate = self.plan.gate(self.base[-1].result, self.new[-1].result)
        limits, notes = known_limits(gate, self.base, self.new)
        if self.plan.base.is_url:
            notes = (*notes, URL_NOTE)
        comparison = judge_starts(
            self.base,
            self.new,
            limits=limits,
            quality=self.plan.limits.quality,
            gate_speed=self.plan.limits.gate_speed,
            max_pairs=self.plan.max_pairs,
            final=final,
        )
        comparison = replace(comparison, notes=(*comparison.notes, *notes))
        if limits:
            return comparison
        reason = "no limit has a value in both builds"
        changed = {"outcome": GateOutcome.NO_VERDICT, "settled": True}
        return replace(comparison, reasons=(reason, *notes), decided_by=(reason,), **changed)

    def _finished(self, comparison: Comparison, reason: str) -> Self:
        self.comparison, self.stopped_because = comparison, reason
        return self

    def _folder_of(self, build: Build, number: int) -> Path:
        return self.folder / f"{number:03}-{build.name}"


def is_current(build: Build) -> bool:
    return has_option(build.command(()), "--no-report", inherit_sources=not build.is_environment)


def known_limits(
    limits: Sequence[Limit], base: Sequence[RunData], new: Sequence[RunData]
) -> tuple[tuple[Limit, ...], tuple[str, ...]]:
    """(limits that can be judged, a note for each metric without a value, by version or machine)."""
    kept: list[Limit] = []
    notes: list[str] = []
    for limit in limits:
        key = limit.quantity.key
        lacking = [
            start.name
            for start in (base[-1], new[-1])
            if isinstance(limit.quantity, Measured) and value_of_start(start, key) is None
        ]
        if lacking:
            notes.append(
                f"{limit.quantity.label} is not judged: no value in {' and '.join(lacking)} (an older "
                "version does not record it, or this machine does not)"
            )
        else:
            kept.append(limit)
    return tuple(kept), tuple(dict.fromkeys(notes))


SHOWN = ("duration", "cpu_seconds", "waiting_seconds", "output_throughput", "median_tpot_ms")


def write_comparison(finished: PairedSeries, folder: Path) -> tuple[dict[str, Any], Page]:
    """Write the files; returns the record and the page. Without a finished pair there is no page of two runs
    to show."""
    starts = {
        name: [{key: value_of_start(start, key) for key in SHOWN} for start in side]
        for name, side in (("base", finished.base), ("new", finished.new))
    }
    more = {"stopped_because": finished.stopped_because, "plan": asdict(finished.plan)}
    record = plain({**finished.comparison.as_dict(), **more, "starts": starts})
    write_atomically(folder / "comparison.json", to_json(record))
    page = starts_page(finished)
    page.write(folder / "comparison.html", folder / "comparison.md")
    return record, page


def starts_page(finished: PairedSeries) -> Page:
    """The comparison page of all starts, with a section on each of them."""
    if not finished.new:
        base, new = finished.plan.base, finished.plan.new
        title, builds = f"{new.name} against {base.name}", f"{base.spec} and {new.spec}"
        return Page(title, builds, verdict_of(finished.comparison))
    pairs = enumerate(zip(finished.base, finished.new, strict=True), 1)
    return comparison_page(
        pooled(finished.base),
        pooled(finished.new),
        finished.comparison,
        starts={
            "stopped_because": finished.stopped_because,
            "order": [(n, start) for n, pair in pairs for start in (pair if n % 2 else pair[::-1])],
            "shown": [MEASURED[key] for key in SHOWN],
            "value_of": value_of_start,
        },
    )


def pooled(starts: Sequence[RunData]) -> RunData:
    """Passes of all starts as one run, with medians over the starts; the rest is the first's."""
    first = starts[0]
    values = {key: [value_of_start(start, key) for start in starts] for key in MEASURED}
    medians = {
        key: float(np.median([value for value in sides if value is not None]))
        for key, sides in values.items()
        if key in first.result and key != "duration" and None not in sides
    }
    runs = [load for start in starts for load in start.result["llmopt"]["runs"]]
    ours = {**first.result["llmopt"], "runs": runs, "num_runs": len(runs)}
    tables = [start.requests for start in starts]
    requests: dict[str, list[Any]] | None = None
    if all(table is not None for table in tables):
        columns = first.requests or {}
        requests = {
            key: [cell for table in tables for cell in (table or {})[key]] for key in columns
        }
    return RunData({**first.result, **medians, "llmopt": ours}, requests)
