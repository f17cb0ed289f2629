"""Two runs against each other: pass, regression, or no verdict, each with its reasons.

A regression needs an effect above the threshold and statistical support. A pass needs enough precision
to have seen a change of that size. Everything else, and runs that did not do the same work on the same
machine, is no verdict, never a pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from ..quant.errors import BadInput
from .result import REQUESTS_NAME, plain, read_result, requests_table
from .session import BenchRun
from .statistics import CONFIDENCE, Effect, effect_of_pairs, effect_of_runs

# One-sided, per metric: four metrics together give a false alarm in at most 2 % of equal runs.
ALARM = 1 - 0.02 / 4
RESAMPLES = 500
# With so many passes the spread between them holds the requests' own: the prompts are the same in each.
RUNS_THAT_SHOW_SPREAD = 3
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


class Outcome(StrEnum):
    """The three answers, and the exit code of each."""

    PASS = "pass"
    REGRESSION = "regression"
    NO_VERDICT = "no verdict"

    @property
    def exit_code(self) -> int:
        return {Outcome.PASS: 0, Outcome.REGRESSION: 1, Outcome.NO_VERDICT: 3}[self]


@dataclass(frozen=True, slots=True)
class Gated:
    """A metric that decides. `column` is its per-request column, for pairing requests."""

    key: str
    label: str
    unit: str
    higher_is_better: bool = False
    column: str | None = None


GATED = (
    Gated("output_throughput", "Output throughput", "tokens/s", higher_is_better=True),
    Gated("median_ttft_ms", "Median TTFT", "ms", column="ttft_ms"),
    Gated("median_tpot_ms", "Median TPOT", "ms", column="tpot_ms"),
    Gated("median_e2el_ms", "Median end to end", "ms", column="e2el_ms"),
)


@dataclass(frozen=True, slots=True)
class RunData:
    """A result and, where it is there, its table of requests by column."""

    result: dict[str, Any]
    requests: dict[str, list[Any]] | None = None

    @classmethod
    def of_run(cls, run: BenchRun) -> RunData:
        return cls(run.result, requests_table(run.passes))

    @classmethod
    def read(cls, path: Path) -> RunData:
        """A run folder, or a `result.json`; the requests are taken from beside it.

        Raises:
            BadInput: no such result, or a damaged file.
        """
        result = read_result(path)
        table = (path if path.is_dir() else path.parent) / REQUESTS_NAME
        if not table.is_file():
            return cls(result)
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return cls(result, pq.read_table(table).to_pydict())
        except (pa.ArrowInvalid, OSError) as error:
            raise BadInput(f"{table} is damaged: {error}") from error

    @property
    def name(self) -> str:
        return self.result["llmopt"]["name"]

    def values(self, key: str) -> list[float]:
        """A metric's value in each pass, without passes that have none."""
        found = [run[key] for run in self.result["llmopt"]["runs"]]
        return [value for value in found if value]

    def by_request(self, column: str) -> dict[str, list[float]]:
        """A column's values by request id, in the order of the passes."""
        found: dict[str, list[float]] = {}
        if self.requests:
            for request, value in zip(
                self.requests["request_id"], self.requests[column], strict=True
            ):
                if value is not None:
                    found.setdefault(request, []).append(value)
        return found


@dataclass(frozen=True, slots=True)
class QualityGate:
    """Limits on quality; None does not ask.

    Attributes:
        max_perplexity_increase: relative, against the base.
        max_kl: nats from the reference of the new run.
        min_top1: share of positions.
    """

    max_perplexity_increase: float | None = None
    max_kl: float | None = None
    min_top1: float | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """One gated metric. `change` is relative to the base; `worse` is the slowdown: positive is worse.

    `low` and `high` bound `change` with 90 % confidence (95 % on each side).
    """

    key: str
    label: str
    unit: str
    base: float
    new: float
    change: float
    worse: float
    low: float
    high: float
    outcome: Outcome
    reason: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """The verdict and everything behind it."""

    outcome: Outcome
    reasons: tuple[str, ...]
    base: str
    new: str
    threshold: float
    deltas: tuple[Delta, ...] = ()
    quality: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return plain({**asdict(self), "exit_code": self.outcome.exit_code})


