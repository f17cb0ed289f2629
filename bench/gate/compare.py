"""Regression verdict of two runs: pass, regression, or no verdict, each with its reasons.

A pass is non-inferiority: the upper bound of the worsening is within the limit. A regression is worse than
the limit: the lower bound is beyond it. Everything else, and runs that did not do the same work on the same
machine, is no verdict, never a pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ...quant.base.errors import BadInput
from ..record.comparable import (
    clock_change,
    incomparable,
    served_weight_bytes,
    server_changes,
    unknown_facts,
    widened_notes,
)
from ..record.result import RunData, plain
from .counts import Check, check, failure_words, length_change, mean_value, relative_change
from .judge import BUSY, Delta, background_error, is_paired, judge, other_load
from .limits import (
    COUNTED,
    Counted,
    Limit,
    Measured,
    Outcome,
    Scored,
    TaskScored,
    speed_limits,
    with_waiting,
)
from .quality_checks import QualityGate, check_quality, quality_changes
from .sequential import FALSE_PASS, OperatingCurve
from .task_checks import TaskChange, check_task, task_changes
from .unjudgeable import unjudgeable
from .verdict_words import overall_words

LENGTH_TOLERANCE = 0.10
MIN_REQUESTS = 8
# Above this share of failed requests the speeds are those of the survivors.
MOST_FAILED = 0.01

INFORMATIVE_KEYS = {"model": "model", "quantization": "quantization", "dtype": "dtype"}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The verdict, with the deltas, checks, quality and memory it is based on.

    Attributes:
        unknown: clauses on what of the hardware could not be compared.
        num_pairs: pairs of starts behind it; 0 for two runs.
        settled: whether more pairs of starts could not change the verdict.
        curves: the operating curve of each measured limit, for paired starts.
    """

    outcome: Outcome
    reasons: tuple[str, ...]
    base: str
    new: str
    threshold: float
    deltas: tuple[Delta, ...] = ()
    checks: tuple[Check, ...] = ()
    quality: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    num_pairs: int = 0
    settled: bool = True
    curves: tuple[OperatingCurve, ...] = ()
    unknown: tuple[str, ...] = ()
    tasks: tuple[TaskChange, ...] = ()

    @property
    def sentence(self) -> str:
        """The reasons, and what of the hardware could not be compared."""
        return "; ".join((*self.reasons, *self.unknown))

    def as_dict(self) -> dict[str, Any]:
        return plain({**asdict(self), "exit_code": self.outcome.exit_code})


def compare(
    base: RunData,
    new: RunData,
    *,
    threshold: float = 0.05,
    limits: Sequence[Limit] = (),
    gate: QualityGate | None = None,
) -> Comparison:
    """Judge the single run `new` against `base` by `limits`; by default, by four speed metrics, none of which
    may get worse by `threshold` (0.05: 5 %)."""
    same = base.result["llmopt"]["run_id"] == new.result["llmopt"]["run_id"]
    notes = remarks(base.result, new.result)
    unknown = unknown_facts(base.result, new.result)
    comparison = Comparison(
        Outcome.NO_VERDICT, (), base.name, new.name, threshold, notes=notes, unknown=unknown
    )
    if blocking := incomparable(base.result, new.result):
        return replace(comparison, reasons=tuple(blocking))
    quality, memory = quality_changes(base, new), memory_changes(base.result, new.result)
    comparison = replace(comparison, quality=quality, memory=memory, tasks=task_changes(base, new))
    gaps: list[str] = []
    if failed := failure_words([base], [new]):
        if failed[0] is Outcome.REGRESSION:
            return replace(comparison, outcome=failed[0], reasons=(failed[1],))
        gaps.append(failed[1])
    chosen = with_waiting(limits) or speed_limits(threshold)
    speeds = [limit for limit in chosen if isinstance(limit.quantity, Measured)]
    checks = checks_of([*chosen, *(gate.limits if gate else ())], [base], [new])
    deltas: list[Delta] = []
    if speeds and (reason := unusable(base, new)):
        gaps.insert(0, reason)
        speeds = []
    for limit in speeds:
        assert isinstance(limit.quantity, Measured)
        if why := unjudgeable(limit.quantity, [base], [new]):
            gaps.append(why)
        elif delta := judge(limit.quantity, limit, base, new, num_limits=len(speeds), same=same):
            deltas.append(delta)
        elif limits:
            gaps.append(f"{limit.quantity.label} has a limit but no value in both runs")
    if deltas and not same:
        comparison = replace(comparison, notes=(*notes, *design_notes(base, new)))
    comparison = replace(comparison, deltas=tuple(deltas), checks=checks)
    if limits:
        said = f"all {len(chosen)} limits are kept" if len(chosen) > 1 else "the limit is kept"
    elif same:
        said = "both are the same run"
    else:
        said = f"no metric is {threshold:.1%} worse: a change of that size would show"
    return conclude(comparison, [], gaps, said)


def checks_of(
    limits: Sequence[Limit], base: Sequence[RunData], new: Sequence[RunData]
) -> tuple[Check, ...]:
    """The checks of counts and sizes over all starts, and of quality and tasks on the first that scored."""
    scored = scored_start(base), scored_start(new)
    checks: list[Check] = []
    for limit in limits:
        if isinstance(limit.quantity, Counted):
            checks.append(check(limit.quantity, limit, base, new))
        elif isinstance(limit.quantity, Scored):
            checks.append(check_quality(limit, *scored))
        elif isinstance(limit.quantity, TaskScored):
            checks.append(check_task(limit, *scored))
    return tuple(checks)


def scored_start(starts: Sequence[RunData]) -> RunData:
    """The first start that scored quality, else the first."""
    return next((start for start in starts if start.result["llmopt"]["quality"]), starts[0])


