"""Load sweeps (throughput against latency, the knee) and SLO search (the highest load within limits)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...base.errors import BadInput
from ...base.progress import Progress
from ...engine.base.units import KEPT_UP, PRECISION, SloResult, parse_slo
from ..gate.counts import MOST_FAILED
from ..metrics.metrics import aggregate, slo_share
from ..metrics.run_statistics import steady_state
from ..metrics.statistics import run_cv
from ..options.options import BenchOptions
from ..options.values import Kind
from ..record.result import plain
from ..record.run_record import Measurement, workload_part
from .session import BenchSession
from .target_sessions import EngineSession, HttpSession

SCHEMA_VERSION = 1
METRICS = ("ttft", "tpot", "itl", "e2el", "e2el_including_client_queue")
# An automatic sweep doubles the load until throughput gains less than this.
LEAST_GAIN = 0.10
MAX_STEPS = 10
# The first rate of an automatic sweep, as a fraction of the serial rate.
FIRST_RATE = 0.5
KNEE_RULE = (
    "the point with the highest power: output throughput / mean end-to-end latency (Kleinrock 1979); "
    "before it throughput grows faster than latency, behind it latency does; of rates, only those "
    f"that were kept up with, and those at which at most {MOST_FAILED:.0%} of the requests failed, if any"
)
AUTO_RULE = (
    f"the load doubles until output throughput gains less than {LEAST_GAIN:.0%} on the best so far, "
    "or a rate is not kept up with"
)
KEPT_UP_RULE = (
    f"requests completed per second, over the whole pass with its drain, are at least {KEPT_UP:.0%} "
    "of the rate; more prompts make the pass longer and the drain count for less"
)
# Fraction of the serial rate: there requests hardly overlap, so a failure there is a failure at any rate.
LOWEST_RATE = 0.25
MAX_DOUBLINGS = 10
RULE = (
    "a load keeps the limits if the given share of all requests, failed ones counted as misses, meets "
    "every limit; a rate must also be kept up with, and its TTFT and end-to-end time count from when a "
    "request was due"
)


def find_knee(points: Sequence[Mapping[str, Any]]) -> Any:
    """The point with the highest `power` among sustained loads; the first of equal ones."""
    alive = [point for point in points if point["power"] is not None and point["kept_up"]]
    sound = [p for p in alive if p["failed"] <= MOST_FAILED * (p["failed"] + p["completed"])]
    return max(sound or alive, key=lambda point: point["power"], default=None)


class SweepTarget:
    """A target under successive loads, loaded once, with the points that were measured."""

    def __init__(self, options: BenchOptions, kind: Kind, progress: Progress | None = None) -> None:
        chosen = options.num_runs if "num_runs" in options.model_fields_set else 1
        self._options = options.model_copy(update={"num_runs": chosen, "quality": False})
        if options.task_names:
            raise BadInput("a sweep or a search scores no tasks: leave --tasks away")
        if options.request_rate is not None or options.ramp_up_strategy is not None:
            raise BadInput("a sweep or a search sets the rate: leave --request-rate and ramps away")
        self.kind: Kind = kind
        self._limits = parse_slo(options.goodput)
        self._progress = progress
        self._engine: Any = None
        self._facts: dict[str, Any] = {}
        self._serial_rate: float | None = None
        self.points: list[dict[str, Any]] = []

    def record(self, *, interrupted: bool = False) -> dict[str, Any]:
        """The record for `sweep.json`: the measured points, and the facts of a run without what varies."""
        knee = find_knee(self.points)
        return plain(
            {
                "schema": SCHEMA_VERSION,
                "kind": self.kind,
                "name": self._facts["name"],
                "interrupted": interrupted,
                "identity": self._facts["identity"],
                "workload": self._facts["workload"],
                "serial_request_rate": self._serial_rate,
                "knee": knee and knee[self.kind],
                "knee_rule": KNEE_RULE,
                "auto_rule": AUTO_RULE,
                "kept_up_rule": KEPT_UP_RULE,
                "points": sorted(self.points, key=lambda point: point[self.kind]),
            }
        )

    @property
    def max_requests(self) -> int:
        return self._options.num_prompts

    def measure(self, kind: Kind, value: float) -> dict[str, Any]:
        """Run all passes under one load, and record the point. KeyboardInterrupt: this point is lost."""
        if kind == "concurrency":
            load = {"max_concurrency": int(value), "request_rate": None}
        else:
            load = {"request_rate": float(value)}
        options = self._options.model_copy(update=load)
        session: BenchSession
        if options.base_url is not None:
            session = HttpSession(options, self._progress)
        else:
            session = EngineSession(options, self._progress, engine=self._engine)
            self._engine = session.engine
        with session:
            if session.workload.is_timed:
                raise BadInput(
                    f"{session.workload.source} has arrival times of its own, so there is no rate "
                    "to vary: freeze it without a rate, or replay it with --trace-speed"
                )
            if not self._facts:
                session.say_notes()
                self._facts = {
                    "name": session.name,
                    "identity": varied_away(session.identity()),
                    "workload": workload_part(session.workload),
                }
            for _ in range(options.num_runs):
                if not session.run_pass():
                    raise KeyboardInterrupt
            point = point_record(kind, value, session.measured, self._limits)
            point["workload_sha256"] = session.workload.sha256
        if kind == self.kind:
            self.points.append(point)
        return point

    def serial_rate(self) -> float:
        """Requests per second at concurrency 1. Raises BadInput: no request succeeded."""
        point = self.measure("concurrency", 1)
        rate = point["request_throughput"]
        if not rate:
            raise BadInput(
                "no request succeeded with one user alone: there is no rate to start from"
            )
        self._serial_rate = rate
        return rate


def varied_away(identity: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in identity.items() if key != "workload_sha256"}
    varied = ("request_rate", "max_concurrency")
    load = {key: value for key, value in identity["load"].items() if key not in varied}
    return {**kept, "load": load}


def point_record(
    kind: Kind, value: float, measured: Measurement, limits_ms: Mapping[str, float]
) -> dict[str, Any]:
    """Figures of one load: vLLM's aggregate keys over its passes, and the sweep's decision quantities."""
    passes = measured.loads
    figures = aggregate(
        passes, metrics=METRICS, percentiles=(50, 90, 99), goodput_ms=limits_ms or None
    )
    latency = figures["mean_e2el_including_client_queue_ms" if kind == "rate" else "mean_e2el_ms"]
    throughput = figures["output_throughput"]
    alone = [aggregate([load], metrics=(), percentiles=()) for load in passes]
    by_pass = [figures["output_throughput"] for figures in alone]
    return {
        kind: int(value) if kind == "concurrency" else value,
        "num_runs": len(passes),
        **figures,
        "latency_ms": latency,
        "kept_up": kind == "concurrency"
        or (figures["request_throughput"] or 0.0) >= KEPT_UP * value,
        "power": throughput / (latency / 1000) if throughput and latency else None,
        "run_cv": run_cv(by_pass) if len(by_pass) > 1 and all(by_pass) else None,
        "prefix_cache_hit_rate": measured.prefix_cache_hit_rate,
        "steady_state": steady_state(passes, int(value) if kind == "concurrency" else None),
        "good_share": slo_share(
            [trace for load_pass in passes for trace in load_pass.traces],
            limits_ms,
            from_schedule=kind == "rate",
        ),
    }


def sweep_loads(sweep_target: SweepTarget, loads: Sequence[float] | None) -> dict[str, Any]:
    """Measure `loads`, or double them to the plateau, rates from half the serial one; interruptible."""
    kind, interrupted = sweep_target.kind, False
    try:
        if loads is None:
            first = 1.0 if kind == "concurrency" else sweep_target.serial_rate() * FIRST_RATE
            most = float(sweep_target.max_requests) if kind == "concurrency" else math.inf
            double_until_flat(lambda value: sweep_target.measure(kind, value), first, most)
        else:
            for value in loads:
                sweep_target.measure(kind, value)
    except KeyboardInterrupt:
        if not sweep_target.points:
            raise
        interrupted = True
    return sweep_target.record(interrupted=interrupted)


def double_until_flat(
    measure: Callable[[float], Mapping[str, Any]], first: float, most: float
) -> None:
    """Measure `first`, twice that and so on up to `most`, until throughput levels off."""
    value, best = first, 0.0
    for _ in range(MAX_STEPS):
        point = measure(value)
        throughput = point["output_throughput"] or 0.0
        if throughput < best * (1 + LEAST_GAIN) or value >= most or not point["kept_up"]:
            return
        best = max(best, throughput)
        value = min(value * 2, most)


def search_slo(sweep_target: SweepTarget, limits: str, share: float) -> dict[str, Any]:
    """Find the highest rate (to within 5 %) or concurrency (exactly) that meets the limits, which are also
    the goodput limits of the sweep target. Rates start at a quarter of the serial rate. Returns the record of
    the sweep with the result under `slo`; an interrupted search has none."""
    if not 0 < share <= 1:
        raise BadInput(f"--slo-share is {share}: it must be above 0 and at most 1")

    def keeps(load: float) -> bool:
        point = sweep_target.measure(sweep_target.kind, load)
        return point["kept_up"] and point["good_share"] is not None and point["good_share"] >= share

    if sweep_target.kind == "rate":
        lowest = sweep_target.serial_rate() * LOWEST_RATE
        result = highest(keeps, lowest, lowest * 2**MAX_DOUBLINGS, whole=False)
    else:
        result = highest(keeps, 1, sweep_target.max_requests, whole=True)
    slo = {
        "limits": limits,
        "share": share,
        "by": sweep_target.kind,
        "best": result.best,
        "lowest_failed": result.failed,
        "precision": PRECISION if sweep_target.kind == "rate" else 1,
        "rule": RULE,
    }
    return {**sweep_target.record(), "slo": slo}


def highest(keeps: Callable[[float], bool], good: float, most: float, *, whole: bool) -> SloResult:
    """Double `good` up to `most` until a load fails, then bisect geometrically to 5 %, or to adjacent whole
    loads."""
    if not keeps(good):
        return SloResult(None, good)
    bad = None
    while bad is None and good < most:
        load = min(good * 2, most)
        good, bad = (load, None) if keeps(load) else (good, load)
    while bad is not None and (bad - good > 1 if whole else bad / good > 1 + PRECISION):
        load = (good + bad) // 2 if whole else math.sqrt(good * bad)
        good, bad = (load, bad) if keeps(load) else (good, load)
    return SloResult(good, bad)