def compare(
    base: RunData, new: RunData, *, threshold: float = 0.05, gate: QualityGate | None = None
) -> Comparison:
    """Judge `new` against `base`. `threshold` is relative: 0.05 lets a metric get 5 % worse."""
    found = Comparison(Outcome.NO_VERDICT, (), base.name, new.name, threshold)
    blocking = incomparable(base.result, new.result)
    notes = remarks(base.result, new.result)
    if blocking:
        return replace(found, reasons=tuple(blocking), notes=notes)
    quality, quality_faults, quality_gaps = judge_quality(
        base.result, new.result, gate or QualityGate()
    )
    memory = memory_changes(base.result, new.result)
    found = replace(found, quality=quality, memory=memory, notes=notes)
    if failures := failed_more(base.result, new.result):
        return replace(found, outcome=Outcome.REGRESSION, reasons=(failures,))
    if reason := disturbed(base.result, new.result):
        return replace(found, reasons=(reason,))
    same = base.result["llmopt"]["run_id"] == new.result["llmopt"]["run_id"]
    deltas = tuple(judge(metric, base, new, threshold, same=same) for metric in GATED)
    deltas = tuple(delta for delta in deltas if delta is not None)
    regressions = [d.reason for d in deltas if d.outcome is Outcome.REGRESSION] + quality_faults
    unclear = [d.reason for d in deltas if d.outcome is Outcome.NO_VERDICT] + quality_gaps
    if regressions:
        outcome, reasons = Outcome.REGRESSION, regressions
    elif unclear or not deltas:
        outcome, reasons = Outcome.NO_VERDICT, unclear or ["no metric has values in both runs"]
    elif same:
        outcome, reasons = Outcome.PASS, ["both are the same run"]
    else:
        said = f"no metric is more than {threshold:.1%} worse, and a change of that size would show"
        outcome, reasons = Outcome.PASS, [said]
    return replace(found, outcome=outcome, reasons=tuple(reasons), deltas=deltas)