def conclude(
    comparison: Comparison, faults: Sequence[str], gaps: Sequence[str], said: str
) -> Comparison:
    """The comparison with its outcome: a broken limit or one of `faults` is a regression, an undecided
    limit or one of `gaps` is no verdict, and `said` describes a pass."""
    rows = [*comparison.deltas, *comparison.checks]
    broken = [row.reason for row in rows if row.outcome is Outcome.REGRESSION] + [*faults]
    if broken:
        return replace(comparison, outcome=Outcome.REGRESSION, reasons=tuple(broken))
    if gaps or not rows or any(row.outcome is Outcome.NO_VERDICT for row in rows):
        by_starts = comparison.num_pairs > 0
        reasons = overall_words(rows, gaps, by_starts=by_starts)
        reasons = reasons or ("no metric has values in both runs",)
        return replace(comparison, outcome=Outcome.NO_VERDICT, reasons=reasons)
    return replace(comparison, outcome=Outcome.PASS, reasons=(said,))


def design_notes(base: RunData, new: RunData) -> tuple[str, ...]:
    """What two runs cannot show, and what beside them was going on."""
    if is_paired(base, new):
        return (
            "passes of one process: effects of a start are not seen (llmopt compare --run sees them)",
        )
    notes = [
        "one start a side: how far two starts differ is assumed (llmopt compare --run measures it)"
    ]
    for side, data in (("base", base), ("new", new)):
        if background_error(data) and (load := other_load(data)) > BUSY:
            notes.append(f"background load: {load:.0%} of the CPUs during the {side} run")
    return tuple(notes)


def remarks(base: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """Intended differences, which do not block a comparison."""
    notes = []
    for key, words in INFORMATIVE_KEYS.items():
        a, b = (side["llmopt"]["identity"][key] for side in (base, new))
        if a != b:
            notes.append(f"{words}: {a or 'none'} against {b or 'none'}")
    notes += server_changes(base, new)
    if clocks := clock_change(base, new):
        notes.append(clocks)
    served = (new["llmopt"]["quality"] or {}).get("served") or {}
    if served.get("kl_is_lower_bound"):
        notes.append(
            f"the KL from the reference is a lower bound: over the {served['num_top']} likeliest tokens that "
            "both servers tell, and one bucket with the rest"
        )
    for side, result in (("base", base), ("new", new)):
        if result["llmopt"]["slowdown"] != 1.0:
            record = result["llmopt"]
            where = "its sampler" if record.get("slowdown_where") == "sampler" else "it"
            notes.append(f"{side}: {where} was slowed {record['slowdown']:g} times on purpose")
    return (*notes, *widened_notes({"the base": base, "the new model": new}))


def unusable(base: RunData, new: RunData) -> str | None:
    """Why speed cannot be judged although the work is the same: an interrupted or uncertified run, many
    failures, too few requests, or other lengths."""
    for side, data in (("base", base), ("new", new)):
        result = data.result
        if result["llmopt"]["interrupted"]:
            return f"the {side} run was interrupted"
        if result["failed"] > MOST_FAILED * (result["failed"] + result["completed"]):
            return f"{result['failed']} requests failed in the {side} run"
        if result["completed"] < MIN_REQUESTS:
            return f"the {side} run has {result['completed']} requests: too few to judge"
        client = result["llmopt"].get("client")
        if client and not client["certified"]:
            return f"the client disturbed the {side} run: {client['reasons'][0]}"
    return other_lengths([base], [new])


def other_lengths(base: Sequence[RunData], new: Sequence[RunData]) -> str | None:
    """Why the speeds are of different work: a mean output length that is not shown to be within 10 %."""
    lengths = [mean_value(COUNTED["mean_output_len"], side) or 0.0 for side in (base, new)]
    if lengths[0] == lengths[1]:
        return None
    change = length_change(base, new)
    reach = change.half_width(1 - FALSE_PASS) if change else 0.0
    relative = change.log_ratio if change else relative_change(*lengths)
    if abs(relative) + reach <= LENGTH_TOLERANCE:
        return None
    return (
        f"the mean output length went from {lengths[0]:.1f} to {lengths[1]:.1f} tokens"
        f"{f' (± {reach:.1%})' if reach else ''}: the speeds are of different work (fix the lengths with "
        "--ignore-eos)"
    )


def memory_changes(base: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """{memory key: [base bytes, new bytes]}; first the weights as served, whose ratio the reports print."""
    base_memory, new_memory = base["llmopt"]["memory"], new["llmopt"]["memory"]
    both = base_memory.keys() & new_memory.keys()
    changes = {
        key: [base_memory[key], new_memory[key]]
        for key in base_memory
        if key in both and key.endswith("_bytes")
    }
    if not {"weight_bytes", "checkpoint_bytes"} <= both:
        return changes
    return {"served_weight_bytes": [served_weight_bytes(base), served_weight_bytes(new)], **changes}


def parse_share(text: str) -> float:
    """`5%` or `0.05` as 0.05. A bare number of 1 and more is refused: 5 may mean 5 % and 500 %, which as a
    limit passes everything. `150%` says what it means.

    Raises:
        BadInput: neither, negative, or a bare number of 1 and more.
    """
    word = text.strip()
    number = word.removesuffix("%")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise BadInput(f"{text!r} is no share: write 5% or 0.05")
    if word != number:
        return value / 100
    if value >= 1:
        raise BadInput(
            f"{text!r} is no share: write {value:g}% for {value / 100:g}, or {100 * value:g}% for {value:g} "
            "(a bare number has to be below 1, such as 0.05 for 5%)"
        )
    return value
