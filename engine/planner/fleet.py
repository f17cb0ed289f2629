"""Fewest GPUs for a rate of requests within an SLO: replicas of a deployment, each with an equal share.

The closed form gives the rate that each division of each GPU keeps, and so the number of replicas. The best
of them are simulated with Poisson arrivals, with the fewest replicas that keep the limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any

from ...base.errors import BadInput
from .devices import Device
from .load_plan import LoadPlan, LoadPlanner
from .memory import Deployment
from .solver import Solver

SIMULATED_KINDS, SIMULATIONS = 3, 4
"""Kinds of GPU that are simulated at most, and simulations of each."""
MOST_GPUS = 100_000


@dataclass(frozen=True, slots=True)
class Fleet:
    """GPUs of one kind for a rate. `kept_rate` is the highest rate that a replica keeps in closed form;
    `simulated` is a replica under its share, where it was simulated."""

    device: Device
    deployment: Deployment
    replicas: int
    kept_rate: float
    dollars_per_hour: float | None
    simulated: LoadPlan | None = None

    @property
    def gpus(self) -> int:
        return self.replicas * self.deployment.gpus

    @property
    def order(self) -> tuple[int, float, int]:
        price = inf if self.dollars_per_hour is None else self.dollars_per_hour
        return self.gpus, price, self.replicas

    def resized(self, replicas: int, simulated: LoadPlan | None) -> Fleet:
        price = self.dollars_per_hour
        if price is not None:
            price *= replicas / self.replicas
        return replace(self, replicas=replicas, dollars_per_hour=price, simulated=simulated)


def least_fleets(solvers: Sequence[Solver], rate: float) -> list[Fleet]:
    """The best fleet of each kind of GPU for `rate` requests per second within the load's SLO, the fewest
    GPUs first. Raises BadInput: there is no load, or none with an SLO, or it has a rate of its own; or no GPU
    keeps the limits, not even for one request."""
    load = solvers[0].workload.load
    if load is None or load.slo is None:
        raise BadInput('--target-request-rate needs limits to keep: --slo "ttft:1s tpot:30ms"')
    if load.load.rate is not None:
        raise BadInput("--target-request-rate and --request-rate are two rates: leave one out")
    if not 0 < rate < inf:
        raise BadInput(f"--target-request-rate {rate:g}: requests per second, above 0, are needed")
    by_rate = replace(load, slo=replace(load.slo, by="rate"))
    planners: dict[str, LoadPlanner] = {}
    fleets = []
    for solver in solvers:
        device, setup = solver.device, solver.setup
        if device.bandwidth is None or not device.peaks or device.kind == "cpu":
            continue
        planner = LoadPlanner(replace(solver, workload=replace(solver.workload, load=by_rate)))
        planners[device.name] = planner
        deployments = [solver.choose()[0]]
        if setup.has_free_sizes and not device.is_single:
            deployments = [*solver.machine_arrangements()]
        kinds = (_near(planner, solver, option, rate) for option in deployments)
        if best := min(filter(None, kinds), key=lambda fleet: fleet.order, default=None):
            fleets.append(best)
    if not fleets:
        raise BadInput(
            "no division of these GPUs keeps the limits of --slo, not even for one request: raise a "
            "limit, or name other GPUs"
        )
    return _simulated(planners, fleets, rate)


def _near(
    planner: LoadPlanner, solver: Solver, deployment: Deployment, rate: float
) -> Fleet | None:
    kept = planner.kept_rate(deployment)
    if kept is None or (replicas := ceil(rate / kept)) * deployment.gpus > MOST_GPUS:
        return None
    price = solver.setup.price_of(solver.device)
    dollars = None if price is None else price.dollars * replicas * deployment.gpus
    return Fleet(solver.device, deployment, replicas, kept, dollars)


def _simulated(planners: dict[str, LoadPlanner], fleets: list[Fleet], rate: float) -> list[Fleet]:
    """The fleets with the best ones simulated, until the best one is. The others get more replicas than
    in closed form by the same factor, because it is the load's spread that takes them."""
    ratio = 1.0
    for _ in range(SIMULATED_KINDS):
        fleets.sort(key=lambda fleet: fleet.order)
        first = fleets[0]
        if first.simulated is not None:
            break
        fleets[0] = _with_least_replicas(planners[first.device.name], first, rate)
        ratio = max(ratio, fleets[0].replicas / first.replicas)
    scaled = [
        fleet if fleet.simulated else fleet.resized(ceil(ratio * fleet.replicas), None)
        for fleet in fleets
    ]
    return sorted(scaled, key=lambda fleet: (fleet.simulated is None, *fleet.order))


def _with_least_replicas(planner: LoadPlanner, fleet: Fleet, rate: float) -> Fleet:
    """The fleet with the fewest replicas that keep the limits, found around its own number."""
    fails, replicas = 0, fleet.replicas
    for _ in range(SIMULATIONS):
        plan = planner.at_rate(fleet.deployment, rate / replicas)
        if planner.keeps(plan):
            fleet = fleet.resized(replicas, plan)
            another = (fails + replicas) // 2 if fails else replicas - ceil(replicas / 10)
        else:
            fails = replicas
            another = (fails + fleet.replicas) // 2 if fleet.simulated else ceil(1.25 * replicas)
        if not another or (fleet.simulated and another in (fails, fleet.replicas)):
            return fleet
        replicas = another
    return fleet if fleet.simulated else fleet.resized(replicas, None)


def fleet_as_dict(fleet: Fleet) -> dict[str, Any]:
    sizes = {name: getattr(fleet.deployment, name) for name in ("tp", "pp", "ep", "attention_dp")}
    return {
        "gpu": fleet.device.name,
        "gpus": fleet.gpus,
        "replicas": fleet.replicas,
        **sizes,
        "kept_rate_per_replica": round(fleet.kept_rate, 4),
        "dollars_per_hour": fleet.dollars_per_hour,
        "is_simulated": fleet.simulated is not None,
    }
