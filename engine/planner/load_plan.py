"""A deployment under the load of a plan: simulated, or the highest load within an SLO and what it costs; and
the fewest GPUs for a rate of requests within an SLO, as replicas that share it equally.

The closed form gives the rate that each division of each GPU keeps, and so the number of replicas. The best
of them are simulated with Poisson arrivals, with the fewest replicas that keep the limits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import ceil, floor, inf
from typing import Any

from ...base.errors import BadInput
from ..base.units import PRECISION, SloResult, highest_near
from ..scheduling.scheduler_config import SchedulerConfig
from .devices import Device, HourPrice
from .expected import Loop
from .load import Load, LoadResult, Prediction, Slo
from .memory import Deployment
from .setup import MILLION, SECONDS_PER_HOUR
from .simulation import COUNTED, SimulatedServer, simulate
from .solver import Solver
from .step_model import TimesSteps

SIMULATED_ARRANGEMENTS = 2
"""Parallel sizes of a device that are simulated: those of the least GPU time per token in closed form."""
SEARCHED_SEQUENCES = 48
"""Sequences that a search simulates, each for a bundle of equal ones."""
SEARCHED_REQUESTS = 200
"""Requests of a search that count; at least one per client."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A deployment under a load. `result` has the requests whose means are those of `predicted`; where a rate
    is beyond the capacity, they are those of a server with all places taken, without the growing queue.
    `searched` is the result of the search for the load, if it was not given. If the search found no load
    within the limits, this is the lowest."""

    deployment: Deployment
    load: Load
    result: LoadResult
    predicted: Prediction
    num_blocks: int
    searched: SloResult | None = None

    @property
    def keeps_slo(self) -> bool:
        return self.searched is None or self.searched.best is not None

    @property
    def queue_growth(self) -> float:
        """Requests per second that arrive and are not served; 0 if the load is kept."""
        return max(0.0, (self.load.rate or 0.0) - self.result.requests_per_second)

    @property
    def gpu_hours_per_million(self) -> float:
        return self.deployment.gpus * MILLION / self.predicted.throughput / SECONDS_PER_HOUR


_SIMULATIONS = deque[tuple[tuple[Any, ...], LoadResult]](maxlen=64)


def _remembered(server: SimulatedServer, clock: TimesSteps, load: Load, counted: int) -> LoadResult:
    """`simulate`, once for equal arguments, some of which have no hash: mixtures of the same kinds differ in
    bytes alone, which are no limit where memory is ample."""
    arguments = server, clock, load, counted
    for known, result in _SIMULATIONS:
        if known == arguments:
            return result
    _SIMULATIONS.append((arguments, simulate(*arguments)))
    return _SIMULATIONS[-1][1]


class LoadPlanner:
    """Plans the load of a solver's workload on its kind of device."""

    def __init__(self, solver: Solver) -> None:
        assert solver.workload.load is not None
        self._asked, self._solver, self._device = solver.workload.load, solver, solver.device
        self._expected = cache(solver.expected)

    def plan(self, deployments: Iterable[Deployment]) -> LoadPlan | None:
        """The load on the first deployment that fits a request; with an SLO, on the one of least GPU time per
        token. None if none fits."""
        slo, deployments = self._asked.slo, self._fitting(deployments)
        if not deployments:
            return None
        if slo is None:
            return self.asked(deployments[0])
        near = sorted(deployments, key=self._near_cost)[:SIMULATED_ARRANGEMENTS]
        plans = [self._searched(deployment, slo) for deployment in near]
        return self._confirmed(min(plans, key=order_of), slo)

    def _fitting(self, deployments: Iterable[Deployment]) -> list[Deployment]:
        longest = self._asked.load.longest
        return [
            deployment
            for deployment in deployments
            if self._num_blocks(deployment) // deployment.pp > ceil(longest / deployment.block_size)
        ]

    def kept_rate(self, deployment: Deployment) -> float | None:
        """The highest rate within the SLO, in closed form; None if not even one request keeps it."""
        if not self._fitting([deployment]):
            return None
        state = self._steady(deployment, self._near_concurrency(deployment), at_once=False)
        output = self._asked.load.mean_lengths()[1]
        return state.throughput / output if self._is_near(state) else None

    def at_rate(self, deployment: Deployment, rate: float) -> LoadPlan:
        assert self._asked.slo is not None
        bundle = ceil(self._in_flight(deployment, rate) / SEARCHED_SEQUENCES)
        return self._at(deployment, self._asked.slo, rate, bundle)

    def asked(self, deployment: Deployment) -> LoadPlan:
        return self._simulated(deployment, self._asked.load, COUNTED)

    def keeps(self, plan: LoadPlan) -> bool:
        assert self._asked.slo is not None
        return self._asked.slo.kept_by(plan.load, plan.result)

    def nearest(self, deployments: Iterable[Deployment]) -> tuple[Deployment, Prediction] | None:
        """The deployment of least GPU time per token within the SLO, and its means, in closed form; None if
        none keeps the SLO."""
        near = min(self._fitting(deployments), key=self._near_cost, default=None)
        if near is None:
            return None
        state = self._steady(near, self._near_concurrency(near))
        return (near, state) if self._is_near(state) else None

    def _near_cost(self, deployment: Deployment) -> tuple[bool, float]:
        """GPU time per token at the highest concurrency within the SLO, in closed form."""
        state = self._steady(deployment, self._near_concurrency(deployment))
        return not self._is_near(state), deployment.gpus / state.throughput

    def _is_near(self, state: Prediction) -> bool:
        assert self._asked.slo is not None
        return self._asked.slo.near(state, self._asked.load.mean_lengths()[1])

    def _near_concurrency(self, deployment: Deployment) -> int:
        most, steady = self._most_sequences(deployment), partial(self._steady, deployment)
        search = highest_near(lambda n: self._is_near(steady(int(n))), 16, 1, most, whole=True)
        return int(search.best or 1)

    def _most_sequences(self, deployment: Deployment) -> int:
        """Sequences that run at once within the limits of batch and cache."""
        mean = ceil(sum(self._asked.load.mean_lengths()))
        reserve = self._solver.reserve(deployment)
        return max(1, deployment.max_sequences(self._device.memory_bytes, reserve, mean))

    def _steady(self, deployment: Deployment, concurrency: int, at_once: bool = True) -> Prediction:
        """The closed form of the load, of equal requests."""
        prompt, output = map(ceil, self._asked.load.mean_lengths())
        most, cached = self._most_sequences(deployment), self._asked.load.cached_tokens(prompt)
        expected = self._expected(deployment)
        return expected.loaded(Loop(prompt, output, concurrency, most, cached), at_once)

    def _in_flight(self, deployment: Deployment, rate: float) -> int:
        """Fewest clients that send requests at this rate; all places where not even they do."""
        output, most = ceil(self._asked.load.mean_lengths()[1]), self._most_sequences(deployment)

        def is_less(count: float) -> bool:
            return self._steady(deployment, int(count), at_once=False).throughput < rate * output

        return int(highest_near(is_less, 16, 1, most, whole=True).failed or most)

    def _searched(self, deployment: Deployment, slo: Slo) -> LoadPlan:
        """The highest load within the SLO, in bundles, from the one that the closed form expects."""
        guess = self._near_concurrency(deployment)
        bundle = ceil(guess / SEARCHED_SEQUENCES)
        if slo.by == "rate":
            state, output = self._steady(deployment, guess), self._asked.load.mean_lengths()[1]
            rate = state.throughput / output
            least, first, most = rate / 1000, rate / 2, rate * 1000
        else:
            least, first, most = 1.0, float(guess), float(self._most_sequences(deployment))

        def keeps(value: float) -> bool:
            return self.keeps(self._at(deployment, slo, value, bundle))

        result = highest_near(keeps, first, least, most, whole=slo.by == "concurrency")
        plan = self._at(deployment, slo, result.best or least, bundle)
        return replace(plan, searched=result)

    def _confirmed(self, plan: LoadPlan, slo: Slo) -> LoadPlan:
        """A plan that was found in bundles, with its load lowered until it keeps the limits without them."""
        assert plan.searched is not None
        value, failed = plan.searched.best, plan.searched.failed
        while value is not None:
            plan = self._at(plan.deployment, slo, value)
            if self.keeps(plan):
                break
            lower = value / (1 + PRECISION)
            failed, value = value, floor(lower) or None if slo.by == "concurrency" else lower
        return replace(plan, searched=SloResult(value, failed))

    def _at(self, deployment: Deployment, slo: Slo, value: float, bundle: int = 1) -> LoadPlan:
        by_rate = slo.by == "rate"
        clients, rate = (None, value) if by_rate else (int(value), None)
        load = replace(self._asked.load, concurrency=clients, rate=rate)
        counted = max(SEARCHED_REQUESTS, load.concurrency or bundle * SEARCHED_SEQUENCES)
        return self._simulated(deployment, load, counted, bundle)

    def _simulated(
        self, deployment: Deployment, load: Load, counted: int, bundle: int = 1
    ) -> LoadPlan:
        """The load, simulated, with the times of the closed form, which is fitted: clients of equal requests
        have its means; under other loads a token takes as much longer, and a request begins its host's time
        later."""
        rate, expected = load.rate, self._expected(deployment)
        clients = load.concurrency or self._in_flight(deployment, rate or 0.0)
        means = self._steady(deployment, clients, at_once=rate is None)
        prompt, output = map(ceil, load.mean_lengths())
        equal = replace(load, lengths=((prompt, output),), concurrency=clients, rate=None)
        server = self._server(deployment, equal, bundle)
        result = _remembered(server, expected.clock, equal, counted)
        ttft = means.ttft_seconds / result.ttft.mean
        tpot = means.tpot_seconds / result.tpot.mean if output > 1 else ttft
        is_kept = rate is None or means.throughput >= rate * output
        if load == equal or not is_kept:
            result = result.scaled(ttft, tpot)
        else:
            # Steps that take so much longer, under that rate, are these under as much higher a rate.
            faster = load if rate is None else replace(load, rate=rate * tpot)
            server = self._server(deployment, load, bundle)
            result = _remembered(server, expected.clock, faster, counted).scaled(tpot, tpot)
            result = result.delayed(expected.floor(prompt, load.cached_tokens(prompt)))
            result = result if rate is None else result.at_rate(rate)
        predicted = Prediction(
            result.in_flight,
            result.ttft.mean if is_kept else inf,
            result.tpot.mean,
            result.output_tokens_per_second,
            expected.band(result.in_flight),
        )
        return LoadPlan(deployment, load, result, predicted, server.num_blocks)

    def _server(self, deployment: Deployment, load: Load, bundle: int) -> SimulatedServer:
        """The server of a deployment; each of its sequences stands for a `bundle` of equal ones. It has no
        more blocks than the load can use, because they would only take time."""
        reserve = self._solver.reserve(deployment)
        sequences = ceil(reserve.max_num_seqs / bundle)
        limits = SchedulerConfig(
            max_num_batched_tokens=max(reserve.chunk_tokens // bundle, sequences),
            max_num_seqs=sequences,
            block_size=deployment.block_size,
            max_model_len=load.longest,
        )
        ranks, least_blocks = deployment.attention_dp * bundle, limits.num_blocks(load.longest)
        if load.concurrency is not None:
            sequences = min(sequences, ceil(load.concurrency / (ranks * deployment.pp)))
        useful = ceil((1 + limits.watermark) * (sequences + 1) * least_blocks) + 1
        num_blocks = min(self._num_blocks(deployment) // (bundle * deployment.pp), useful)
        return SimulatedServer(
            limits,
            max(2, num_blocks),
            ranks=ranks,
            stages=deployment.pp,
            caches_prefixes=load.prefix_share > 0,
        )

    def _num_blocks(self, deployment: Deployment) -> int:
        """Blocks of the KV cache of a rank. Per-sequence state and window savings are converted into blocks
        at the mean length."""
        tokens = ceil(sum(self._asked.load.mean_lengths()))
        reserve = self._solver.reserve(deployment)
        budget = deployment.kv_budget(self._device.memory_bytes, reserve)
        per_sequence = deployment.kv_bytes(tokens, reserve)
        blocks = ceil(tokens / deployment.block_size)
        if not per_sequence:
            return (reserve.max_num_seqs + 1) * blocks if budget > 0 else 0
        return max(0, budget) * blocks // per_sequence


def order_of(plan: LoadPlan) -> tuple[bool, float]:
    return not plan.keeps_slo, plan.gpu_hours_per_million


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
    price: HourPrice | None
    simulated: LoadPlan | None = None

    @property
    def gpus(self) -> int:
        return self.replicas * self.deployment.gpus

    @property
    def order(self) -> tuple[int, float, int]:
        price = inf if self.dollars_per_hour is None else self.dollars_per_hour
        return self.gpus, price, self.replicas

    @property
    def dollars_per_hour(self) -> float | None:
        return None if self.price is None else self.price.dollars * self.gpus


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
    return Fleet(solver.device, deployment, replicas, kept, price)


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
        fleet if fleet.simulated else replace(fleet, replicas=ceil(ratio * fleet.replicas))
        for fleet in fleets
    ]
    return sorted(scaled, key=lambda fleet: (fleet.simulated is None, *fleet.order))


def _with_least_replicas(planner: LoadPlanner, fleet: Fleet, rate: float) -> Fleet:
    """The fleet with the fewest replicas that keep the limits, found around its own number."""
    fails, replicas = 0, fleet.replicas
    for _ in range(SIMULATIONS):
        plan = planner.at_rate(fleet.deployment, rate / replicas)
        if planner.keeps(plan):
            fleet = replace(fleet, replicas=replicas, simulated=plan)
            another = (fails + replicas) // 2 if fails else replicas - ceil(replicas / 10)
        else:
            fails = replicas
            another = (fails + fleet.replicas) // 2 if fleet.simulated else ceil(1.25 * replicas)
        if not another or (fleet.simulated and another in (fails, fleet.replicas)):
            return fleet
        replicas = another
    return fleet if fleet.simulated else replace(fleet, replicas=replicas)