def incomparable(base: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Why these two runs did not do the same work under the same conditions; empty if they did."""
    ours, theirs = base["llmopt"]["identity"], new["llmopt"]["identity"]
    found = []
    for key, words in IDENTITY_KEYS.items():
        if ours[key] == theirs[key]:
            continue
        if isinstance(ours[key], Mapping):
            names = [k for k in ours[key] if ours[key].get(k) != theirs[key].get(k)]
            detail = ", ".join(f"{k}: {ours[key].get(k)} and {theirs[key].get(k)}" for k in names)
        else:
            detail = f"{str(ours[key])[:40]} and {str(theirs[key])[:40]}"
        found.append(f"{words} ({detail})")
    return found


def remarks(base: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """What differs on purpose and does not stop a comparison."""
    found = []
    for key, words in INFORMATIVE_KEYS.items():
        a, b = (side["llmopt"]["identity"][key] for side in (base, new))
        if a != b:
            found.append(f"{words}: {a or 'none'} against {b or 'none'}")
    for side, result in (("base", base), ("new", new)):
        if result["llmopt"]["slowdown"] != 1.0:
            found.append(f"{side} was slowed {result['llmopt']['slowdown']:g} times on purpose")
    return tuple(found)


def failed_more(base: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """A higher share of failed requests is a regression before any latency is looked at."""
    shares = [r["failed"] / max(r["failed"] + r["completed"], 1) for r in (base, new)]
    if shares[1] > shares[0]:
        return f"failed requests rose from {base['failed']} to {new['failed']}"
    return None


def disturbed(base: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Why the speed of these runs cannot be judged, although they had the same work."""
    for side, result in (("base", base), ("new", new)):
        if result["llmopt"]["interrupted"]:
            return f"the {side} run was interrupted"
        if result["failed"]:
            return f"{result['failed']} requests failed in the {side} run"
        if result["completed"] < MIN_REQUESTS:
            return f"the {side} run has {result['completed']} requests: too few to judge"
    lengths = [r["total_output_tokens"] / r["completed"] for r in (base, new)]
    if abs(lengths[1] / lengths[0] - 1) > LENGTH_TOLERANCE:
        return (
            f"the mean output length went from {lengths[0]:.1f} to {lengths[1]:.1f} tokens: the "
            "speeds are of different work (fix the lengths with --ignore-eos)"
        )
    return None


def judge(
    metric: Gated, base: RunData, new: RunData, threshold: float, *, same: bool = False
) -> Delta | None:
    """One metric; None where a run has no value of it."""
    values_base, values_new = base.values(metric.key), new.values(metric.key)
    if not values_base or not values_new:
        return None
    effect = effect_between(metric, base, new)
    reach = 0.0 if same else effect.half_width(CONFIDENCE)
    alarm = 0.0 if same else effect.half_width(ALARM)
    # On the log scale a slowdown of latency and of throughput are the same number.
    slower = -effect.log_ratio if metric.higher_is_better else effect.log_ratio
    limit = math.log1p(threshold)
    direction = "higher" if effect.relative > 0 else "lower"
    said = f"{metric.label} is {abs(effect.relative):.1%} {direction}"
    if slower > limit and slower - alarm > 0:
        outcome, reason = Outcome.REGRESSION, f"{said}, more than the {threshold:.1%} allowed"
    elif slower + reach <= limit or (slower <= limit and reach <= limit):
        outcome, reason = Outcome.PASS, said
    else:
        outcome = Outcome.NO_VERDICT
        reason = f"{said} ± {math.expm1(reach):.1%}: too noisy to tell a change of {threshold:.1%}"
    return Delta(
        key=metric.key,
        label=metric.label,
        unit=metric.unit,
        base=float(np.exp(np.mean(np.log(values_base)))),
        new=float(np.exp(np.mean(np.log(values_new)))),
        change=effect.relative,
        worse=math.expm1(slower),
        low=math.expm1(effect.log_ratio - reach),
        high=math.expm1(effect.log_ratio + reach),
        outcome=outcome,
        reason=reason,
    )


def effect_between(metric: Gated, base: RunData, new: RunData) -> Effect:
    """The change of a metric with its uncertainty, by what these runs allow to know."""
    values_base, values_new = base.values(metric.key), new.values(metric.key)
    fewest = min(len(values_base), len(values_new))
    arms = [side.result["llmopt"]["arms"] for side in (base, new)]
    if arms[0] and arms[0] == arms[1] and fewest > 1 and len(values_base) == len(values_new):
        return effect_of_pairs(values_base, values_new)
    if metric.column is None or fewest >= RUNS_THAT_SHOW_SPREAD:
        return effect_of_runs(values_base, values_new)
    error = paired_median_error(base.by_request(metric.column), new.by_request(metric.column))
    return effect_of_runs(values_base, values_new, error)


def paired_median_error(
    base: Mapping[str, Sequence[float]], new: Mapping[str, Sequence[float]], *, seed: int = 0
) -> float:
    """Bootstrap standard error of the mean log ratio of medians, resampling requests in pairs.

    The same requests are drawn in both arms, so that differences between prompts cancel.
    """
    shared = [request for request in base if request in new]
    passes_base = min((len(base[r]) for r in shared), default=0)
    passes_new = min((len(new[r]) for r in shared), default=0)
    if len(shared) < 2 or not passes_base or not passes_new:
        return 0.0
    tables = [
        np.array([arm[request][:passes] for request in shared]).T
        for arm, passes in ((base, passes_base), (new, passes_new))
    ]
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, len(shared), size=(RESAMPLES, len(shared)))
    logs = [np.log(np.median(table[:, draws], axis=-1)).mean(axis=0) for table in tables]
    return float((logs[1] - logs[0]).std(ddof=1))


def judge_quality(
    base: Mapping[str, Any], new: Mapping[str, Any], gate: QualityGate
) -> tuple[dict[str, Any], list[str], list[str]]:
    """(changes, limits that are broken, limits that cannot be checked)."""
    ours, theirs = base["llmopt"]["quality"], new["llmopt"]["quality"]
    asked = [v for v in asdict(gate).values() if v is not None]
    if not theirs:
        return (
            {},
            [],
            ["a quality limit was given, but the new run has no quality"] if asked else [],
        )
    found: dict[str, Any] = {
        "perplexity": [ours["perplexity"] if ours else None, theirs["perplexity"]],
        "perplexity_change": None,
        "kl_nats": theirs["kl_nats"],
        "top1_agreement": theirs["top1_agreement"],
        "reference": theirs["reference"],
    }
    if ours and ours["token_sha256"] == theirs["token_sha256"]:
        found["perplexity_change"] = theirs["perplexity"] / ours["perplexity"] - 1
    broken, gaps = [], []
    for name, limit, value, sign in (
        ("perplexity change", gate.max_perplexity_increase, found["perplexity_change"], 1),
        ("KL divergence", gate.max_kl, found["kl_nats"], 1),
        ("top-1 agreement", gate.min_top1, found["top1_agreement"], -1),
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
    return found, broken, gaps


def memory_changes(base: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """{what: [base bytes, new bytes]}."""
    ours, theirs = base["llmopt"]["memory"], new["llmopt"]["memory"]
    return {key: [ours[key], theirs[key]] for key in ours}


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
