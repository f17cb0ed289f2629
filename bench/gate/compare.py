"""Regression verdict of two runs: pass, regression, or no verdict, each with its reasons.

A pass is non-inferiority: the upper bound of the worsening is within the limit. A regression is worse than
the
limit: the lower bound is beyond it. Everything else, and runs that did not do the same work on the same
machine, is no verdict, never a pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ...quant.base.errors import BadInput
from ..record.result import plain
from ..record.run_data import RunData
from .counts import Check, check, failure_words, length_change, mean_value, relative_change
from .gate import COUNTED, Limit, Measured, Outcome, speed_limits, with_waiting
from .judge import BUSY, Delta, background_error, is_paired, judge, other_load
from .operating_curve import OperatingCurve
from .sequential import FALSE_PASS
from .start_values import requests_missing, too_few_words
from .verdict_words import overall_words

LENGTH_TOLERANCE = 0.10
MIN_REQUESTS = 8
# Above this share of failed requests the speeds are those of the survivors.
MOST_FAILED = 0.01

IDENTITY_KEYS = {
    "workload_sha256": "the workloads differ",
    "load": "the load settings differ",
    "target": "the targets differ",
    "engine": "the engine options differ",
    "device": "the devices differ",
    "machine": "the machines differ",
}
INFORMATIVE_KEYS = {"model": "model", "quantization": "quantization", "dtype": "dtype"}


@dataclass(frozen=True, slots=True)
class QualityGate:
    """Limits on quality; None is no limit.

    Attributes:
        max_perplexity_increase: relative, against the base.
        max_kl: nats from the reference of the new run.
        min_top1: fraction of positions.
    """

    max_perplexity_increase: float | None = None
    max_kl: float | None = None
    min_top1: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The verdict, with the deltas, checks, quality and memory it is based on.

    Attributes:
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
    comparison = Comparison(Outcome.NO_VERDICT, (), base.name, new.name, threshold, notes=notes)
    if blocking := incomparable(base.result, new.result):
        return replace(comparison, reasons=tuple(blocking))
    quality, faults, gaps = judge_quality(base.result, new.result, gate or QualityGate())
    memory = memory_changes(base.result, new.result)
    comparison = replace(comparison, quality=quality, memory=memory)
    if failed := failure_words([base], [new]):
        if failed[0] is Outcome.REGRESSION:
            return replace(comparison, outcome=failed[0], reasons=(failed[1],))
        gaps.append(failed[1])
    chosen = with_waiting(limits) or speed_limits(threshold)
    speeds = [limit for limit in chosen if isinstance(limit.quantity, Measured)]
    checks = tuple(
        check(limit.quantity, limit, [base], [new])
        for limit in chosen
        if not isinstance(limit.quantity, Measured)
    )
    deltas: list[Delta] = []
    if speeds and (reason := unusable(base, new)):
        gaps.insert(0, reason)
        speeds = []
    for limit in speeds:
        assert isinstance(limit.quantity, Measured)
        missing = max(requests_missing(limit.quantity, [side]) for side in (base, new))
        if missing:
            gaps.append(too_few_words(limit.quantity, missing))
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
    return conclude(comparison, faults, gaps, said)


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


def incomparable(base: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Why these two runs did not do the same work under the same conditions; empty if they did."""
    base_identity, new_identity = base["llmopt"]["identity"], new["llmopt"]["identity"]
    reasons = []
    for key, words in IDENTITY_KEYS.items():
        if base_identity[key] == new_identity[key]:
            continue
        if isinstance(base_identity[key], Mapping):
            names = [
                k
                for k in base_identity[key]
                if base_identity[key].get(k) != new_identity[key].get(k)
            ]
            detail = ", ".join(
                f"{k}: {base_identity[key].get(k)} and {new_identity[key].get(k)}" for k in names
            )
        else:
            detail = f"{str(base_identity[key])[:40]} and {str(new_identity[key])[:40]}"
        reasons.append(f"{words} ({detail})")
    return reasons


def remarks(base: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """Intended differences, which do not block a comparison."""
    notes = []
    for key, words in INFORMATIVE_KEYS.items():
        a, b = (side["llmopt"]["identity"][key] for side in (base, new))
        if a != b:
            notes.append(f"{words}: {a or 'none'} against {b or 'none'}")
    for side, result in (("base", base), ("new", new)):
        if result["llmopt"]["slowdown"] != 1.0:
            record = result["llmopt"]
            where = "its sampler" if record.get("slowdown_where") == "sampler" else "it"
            notes.append(f"{side}: {where} was slowed {record['slowdown']:g} times on purpose")
    return tuple(notes)


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


def judge_quality(
    base: Mapping[str, Any], new: Mapping[str, Any], gate: QualityGate
) -> tuple[dict[str, Any], list[str], list[str]]:
    """(changes, violated limits, limits that cannot be checked)."""
    base_quality, new_quality = base["llmopt"]["quality"], new["llmopt"]["quality"]
    asked = [v for v in asdict(gate).values() if v is not None]
    if not new_quality:
        return (
            {},
            [],
            ["a quality limit was given, but the new run has no quality"] if asked else [],
        )
    changes: dict[str, Any] = {
        "perplexity": [
            base_quality["perplexity"] if base_quality else None,
            new_quality["perplexity"],
        ],
        "perplexity_change": None,
        "kl_nats": new_quality["kl_nats"],
        "top1_agreement": new_quality["top1_agreement"],
        "reference": new_quality["reference"],
    }
    if base_quality and base_quality["token_sha256"] == new_quality["token_sha256"]:
        changes["perplexity_change"] = new_quality["perplexity"] / base_quality["perplexity"] - 1
    broken, gaps = [], []
    for name, limit, value, sign in (
        ("perplexity change", gate.max_perplexity_increase, changes["perplexity_change"], 1),
        ("KL divergence", gate.max_kl, changes["kl_nats"], 1),
        ("top-1 agreement", gate.min_top1, changes["top1_agreement"], -1),
    ):
        if limit is None:
            continue
        if value is None:
            gaps.append(
                f"{name} has a limit but no value: it needs the same text, or a --reference"
            )
        elif sign * value > sign * limit:
            side = "above" if sign > 0 else "below"
            broken.append(f"{name} is {value:.4g}, {side} the limit of {limit:.4g}")
    return changes, broken, gaps


def memory_changes(base: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """{memory key: [base bytes, new bytes]}."""
    base_memory, new_memory = base["llmopt"]["memory"], new["llmopt"]["memory"]
    both = base_memory.keys() & new_memory.keys()
    return {
        key: [base_memory[key], new_memory[key]]
        for key in base_memory
        if key in both and key.endswith("_bytes")
    }


def parse_share(text: str) -> float:
    """`5%` or `0.05` as 0.05.

    Raises:
        BadInput: neither, or negative.
    """
    word = text.strip()
    try:
        value = float(word.removesuffix("%")) / (100 if word.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise BadInput(f"{text!r} is no share: write 5% or 0.05")
    return value
