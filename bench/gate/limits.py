"""Gate expressions: limits on the metrics of a run, relative to a base run or absolute.

    p99_ttft_ms<=+10% output_throughput>=-5% kl<=0.02 weight_bytes<=+0% task.gsm8k.exact_match>=-2%

With a percent sign a limit bounds the change from the base; a plain number bounds the new run's value. A
quantity is measured in passes, counted, scored on fixed tokens, or the score of a task.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from ...base.errors import BadInput
from ..metrics.names import STATISTICS
from ..quality.passage import DOMAINS
from ..record.comparable import served_weight_bytes


@dataclass(frozen=True, slots=True)
class Scored:
    """A score under `llmopt.quality`, at the dotted path `name`, whose last part is its key among the
    intervals. Two runs are compared position by position in a `column` of `quality.parquet`, by its mean or
    `quantile`; a distance from the reference without a column is limited by its value alone."""

    key: str
    label: str
    unit: str
    name: str
    column: str | None = None
    quantile: float | None = None

    @property
    def is_felt(self) -> bool:
        """True if it stands in a part of the record: at sure positions, of a domain, of items."""
        return self.column is None

    @property
    def option(self) -> str:
        """The option that scores it; empty for a score of the quality text."""
        if self.name.startswith(("flips.", "domains.")):
            return "--quality-full"
        match = DEPTH_KEY.fullmatch(self.key)
        if match is None:
            return ""
        variant = f"--quality-kv {match['dtype']} " if match["dtype"] else ""
        return f"{variant}--quality-depth {match['depth']}"


SCORED = {
    scored.key: scored
    for scored in (
        Scored("perplexity", "Perplexity", "", "perplexity", "nll"),
        Scored("kl", "KL from the reference", "nats", "kl_nats", "kl"),
        Scored("p99_kl", "p99 KL from the reference", "nats", "p99_kl_nats", "kl", 0.99),
        Scored("p999_kl", "p99.9 KL from the reference", "nats", "p999_kl_nats", "kl", 0.999),
        Scored("top1", "Top-1 agreement", "share", "top1_agreement", "top1"),
        Scored("flips", "Answers that change", "share", "flips.share"),
        Scored("kl.sure", "KL where the reference is sure", "nats", "sure.kl_nats"),
        Scored("kl.cache", "KL of rounding the KV cache", "nats", "kv_cache.kl_nats"),
        *(
            Scored(f"kl.{name}", f"KL of {label}", "nats", f"domains.{name}.kl_nats")
            for name, label in DOMAINS.items()
        ),
    )
}
DEPTH_KEY = re.compile(r"(?P<score>kl|top1)\.(?:depth|kv\.(?P<dtype>\w+))\.(?P<depth>\d+[kM]?)")
DISTANCES = {
    "kl": ("KL", "nats", "kl_nats"),
    "top1": ("Top-1 agreement", "share", "top1_agreement"),
}
NEEDLES = re.compile(r"needles\.(\w+)")


def depth_scored(key: str) -> Scored | None:
    """The score at a depth, such as `kl.depth.32k`, `top1.depth.32k` and `kl.kv.fp8.32k`."""
    match = DEPTH_KEY.fullmatch(key)
    if match is None:
        return None
    score, dtype, depth = match.groups()
    label, unit, name = DISTANCES[score]
    where = f"at depth {depth}" if dtype is None else f"of the {dtype} KV cache at depth {depth}"
    part = "depth" if dtype is None else f"kv.{dtype}"
    return Scored(key, f"{label} {where}", unit, f"{part}.{depth}.{name}")


def scores_in(quality: Mapping[str, Any]) -> list[Scored]:
    parts = {"depth": quality.get("depth") or {}}
    parts |= {f"kv.{dtype}": depths for dtype, depths in (quality.get("kv") or {}).items()}
    keys = (f"{score}.{part}.{d}" for part, of in parts.items() for d in of for score in DISTANCES)
    return [*SCORED.values(), *filter(None, map(depth_scored, keys))]


PREFIX = "task."
# Tasks that `llmopt best` scores next to the original.
PROMISED = ("needles.", "tool_calls.", "answers.")
ENDINGS = re.compile(r"answers\.(at_limit|no_end|loop)(\.none)?")  # lower is better


@dataclass(frozen=True, slots=True)
class TaskScored:
    """The score of a task, under `llmopt.tasks`."""

    key: str
    unit: str = ""

    @property
    def label(self) -> str:
        return self.key.removeprefix(PREFIX)

    @property
    def is_flips(self) -> bool:
        """True if it is no score, but the share of multiple-choice answers that differ from the base's."""
        return self.key.endswith(".flips")

    def row(self, record: Mapping[str, Any]) -> dict[str, Any] | str:
        """The row of this score in a record of tasks, or why there is none."""
        rows: Sequence[dict[str, Any]] = record["metrics"]
        names = [f"{row['task']}.{row['metric']}" for row in rows]
        pairs = zip(names, rows, strict=True)
        matches = [row for name, row in pairs if self.label in (name, f"{name}.{row['filter']}")]
        if len(matches) == 1:
            return matches[0]
        if matches:
            filters = ", ".join(row["filter"] for row in matches)
            return f"has several filters, name one after the metric: {filters}"
        keys = ", ".join(dict.fromkeys(PREFIX + name for name in names))
        return f"there are {keys}" if keys else "no task was scored"


