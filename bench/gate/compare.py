"""Regression verdict of two runs: pass, regression, or no verdict, each with its reasons.

A regression needs an effect above the threshold and statistical support. A pass needs enough precision
to have seen a change of that size. Everything else, and runs that did not do the same work on the same
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
from .gate import Limit, Measured, Outcome, speed_limits
from .judge import Check, Delta, check, judge

LENGTH_TOLERANCE = 0.10
MIN_REQUESTS = 8

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
    """Judge `new` against `base` by `limits`; by default, by four speed metrics, none of which may get
    worse by `threshold` (0.05: 5 %)."""
    comparison = Comparison(Outcome.NO_VERDICT, (), base.name, new.name, threshold)
    blocking = incomparable(base.result, new.result)
    notes = remarks(base.result, new.result)
    if blocking:
        return replace(comparison, reasons=tuple(blocking), notes=notes)
    quality, quality_faults, quality_gaps = judge_quality(
        base.result, new.result, gate or QualityGate()
    )
    memory = memory_changes(base.result, new.result)
    comparison = replace(comparison, quality=quality, memory=memory, notes=notes)
    if failures := failed_more(base.result, new.result):
        return replace(comparison, outcome=Outcome.REGRESSION, reasons=(failures,))
    chosen = tuple(limits) or speed_limits(threshold)
    speeds = [limit for limit in chosen if isinstance(limit.quantity, Measured)]
    checks = tuple(
        check(limit.quantity, limit, base, new)
        for limit in chosen
        if not isinstance(limit.quantity, Measured)
    )
    broken = [
        check_result.reason for check_result in checks if check_result.outcome is Outcome.REGRESSION
    ] + quality_faults
    unclear = [
        check_result.reason for check_result in checks if check_result.outcome is Outcome.NO_VERDICT
    ] + quality_gaps
    deltas: list[Delta] = []
    reason = disturbed(base.result, new.result) if speeds else None
    if reason:
        unclear.insert(0, reason)
    else:
        same = base.result["llmopt"]["run_id"] == new.result["llmopt"]["run_id"]
        for limit in speeds:
            assert isinstance(limit.quantity, Measured)
            delta = judge(limit.quantity, limit, base, new, num_limits=len(speeds), same=same)
            if delta is not None:
                deltas.append(delta)
            elif limits:
                unclear.append(f"{limit.quantity.label} has a limit but no value in both runs")
    regressions = [d.reason for d in deltas if d.outcome is Outcome.REGRESSION] + broken
    unclear = [d.reason for d in deltas if d.outcome is Outcome.NO_VERDICT] + unclear
    comparison = replace(comparison, deltas=tuple(deltas), checks=checks)
    if regressions:
        return replace(comparison, outcome=Outcome.REGRESSION, reasons=tuple(regressions))
    if unclear or not (deltas or checks):
        reasons = tuple(unclear) or ("no metric has values in both runs",)
        return replace(comparison, outcome=Outcome.NO_VERDICT, reasons=reasons)
    if limits:
        said = f"all {len(chosen)} limits are kept" if len(chosen) > 1 else "the limit is kept"
    elif base.result["llmopt"]["run_id"] == new.result["llmopt"]["run_id"]:
        said = "both are the same run"
    else:
        said = f"no metric is more than {threshold:.1%} worse, and a change of that size would show"
    return replace(comparison, outcome=Outcome.PASS, reasons=(said,))


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


def failed_more(base: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """A higher failure rate is a regression before any latency is compared."""
    shares = [r["failed"] / max(r["failed"] + r["completed"], 1) for r in (base, new)]
    if shares[1] > shares[0]:
        return f"failed requests rose from {base['failed']} to {new['failed']}"
    return None


def disturbed(base: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Why speed cannot be judged although the work is the same: interrupted, failed, or uncertified runs."""
    for side, result in (("base", base), ("new", new)):
        if result["llmopt"]["interrupted"]:
            return f"the {side} run was interrupted"
        if result["failed"]:
            return f"{result['failed']} requests failed in the {side} run"
        if result["completed"] < MIN_REQUESTS:
            return f"the {side} run has {result['completed']} requests: too few to judge"
        client = result["llmopt"].get("client")
        if client and not client["certified"]:
            return f"the client disturbed the {side} run: {client['reasons'][0]}"
    lengths = [r["total_output_tokens"] / r["completed"] for r in (base, new)]
    if abs(lengths[1] / lengths[0] - 1) > LENGTH_TOLERANCE:
        return (
            f"the mean output length went from {lengths[0]:.1f} to {lengths[1]:.1f} tokens: the "
            "speeds are of different work (fix the lengths with --ignore-eos)"
        )
    return None


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
