"""Regression verdict of two runs, or of paired starts: pass, regression, or no verdict, with its reasons.

A pass is non-inferiority: the upper bound of the worsening is within the limit. A regression is worse than
the limit: the lower bound is beyond it. Everything else, and runs that did not do the same work on the same
machine, is no verdict, never a pass.

Some conditions forbid a verdict on speed alone: failed, truncated and disturbed runs, and other lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from ...base.errors import BadInput
from ..metrics.run_statistics import HEADLINES
from ..metrics.statistics import ASSUMED_RUN_CV, run_cv
from ..record.comparable import (
    DISTURBANCE,
    PROMPTS,
    Difference,
    clock_change,
    differs_by,
    incomparable,
    served_weight_bytes,
    unknown_facts,
    widened_notes,
)
from ..record.result import RunData, plain
from .aspects import ASPECTS, AspectVerdict, aspects_of
from .counts import check_count, length_change, mean_value, relative_change, rise_of_failures, unfit
from .gate_options import LimitOptions
from .limits import (
    COUNTED,
    MEASURED,
    Counted,
    GateOutcome,
    Limit,
    Measured,
    Scored,
    TaskScored,
    default_limits,
    speed_limits,
    with_waiting,
)
from .measured import (
    BUSY,
    FEW_PASSES_CV,
    NO_VALUE,
    START_CV,
    background_error,
    is_paired,
    judge_in_runs,
    judge_in_starts,
    other_load,
    value_of_start,
)
from .score_checks import (
    TaskChange,
    check_quality,
    check_task,
    quality_changes,
    task_changes,
)
from .speed_gate import (
    GateSpeed,
    by_processor,
    decides,
    is_disturbed,
    is_hosted_runner,
    withholds_outcome,
)
from .verdict import (
    FALSE_PASS,
    LimitVerdict,
    MeasuredVerdict,
    OperatingCurve,
    SequentialPlan,
    undecided_words,
)

NO_METRIC = "no metric has values in both runs"
# The reason that a limit cannot be judged: a condition in which the runs differ, or a lack of evidence.
Gap = Difference | str


@dataclass(frozen=True, slots=True)
class Comparison:
    """The verdict, with `deltas` on measured metrics, `checks` on counts and scores, and quality and memory
    of both sides. It has 0 pairs for two runs; it is settled if more pairs of starts could not change it.

    Attributes:
        unknown: clauses on hardware that could not be compared.
        decided_by: limits or conditions that the outcome follows from; empty for a pass.
        conditions: conditions that forbade a verdict.
        differs_by: clauses on what was varied, which does not forbid a verdict.
        is_alone: the run has no base, and its limits are on values.
    """

    outcome: GateOutcome
    reasons: tuple[str, ...]
    base: str
    new: str
    threshold: float
    deltas: tuple[MeasuredVerdict, ...] = ()
    checks: tuple[LimitVerdict, ...] = ()
    quality: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    num_pairs: int = 0
    settled: bool = True
    curves: tuple[OperatingCurve, ...] = ()
    unknown: tuple[str, ...] = ()
    tasks: tuple[TaskChange, ...] = ()
    aspects: tuple[AspectVerdict, ...] = ()
    decided_by: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()
    differs_by: tuple[str, ...] = ()
    is_alone: bool = False

    def without_base(self) -> Self:
        """The verdict on a run that was its own base, without what is equal by that."""
        checks = tuple(replace(check, base=None, change=None) for check in self.checks)
        aspects = tuple(aspect for aspect in self.aspects if aspect.limit is not None)
        nothing = {"quality": {}, "memory": {}, "tasks": ()}
        return replace(self, checks=checks, aspects=aspects, is_alone=True, **nothing)

    @property
    def title(self) -> str:
        return self.new if self.is_alone else f"{self.new} against {self.base}"

    @property
    def verdicts(self) -> tuple[LimitVerdict, ...]:
        return (*self.deltas, *self.checks)

    @property
    def sentence(self) -> str:
        return "; ".join((*self.reasons, *self.unknown))

    def as_dict(self) -> dict[str, Any]:
        """The comparison as plain values, with its exit code."""
        names = ("deltas", "checks", "aspects")
        verdicts = {name: [v.as_dict() for v in getattr(self, name)] for name in names}
        return plain({**asdict(self), **verdicts, "exit_code": self.outcome.exit_code})


def compare(
    base: RunData,
    new: RunData,
    *,
    threshold: float = 0.05,
    limits: Sequence[Limit] = (),
    gate: Sequence[Limit] = (),
    gate_speed: GateSpeed | None = None,
) -> Comparison:
    """Judge the single run `new` against `base` by `limits`; by default, by four speed metrics, none of which
    may get worse by `threshold` (0.05: 5 %); and by the limits on quality in `gate`. Without `gate_speed`
    every limit decides. Raises BadInput: speed shall not decide, and there is no other limit."""
    same = base.result["llmopt"]["run_id"] == new.result["llmopt"]["run_id"]
    comparison = _before_limits([base], [new], threshold)
    if comparison.reasons:
        return comparison
    comparison = replace(comparison, tasks=task_changes(base, new))
    chosen = with_waiting(limits) or default_limits(threshold, base.result, new.result)
    if gate_speed == "auto" and is_hosted_runner():
        chosen = by_processor(chosen, base, new)
    checks = checks_of([*chosen, *gate], [base], [new])
    if gate_speed == "off" and not checks:
        raise BadInput(
            "--gate-speed off leaves no limit: give one on quality or memory, such as --max-kl 0.02"
        )
    comparison = replace(comparison, checks=checks)
    faults, conditions = rise_of_failures([base], [new])
    if faults:
        return conclude(comparison, faults, [])
    gaps: list[Gap] = [*conditions]
    measured = [limit for limit in chosen if isinstance(limit.quantity, Measured)]
    reason = unusable(base, new)
    speed = str(reason or NO_METRIC)
    if measured and reason:
        gaps.insert(0, reason)
        measured = []
    elif not measured and not reason:
        speed = judge_in_runs(speed_limits(threshold)[0], base, new, num_limits=1, same=same)
    judged = [
        judge_in_runs(limit, base, new, num_limits=len(measured), same=same) for limit in measured
    ]
    deltas = tuple(verdict for verdict in judged if not isinstance(verdict, str))
    unknown = [reason for reason in judged if isinstance(reason, str)]
    # By default a metric that the runs do not have, such as the TPOT of embeddings, is left out.
    gaps += unknown if limits else [why for why in unknown if not why.endswith(NO_VALUE)]
    undecided = any(verdict.outcome is GateOutcome.NO_VERDICT for verdict in deltas)
    is_broken = any(v.outcome is GateOutcome.REGRESSION for v in (*deltas, *checks))
    if undecided and not is_broken and is_disturbed(base) and is_disturbed(new):
        gaps.append(disturbance("both runs", new))
    notes = (*comparison.notes, *(design_notes(base, new) if deltas and not same else ()))
    comparison = replace(comparison, deltas=deltas, notes=notes)
    passed = kept_words(len(chosen))
    if not limits:
        passed = f"no metric is {threshold:.1%} worse: a change of that size would show"
        passed = "both are the same run" if same else passed
    return conclude(comparison, [], gaps, passed, speed, gate_speed)


def compare_by(options: LimitOptions, base: RunData, new: RunData) -> Comparison:
    """`compare` by the limits as options give them."""
    return compare(
        base,
        new,
        threshold=options.share,
        limits=options.limits,
        gate=options.quality,
        gate_speed=options.gate_speed,
    )


def judge_starts(
    base: Sequence[RunData],
    new: Sequence[RunData],
    *,
    limits: Sequence[Limit],
    quality: Sequence[Limit] = (),
    gate_speed: GateSpeed | None = None,
    max_pairs: int,
    final: bool = False,
) -> Comparison:
    """Judge the starts `new` against the starts `base`, of which `base[i]` and `new[i]` are a pair of at most
    `max_pairs`; no more follow a `final` one. It may be called after every pair: the test knows its looks,
    and their errors add up to its stated error."""
    comparison = replace(_before_limits(base, new), num_pairs=len(base))
    if comparison.reasons:
        return comparison
    limits = with_waiting(limits)
    measured = [limit for limit in limits if isinstance(limit.quantity, Measured)]
    most = max(max_pairs, len(base))
    plan = SequentialPlan(most, len(measured), len(base) if final else most)
    faults, conditions = rise_of_failures(base, new)
    gaps: list[Gap] = [*conditions]
    if measured and (reason := unfit(base, new) or other_lengths(base, new)):
        gaps.append(reason)
    results = [judge_in_starts(limit, base, new, plan) for limit in measured]
    judged = [result for result in results if not isinstance(result, str)]
    unknown = [result for result in results if isinstance(result, str)]
    deltas, curves = tuple(v for v, _ in judged), tuple(curve for _, curve in judged if curve)
    checks = checks_of([*limits, *quality], base, new)
    comparison = replace(comparison, deltas=deltas, checks=checks, curves=curves)
    passed = kept_words(len(limits))
    comparison = conclude(comparison, faults, [*gaps, *unknown], passed, gate_speed=gate_speed)
    is_open = gate_speed != "off" and any(v.outcome is GateOutcome.NO_VERDICT for v in deltas)
    is_over = final or len(base) >= max_pairs or comparison.outcome is GateOutcome.REGRESSION
    return replace(comparison, settled=is_over or not is_open)


def _before_limits(
    base: Sequence[RunData], new: Sequence[RunData], threshold: float = 0.0
) -> Comparison:
    """The comparison before any limit: with reasons if the work or the machine was not the same, else with
    quality and memory of the first starts that scored."""
    results = base[0].result, new[0].result
    pairs = zip(base, new, strict=True)
    differences = [difference for a, b in pairs for difference in incomparable(a.result, b.result)]
    comparison = Comparison(
        GateOutcome.NO_VERDICT,
        (),
        base[0].name,
        new[0].name,
        threshold,
        notes=remarks(*results),
        unknown=unknown_facts(*results),
        differs_by=differs_by(*results),
    )
    if differences:
        reasons = tuple(dict.fromkeys(map(str, differences)))
        names = tuple(dict.fromkeys(difference.condition for difference in differences))
        verdict, why = GateOutcome.NO_VERDICT.value, "; ".join(reasons)
        aspects = tuple(AspectVerdict(aspect, verdict, reason=why) for aspect in ASPECTS)
        return replace(
            comparison, reasons=reasons, aspects=aspects, decided_by=names, conditions=names
        )
    before, after = scored_start(base), scored_start(new)
    memory = memory_changes(before.result, after.result)
    return replace(comparison, quality=quality_changes(before, after), memory=memory)


def checks_of(
    limits: Sequence[Limit], base: Sequence[RunData], new: Sequence[RunData]
) -> tuple[LimitVerdict, ...]:
    """Verdicts on counts and sizes over all starts, and on quality and tasks of the first scored start."""
    scored = scored_start(base), scored_start(new)
    checks: list[LimitVerdict] = []
    for limit in limits:
        if isinstance(limit.quantity, Counted):
            checks.append(check_count(limit, base, new))
        elif isinstance(limit.quantity, Scored):
            checks.append(check_quality(limit, *scored))
        elif isinstance(limit.quantity, TaskScored):
            checks.append(check_task(limit, *scored))
    return tuple(checks)


def scored_start(starts: Sequence[RunData]) -> RunData:
    return next((start for start in starts if start.result["llmopt"]["quality"]), starts[0])


def conclude(
    comparison: Comparison,
    faults: Sequence[str],
    gaps: Sequence[Gap],
    passed: str = "",
    speed: MeasuredVerdict | str = "no limit is on a speed",
    gate_speed: GateSpeed | None = None,
) -> Comparison:
    """The comparison with its outcome: a broken limit or one of `faults` is a regression, an undecided limit
    or one of `gaps` is no verdict, and `passed` describes a pass. `speed` is shown if no limit is on a speed,
    or says why there is none; faults and gaps concern speeds. With `gate_speed` some speeds do not decide,
    unless nothing else does."""
    verdicts = [verdict for verdict in comparison.verdicts if decides(verdict, gate_speed)]
    open_gaps = [gap for gap in gaps if withholds_outcome(gap, gate_speed)]
    if not (verdicts or faults or open_gaps):
        verdicts, open_gaps = list(comparison.verdicts), list(gaps)
    others = [GateOutcome.REGRESSION for _ in faults] + [GateOutcome.NO_VERDICT for _ in open_gaps]
    outcome = GateOutcome.of([*(verdict.outcome for verdict in verdicts), *others])
    if left_out := [verdict.name for verdict in comparison.verdicts if verdict not in verdicts]:
        passed = f"{kept_words(len(verdicts))}; informs and does not gate: {', '.join(left_out)}"
    elif len(open_gaps) < len(gaps):
        passed = f"{kept_words(len(verdicts))}; speed does not gate: {gaps[0]}"
    reasons, texts = (passed,), [str(gap) for gap in open_gaps]
    conditions = [gap.condition for gap in open_gaps if isinstance(gap, Difference)]
    decided_by: list[str] = []
    if outcome is not GateOutcome.PASS:
        decided_by = [verdict.name for verdict in verdicts if verdict.outcome is outcome]
    if outcome is GateOutcome.REGRESSION:
        broken = [verdict.reason for verdict in verdicts if verdict.outcome is outcome]
        reasons = (*broken, *faults)
        decided_by += faults
    elif outcome is GateOutcome.NO_VERDICT:
        sentence = undecided_words(verdicts, texts, by_starts=comparison.num_pairs > 0)
        reasons = sentence or (NO_METRIC,)
        decided_by += [getattr(gap, "condition", str(gap)) for gap in open_gaps]
    return replace(
        comparison,
        outcome=outcome,
        reasons=reasons,
        aspects=aspects_of(
            comparison.verdicts,
            comparison.quality,
            comparison.memory,
            faults=faults,
            gaps=[str(gap) for gap in gaps],
            speed=speed,
        ),
        decided_by=tuple(dict.fromkeys(decided_by)),
        conditions=tuple(dict.fromkeys(conditions)),
    )


def kept_words(num_limits: int) -> str:
    return f"all {num_limits} limits are kept" if num_limits > 1 else "the limit is kept"


def design_notes(base: RunData, new: RunData) -> tuple[str, ...]:
    """Notes on what two runs cannot show: effects of a start, background load."""
    if is_paired(base, new):
        return (
            "passes of one process: effects of a start are not seen (llmopt compare --run sees them)",
        )
    notes = [
        "one start a side: how far two starts differ is assumed (llmopt compare --run measures it)"
    ]
    for side, data in (("base", base), ("new", new)):
        passes = data.result["llmopt"]["runs"]
        left_out = sum(bool(run.get("disturbed")) for run in passes)
        if 0 < left_out < len(passes):
            notes.append(
                f"{left_out} of {len(passes)} passes of the {side} run were disturbed: the comparison "
                "excludes them, the values of the run include all passes"
            )
        if background_error(data) and (load := other_load(data)) > BUSY:
            notes.append(f"background load: {load:.0%} of the CPUs during the {side} run")
    return tuple(notes)


def noise_of_runs(runs: Sequence[RunData]) -> dict[str, float]:
    """{source: coefficient of variation of a run}: between the runs, or between the passes of one run;
    without a run the three that verdicts assume."""
    if not runs:
        return {
            "two starts on a quiet machine, least": START_CV,
            "runs of one build, usual": ASSUMED_RUN_CV,
            "single passes, assumed by a verdict": FEW_PASSES_CV,
        }
    noise = {}
    for key in HEADLINES:
        by_run = [value for run in runs if (value := value_of_start(run, key))]
        values = by_run if len(runs) > 1 else runs[0].values(key)
        if len(values) > 1:
            between = f"{len(values)} {'runs' if len(runs) > 1 else 'passes'}"
            noise[f"{MEASURED[key].label}, {between}"] = run_cv(values)
    if not noise:
        raise BadInput(
            "--plan-runs: these runs have one pass and one value: give two runs of one build"
        )
    return noise


def remarks(base: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """Caveats that do not block a comparison."""
    notes = []
    if clocks := clock_change(base, new):
        notes.append(clocks)
    served = (new["llmopt"]["quality"] or {}).get("served") or {}
    if served.get("kl_is_lower_bound"):
        notes.append(
            f"the KL from the reference is a lower bound: over the {served['num_top']} likeliest tokens that "
            "both servers report, and one bucket with the rest"
        )
    for side, result in (("base", base), ("new", new)):
        if result["llmopt"]["slowdown"] != 1.0:
            record = result["llmopt"]
            where = "its sampler" if record.get("slowdown_where") == "sampler" else "it"
            notes.append(f"{side}: {where} was slowed {record['slowdown']:g} times on purpose")
    return (*notes, *widened_notes({"the base": base, "the new model": new}))


def memory_changes(base: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """{memory key: [base bytes, new bytes]}; first the weights as served, whose ratio the reports print."""
    before, after = base["llmopt"]["memory"], new["llmopt"]["memory"]
    both = [key for key in before if key in after]
    changes = {key: [before[key], after[key]] for key in both if key.endswith("_bytes")}
    if not {"weight_bytes", "checkpoint_bytes"} <= {*both}:
        return changes
    return {"served_weight_bytes": [served_weight_bytes(base), served_weight_bytes(new)], **changes}


LENGTH_TOLERANCE = 0.10


def unusable(
    base: RunData, new: RunData, sides: tuple[str, str] = ("base", "new")
) -> Difference | None:
    """The condition that forbids a verdict on speed although the work is the same: a failed, truncated or
    disturbed run, or other lengths. `sides` are the names of the runs."""
    if reason := unfit([base], [new], sides):
        return reason
    # Disturbance of one side alone: interleaved passes share theirs.
    alone = [is_disturbed(side) for side in (base, new)]
    if alone[0] != alone[1] and not is_paired(base, new):
        number = 0 if alone[0] else 1
        return disturbance(f"the {sides[number]} run", (base, new)[number])
    return other_lengths([base], [new])


def disturbance(runs: str, data: RunData) -> Difference:
    """The condition that every pass was disturbed, with the evidence of the first pass of `data`."""
    why = data.result["llmopt"]["runs"][0].get("disturbed_because") or "by their own evidence"
    return Difference(DISTURBANCE, f"every pass of {runs} was disturbed: {why}")


def other_lengths(base: Sequence[RunData], new: Sequence[RunData]) -> Difference | None:
    """The condition that the mean output lengths are not shown to be within 10 % of each other."""
    lengths = [mean_value(COUNTED["mean_output_len"], side) or 0.0 for side in (base, new)]
    if lengths[0] == lengths[1]:
        return None
    change = length_change(base, new)
    reach = change.half_width(1 - FALSE_PASS) if change else 0.0
    relative = change.log_ratio if change else relative_change(*lengths)
    if abs(relative) + reach <= LENGTH_TOLERANCE:
        return None
    return Difference(
        PROMPTS,
        f"the mean output length went from {lengths[0]:.1f} to {lengths[1]:.1f} tokens"
        f"{f' (± {reach:.1%})' if reach else ''}: the speeds are of different work (fix the lengths with "
        "--ignore-eos)",
    )