RATES = {
    "output_throughput": ("Output throughput", "tokens/s"),
    "total_token_throughput": ("Total token throughput", "tokens/s"),
    "request_throughput": ("Request throughput", "requests/s"),
    "input_throughput": ("Input throughput", "tokens/s"),
    "duration": ("Duration of a pass", "s"),
    "cpu_seconds": ("CPU time of a pass", "s"),
    "waiting_seconds": ("Waiting time of a pass", "s"),
    "instructions": ("Instructions of a pass", "instructions"),
    "request_goodput": ("Goodput", "requests/s"),
    "slo_share": ("Requests within the SLO", "share"),
    "joules_per_token": ("Energy per token", "J"),
}
SHORT = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "end to end"}
WORD = re.compile(r"([A-Za-z_][\w.-]*)\s*(<=|>=)\s*([+-]?[\d.]+(?:[eE][+-]?\d+)?)(%?)")
EXAMPLE = '"p99_ttft_ms<=+10% output_throughput>=-5% kl<=0.02"'
PROMISES = '"flips<=2% kl.code<=0.02 top1>=98% perplexity<=+1%"'


class GateOutcome(StrEnum):
    """The three verdicts, and their exit codes."""

    PASS = "pass"
    REGRESSION = "regression"
    NO_VERDICT = "no verdict"

    @property
    def exit_code(self) -> int:
        return {GateOutcome.PASS: 0, GateOutcome.REGRESSION: 1, GateOutcome.NO_VERDICT: 3}[self]

    @classmethod
    def of(cls, outcomes: Iterable[GateOutcome]) -> GateOutcome:
        """Several outcomes as one: regression before no verdict before pass; of none, no verdict."""
        given = set(outcomes)
        order = (cls.REGRESSION, cls.NO_VERDICT, cls.PASS)
        return next((outcome for outcome in order if outcome in given), cls.NO_VERDICT)


@dataclass(frozen=True, slots=True)
class Measured:
    """A metric that varies between passes; `column` is its per-request column, where there is one."""

    key: str
    label: str
    unit: str
    column: str | None = None
    statistic: str | None = None


@dataclass(frozen=True, slots=True)
class Counted:
    """A deterministic quantity: bytes and counts."""

    key: str
    label: str
    unit: str
    read: Callable[[Mapping[str, Any]], float | None]


Quantity = Measured | Counted | Scored | TaskScored


@dataclass(frozen=True, slots=True)
class Limit:
    """An upper (`at_most`) or lower bound on one quantity: 0.10 for `+10%` if `relative`, else in its
    unit."""

    quantity: Quantity
    at_most: bool
    bound: float
    relative: bool

    @property
    def text(self) -> str:
        value = f"{self.bound * 100:+.3g} %" if self.relative else f"{self.bound:.6g}"
        return f"{'≤' if self.at_most else '≥'} {value}"

    @property
    def is_share(self) -> bool:
        """True if changes are shares of the wall time, not logarithms: of waiting time, which is near 0."""
        return self.quantity.key == "waiting_seconds"

    @property
    def allowed(self) -> float:
        """The allowed worsening of a measured metric, a logarithm or a share; 0 where the limit is on the
        value, of which the distance is measured."""
        if not self.relative:
            return 0.0
        bound = self.bound if self.is_share else math.log1p(self.bound)
        return bound if self.at_most else -bound

    def as_share(self, moved: float) -> float:
        """A change as a share of the base's value, or of the wall time."""
        return moved if self.is_share else math.expm1(moved)


def _memory(key: str) -> Callable[[Mapping[str, Any]], float | None]:
    return lambda result: result["llmopt"]["memory"][key]


def _share_failed(result: Mapping[str, Any]) -> float | None:
    if None in (result["failed"], result["completed"]):
        return None
    total = result["failed"] + result["completed"]
    return result["failed"] / total if total else None


def _mean_output_len(result: Mapping[str, Any]) -> float | None:
    """Mean output tokens of the completed requests; None without any. The token total of a run of fixed
    duration counts its window alone, so that run records the mean."""
    if not result["completed"] or result["total_output_tokens"] is None:
        return None
    if window := result["llmopt"].get("window"):
        return window["mean_output_len"]
    return result["total_output_tokens"] / result["completed"]


COUNTED = {
    counted.key: counted
    for counted in (
        Counted("weight_bytes", "Weights as served", "bytes", served_weight_bytes),
        Counted("checkpoint_bytes", "Checkpoint on disk", "bytes", _memory("checkpoint_bytes")),
        Counted("kv_cache_bytes", "KV cache", "bytes", _memory("kv_cache_bytes")),
        Counted("peak_resident_bytes", "Peak resident", "bytes", _memory("peak_resident_bytes")),
        Counted("error_rate", "Failed requests", "share", _share_failed),
        Counted("failed", "Failed requests", "requests", lambda result: result["failed"]),
        Counted("completed", "Completed requests", "requests", lambda result: result["completed"]),
        Counted("mean_output_len", "Mean output length", "tokens", _mean_output_len),
        Counted(
            "preemptions",
            "Preemptions",
            "sequences",
            lambda result: result["llmopt"]["preemptions"],
        ),
    )
}
ALIASES = {
    "kl_nats": "kl",
    "kl_divergence": "kl",
    "p99_kl_nats": "p99_kl",
    "p999_kl_nats": "p999_kl",
    "top1_agreement": "top1",
    "ppl": "perplexity",
    "peak_bytes": "peak_resident_bytes",
    "tools": f"{PREFIX}tool_calls.correct",
    "length": f"{PREFIX}answers.tokens",
    "accept": "task.drafts.acceptance_length",
}


def measured() -> dict[str, Measured]:
    """Every quantity with a value in each pass, by its key in the result."""
    metrics = {key: Measured(key, label, unit) for key, (label, unit) in RATES.items()}
    for metric, name in SHORT.items():
        for statistic in STATISTICS:
            key = f"{statistic}_{metric}_ms"
            # Inter-token gaps are pooled over requests: there is no per-request value.
            column = None if metric == "itl" or statistic == "std" else f"{metric}_ms"
            label = f"{statistic.capitalize()} {name}"
            metrics[key] = Measured(key, label, "ms", column, statistic)
    return metrics


MEASURED = measured()


def quantity(name: str, *, of_scores: bool = False) -> Quantity:
    """The quantity of that name; `of_scores` offers only scores in place of an unknown name. Raises BadInput:
    there is none; the message suggests similar names."""
    name = ALIASES.get(name, name)
    if name.startswith(PREFIX):
        if name.count(".") < 2 or name.endswith("."):
            example = "write task.NAME.METRIC, such as task.gsm8k.exact_match"
            raise BadInput(f"gate: {name!r}: {example}")
        return TaskScored(name)
    if match := MEASURED.get(name) or COUNTED.get(name) or SCORED.get(name):
        return match
    if match := depth_scored(name):
        return match
    if match := NEEDLES.fullmatch(name):
        return TaskScored(f"{PREFIX}needles.exact_match.{match[1]}")
    known = [*SCORED] if of_scores else [*MEASURED, *COUNTED, *SCORED, *ALIASES]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"there are {', '.join(SCORED if of_scores else [*COUNTED, *SCORED])}"
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    if not of_scores:
        hint += f"{'' if near else '.'} Latencies are {{{','.join(STATISTICS)}}}_"
        hint += f"{{{', '.join(SHORT)}}}_ms, such as p99_ttft_ms"
    raise BadInput(f"gate: nothing is called {name!r}: {hint}")


def parse_promises(text: str) -> tuple[Limit, ...]:
    """Limits on scores against the original, such as `flips<=2% kl.code<=0.02 top1>=98% perplexity<=+1%`.
    Raises BadInput: a limit that cannot be read, or on a score that one checkpoint's quality record lacks."""
    limits = parse_gate(text, of_scores=True)
    for limit in limits:
        what = limit.quantity
        if isinstance(what, TaskScored) and what.label.startswith(PROMISED):
            is_length = what.label == "answers.tokens"
            is_cost = ENDINGS.fullmatch(what.label) is not None
            if not limit.relative or (limit.at_most != is_cost and not is_length):
                from_above = is_length or is_cost
                form = "<=+5%, its highest change" if from_above else ">=-2%, its least change"
                raise BadInput(f"promise: {what.key} {limit.text}: write {form}")
            continue
        if what.key == ALIASES["accept"]:
            raise BadInput(
                "promise: accept: finalists are measured without drafts: bench the original and the "
                "checkpoint with --speculative, then compare them by --gate 'accept>=-5%'"
            )
        if not isinstance(what, Scored):
            names = ", ".join(
                (*SCORED, "kl.depth.32k", "kl.kv.fp8.32k", "needles.32k", "tools", "length")
            )
            raise BadInput(f"promise: {what.key} is no score: there are {names}")
        if limit.relative != (what.key == "perplexity"):
            form = "<=+1%, its change" if what.key == "perplexity" else ", its value"
            text = f"write {what.key}{form} from the original"
            raise BadInput(f"promise: {what.key} {limit.text}: {text}")
        if limit.at_most == what.key.startswith("top1"):
            sign = ">=" if limit.at_most else "<="
            text = f"bound it from its worse side, by {sign}"
            raise BadInput(f"promise: {what.key} {limit.text}: {text}")
    return limits


def parse_gate(text: str, *, of_scores: bool = False) -> tuple[Limit, ...]:
    """The limits of a gate, separated by spaces or commas. With `of_scores` only scores are offered, and a
    percentage without a sign bounds a share itself, as it does for flips. Raises BadInput: a syntax error, an
    unknown name, the same limit twice, or no limit."""
    example = PROMISES if of_scores else EXAMPLE
    limits: list[Limit] = []
    rest = text.strip(" ,")
    while rest:
        match = WORD.match(rest)
        if match is None or rest[match.end() :][:1] not in ("", " ", ",", "\t", "\n"):
            raise BadInput(f"gate: cannot read {rest.split()[0]!r}: write limits such as {example}")
        name, sign, value, percent = match.groups()
        limits.append(_limit(name, sign, value, bool(percent), of_scores))
        rest = rest[match.end() :].lstrip(" ,\t\n")
    if not limits:
        raise BadInput(f"gate: no limit given: write limits such as {example}")
    seen = [(limit.quantity.key, limit.at_most, limit.relative) for limit in limits]
    if len(set(seen)) < len(seen):
        twice = next(key for key, *_ in seen if [s[0] for s in seen].count(key) > 1)
        raise BadInput(f"gate: {twice} has the same kind of limit twice")
    return tuple(limits)


def _limit(name: str, sign: str, value: str, percent: bool, of_scores: bool = False) -> Limit:
    what = quantity(name, of_scores=of_scores)
    try:
        bound = float(value)
    except ValueError as error:
        raise BadInput(f"gate: {value!r} in the limit of {name} is no number") from error
    if not math.isfinite(bound):
        raise BadInput(f"gate: {value!r} in the limit of {name} is no finite number")
    is_flips = what.is_flips if isinstance(what, TaskScored) else what.key == "flips"
    is_share = is_flips or (of_scores and what.unit == "share")
    if percent and value[0] not in "+-" and is_share:
        bound, percent = bound / 100, False
    if percent and (is_flips or (isinstance(what, Scored) and what.is_felt)):
        raise BadInput(
            f"gate: {name}{sign}{value}%: {name} is a distance from the reference: limit its value, such as "
            f"{name}{sign}{'2%' if is_flips else '0.02'}"
        )
    if not percent:
        if value[0] in "+-" or (isinstance(what, Measured) and bound <= 0):
            raise BadInput(
                f"gate: {name}{sign}{value} is a bound on the value itself: write {value}% for a change"
            )
        if what.unit == "share" and (bound > 1 or (bound == 1 and sign == "<=")):
            change = f" (with a percent sign a limit is on the change, such as {name}{sign}+5%)"
            raise BadInput(
                f"gate: {name}{sign}{value} is a bound on a share from 0 to 1: write {bound / 100:g} for "
                f"{bound:g}%{'' if is_share else change}"
            )
        return Limit(what, sign == "<=", bound, relative=False)
    if bound <= -100:
        raise BadInput(f"gate: a change of {value}% of {name} leaves nothing")
    return Limit(what, sign == "<=", bound / 100, relative=True)


def with_waiting(limits: Sequence[Limit]) -> tuple[Limit, ...]:
    """The limits, and for a highest change of CPU time the same of waiting time, which that does not see."""
    limited = {limit.quantity.key for limit in limits}
    waiting = [
        replace(limit, quantity=MEASURED["waiting_seconds"])
        for limit in limits
        if limit.quantity.key == "cpu_seconds" and limit.at_most and limit.relative
    ]
    return (*limits, *(() if "waiting_seconds" in limited else waiting))


def speed_limits(threshold: float) -> tuple[Limit, ...]:
    """The default gate: four speed metrics, none of them worse by `threshold`. Medians, because a single
    stall of a shared machine can dominate a mean."""
    slower = Limit(MEASURED["output_throughput"], False, 1 / (1 + threshold) - 1, relative=True)
    latencies = (f"median_{metric}_ms" for metric in ("ttft", "tpot", "e2el"))
    return slower, *(Limit(MEASURED[key], True, threshold, relative=True) for key in latencies)


def default_limits(
    threshold: float, base: Mapping[str, Any], new: Mapping[str, Any]
) -> tuple[Limit, ...]:
    """`speed_limits`; of other tools' results with at most one such speed every rate and mean that both have,
    of evaluations every score, which may not fall by more."""
    usual = speed_limits(threshold)
    if not {"imported"} <= base["llmopt"].keys() & new["llmopt"].keys():
        return usual
    both = {key for key in MEASURED if base.get(key) and new.get(key)}
    if sum(limit.quantity.key in both for limit in usual) > 1:
        return usual
    least = 1 / (1 + threshold) - 1
    rates = [key for key in RATES if key in both and key.endswith("throughput")]
    means = [f"mean_{metric}_ms" for metric in SHORT if f"mean_{metric}_ms" in both]
    tasks = [
        TaskScored(f"{PREFIX}{row['task']}.{row['metric']}.{row['filter']}")
        for row in (new["llmopt"]["tasks"] or {"metrics": ()})["metrics"]
        if row["aggregation"] == "mean" and row["higher_is_better"] is not False
    ]
    quantities = [*(MEASURED[key] for key in rates), *tasks]
    slower = [Limit(MEASURED[key], True, threshold, relative=True) for key in means]
    return (*(Limit(what, False, least, relative=True) for what in quantities), *slower) or usual


def parse_share(text: str) -> float:
    """`5%` or `0.05` as 0.05. A bare number of 1 and more is refused: 5 may mean 5 % and 500 %, which as a
    limit passes everything. `150%` is clear. Raises BadInput: neither, negative, or a bare number
    of 1 and more."""
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
