"""Answers of a plan: does it fit and what would, how many users, what a million tokens cost, what would be
cheaper. Means are those of the closed form; under an SLO they are simulated.

What would fit is searched, and each option verified: levers that cost nothing come first (memory utilization,
the limits of a batch), then either a shorter context or smaller dtypes, the least reduced ones that suffice;
what is not needed is left out again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any

from ...base.errors import BadInput
from ..base.units import format_tokens
from .devices import devices
from .engine_rules import engine_rule
from .expected import Loop
from .load import Prediction
from .load_plan import LoadPlan, LoadPlanner
from .memory import Deployment
from .plan import DeploymentPlan, DevicePlan
from .plan_json import load_as_dict, means_as_dict, rounded
from .solver import Solver
from .weights import WeightRecipe, lighter_recipes, recipe_for

COMPARED = ("bf16", "fp8", "int4")
MOST_LINES = 3
LEAST_SAVING = 0.05


@dataclass(frozen=True, slots=True)
class FullLoad:
    """All places taken: the clients that fit at once, in closed form."""

    clients: int
    state: Prediction
    dollars_per_million: float | None


@dataclass(frozen=True, slots=True)
class Saving:
    """Another GPU or weight format for the same load, and the share of a token's cost that it saves."""

    options: str
    gpus: int
    gpu: str
    saved: float
    is_near_measured: bool


@dataclass(frozen=True, slots=True)
class FormatSpeed:
    """Tokens per second of a weight format on one deployment, in closed form: with `clients`, and with all
    `places` taken."""

    weights: str
    clients: int
    tokens_per_second: float
    places: int
    tokens_per_second_full: float


@dataclass(frozen=True, slots=True)
class Answer:
    """Answers about `device`, the first one of a plan that fits, or its first one: options with which devices
    that do not fit would, and one device where several are needed; the load with all places taken (None
    without a known speed, or if a given load is simulated); the highest load within the SLO, in clients or
    requests per second; cheaper ways, the cheapest first; the load of the request next to the highest one,
    with the share of its requests that keep the SLO; and weight formats, the fastest first."""

    device: DevicePlan
    would_fit: tuple[Change, ...]
    full: FullLoad | None
    users: float | None
    savings: tuple[Saving, ...]
    requested: tuple[LoadPlan, float] | None
    formats: tuple[FormatSpeed, ...]


def answer_of(plan: DeploymentPlan) -> Answer:
    first = plan.first_that_fits
    searched = None if first.load is None else first.load.searched
    full = None
    # With weights in RAM the places are as many as asked for.
    has_places = first.deployment.offload is None
    if first.expectation is not None and first.load is None and has_places:
        clients = first.max_concurrent_sequences
        state = first.expectation.loaded_by(plan.workload, clients, clients)
        gpus = first.expectation.deployment.gpus
        dollars = plan.setup.dollars_per_million(first.device, gpus, state.throughput)
        full = FullLoad(clients, state, dollars)
    return Answer(
        first,
        tuple(_would_fit(plan, first))[:MOST_LINES],
        full,
        None if searched is None else searched.best,
        tuple(_savings(plan, first))[:MOST_LINES],
        _requested(plan, first),
        tuple(format_speeds(plan, first)),
    )


def _requested(plan: DeploymentPlan, first: DevicePlan) -> tuple[LoadPlan, float] | None:
    """The clients or the rate that are asked for, on the division that keeps the highest load."""
    load = plan.workload.load
    is_given = load is not None and (load.load.rate is not None or plan.workload.sequences > 1)
    if load is None or load.slo is None or first.load is None or not is_given:
        return None
    (solver,) = plan.solvers([first.device])
    requested = LoadPlanner(solver).asked(first.load.deployment)
    return requested, load.slo.share_of(requested.result)


def _would_fit(plan: DeploymentPlan, first: DevicePlan) -> Iterator[Change]:
    others = plan.devices if len(plan.devices) <= MOST_LINES else ()
    for device in (first, *(d for d in others if d is not first and not d.fits)):
        deployment = device.deployment
        if deployment.attention_dp > 1 or (device.fits and deployment.gpus == 1):
            continue
        (solver,) = plan.solvers([device.device])
        sizes = [(1, 1)] if plan.setup.has_free_sizes else []
        if not device.fits:
            sizes.append((deployment.tp, deployment.pp))
        for tp, pp in dict.fromkeys(sizes):
            yield from ways_to_fit(solver, tp, pp)


def _savings(plan: DeploymentPlan, first: DevicePlan) -> list[Saving]:
    """Other GPUs with these weights, and this one with lighter ones, that cost less by 5 % or more."""
    is_settled = first.device.kind == "cpu" or plan.setup.host is not None or plan.fleets
    if not first.fits or first.price is None or is_settled:
        return []
    priced = [d for d in devices() if d.name != first.gpu and plan.setup.price_of(d) is not None]
    solver, *others = plan.solvers([first.device, *priced])
    now = _least_cost(solver)
    if now is None:
        return []
    ways = [(f"--gpu {s.device.name.lower().replace(' ', '-')}", s) for s in others]
    for recipe in lighter_recipes(plan.recipe, plan.model.shape, plan.model.plain_bytes):
        ways += [(f"--weights {recipe.name}", s) for s in plan.solvers([first.device], recipe)]
    savings = []
    for options, other in ways:
        cost = None
        with suppress(BadInput):
            cost = _least_cost(other)
        if cost is not None and cost[0] < (1 - LEAST_SAVING) * now[0]:
            saved, deployment = 1 - cost[0] / now[0], cost[1]
            band = other.expected(deployment).band(plan.workload.sequences)
            near = band is not None and band.is_near
            savings.append(Saving(options, deployment.gpus, other.device.name, saved, near))
    return sorted(savings, key=lambda saving: -saving.saved)


def _least_cost(solver: Solver) -> tuple[float, Deployment] | None:
    """Dollars of a million output tokens in closed form, and the deployment: at the SLO, at the clients that
    are asked for, or with all places taken. None: it does not fit, misses the SLO, or has no price."""
    work, setup = solver.workload, solver.setup
    if work.load is not None and work.load.slo is not None:
        nearest = LoadPlanner(solver).nearest(
            [*solver.machine_arrangements()] if setup.has_free_sizes else [solver.choose()[0]]
        )
        if nearest is None:
            return None
        deployment, state = nearest
    else:
        deployment, needed = solver.choose()
        places = solver.sequences(deployment)
        if needed is None or places < work.sequences:
            return None
        clients = work.sequences if work.sequences > 1 else places
        state = solver.expected(deployment).loaded_by(work, clients, places)
    dollars = setup.dollars_per_million(solver.device, deployment.gpus, state.throughput)
    return None if dollars is None else (dollars, deployment)


def format_speeds(plan: DeploymentPlan, device: DevicePlan) -> list[FormatSpeed]:
    """The planned format and other ones on the same GPUs at one load, the fastest with the plan's clients
    first; none where the speed is not known from the fit. A format that only stores fewer bits (W4A16) wins
    where reading weights takes the time. It loses where computing does, because it is multiplied in 16
    bits."""
    is_fitted = plan.setup.measured is None and device.expectation is not None
    if not is_fitted or device.device.kind == "cpu" or device.deployment.offload is not None:
        return []
    speeds = [_speed_of(plan, device, recipe) for recipe in _recipes(plan)]
    return sorted(filter(None, speeds), key=lambda speed: -speed.tokens_per_second)


def _recipes(plan: DeploymentPlan) -> Iterator[WeightRecipe]:
    """The planned format, and those of `COMPARED` that suit the model's widths and have other bits."""
    yield plan.recipe
    for name in COMPARED:
        with suppress(BadInput):
            recipe = recipe_for(name, plan.model.shape, plain_bytes=plan.model.plain_bytes)
            if recipe.bits != plan.recipe.bits:
                yield recipe


def _speed_of(plan: DeploymentPlan, device: DevicePlan, recipe: WeightRecipe) -> FormatSpeed | None:
    """The speed of a format on the division of the plan; None where it does not hold the clients."""
    work = plan.workload
    (solver,) = plan.solvers([device.device], recipe)
    deployment = replace(device.deployment, recipe=solver.recipe)
    places = solver.sequences(deployment)
    # The mean number in flight, which may be a hair above or below the clients of a closed loop.
    in_flight = work.sequences if device.predicted is None else device.predicted.clients
    clients = max(1, round(in_flight))
    if places < clients:
        return None
    expected = solver.expected(deployment)
    prompt, output, cached = work.prompt_tokens, work.answer_tokens, work.cached_tokens
    if work.load is not None:
        prompt, output = map(ceil, work.load.load.mean_lengths())
        cached = work.load.load.cached_tokens(prompt)
    few, full = (
        expected.loaded(Loop(prompt, output, count, places, cached)).throughput
        for count in (clients, places)
    )
    return FormatSpeed(recipe.name, clients, few, places, full)


def answer_as_dict(answer: Answer) -> dict[str, Any]:
    """JSON form of the answers; times in milliseconds."""
    full, requested = answer.full, {}
    if answer.requested is not None:
        load, share = answer.requested
        requested = {"requested_load": load_as_dict(load) | {"share_within_slo": round(share, 4)}}
    return {
        "gpu": answer.device.gpu,
        "gpus": answer.device.deployment.gpus,
        "engine": answer.device.engine,
        "fits": answer.device.fits,
        "would_fit": [asdict(change) for change in answer.would_fit],
        "full": full
        and means_as_dict(full.state)
        | {"dollars_per_million_output_tokens": rounded(full.dollars_per_million)},
        "highest_load_within_slo": answer.users,
        **requested,
        **({"formats": [asdict(speed) for speed in answer.formats]} if answer.formats else {}),
        "dollars_per_million_output_tokens": rounded(answer.device.dollars_per_million),
        "cheaper": [
            {**asdict(saving), "saved": rounded(saving.saved)} for saving in answer.savings
        ],
        "limit": answer.device.binding_constraint,
    }


HIGH_UTILIZATION = 0.95
SMALL_STEP_TOKENS = 2048
LEAST_CONTEXT = 1024
CONTEXTS = sorted({step << power for step in (1024, 1536) for power in range(12)}, reverse=True)
"""Round contexts: powers of two, and half as much again."""
_LEVERS = ("max_num_batched_tokens", "max_num_seqs", "utilization")


@dataclass(frozen=True, slots=True)
class Change:
    """Options, all together, with which the workload fits on `gpus` devices, and the sequences that it then
    holds at once."""

    gpu: str
    gpus: int
    options: tuple[str, ...]
    sequences: int


def ways_to_fit(planned: Solver, tp: int, pp: int) -> list[Change]:
    """Up to two ways to fit `tp` x `pp` devices: by a shorter context, and by smaller dtypes."""
    if planned.workload.eviction is not None:
        return []
    divided = _with_setup(planned, tp=tp, pp=pp)
    with suppress(BadInput):
        if _fits(divided):
            return []
        trials = [_with_levers(divided)]
        if trials == [None]:
            lighter = map(_with_levers, _with_smaller_dtypes(divided))
            trials = [_shorter(divided), next(filter(None, lighter), None)]
        if trials == [None, None]:
            trials = [_shorter(trial) for trial in [*_with_smaller_dtypes(divided)][-1:]]
        return [_change(trial, planned) for trial in trials if trial is not None]
    return []


def _with_setup(trial: Solver, **changes: Any) -> Solver:
    return replace(trial, setup=replace(trial.setup, **changes))


def _sequences(trial: Solver) -> int:
    """Sequences that run at once."""
    deployment = trial.deployment(trial.setup.tp or 1, trial.setup.pp or 1)
    return 0 if deployment is None else trial.sequences(deployment)


def _fits(trial: Solver) -> bool:
    return _sequences(trial) >= trial.workload.sequences


def _pulled(trial: Solver, levers: tuple[str, ...] = _LEVERS) -> Solver:
    """The trial with the levers pulled that the user left alone."""
    sequences = trial.workload.sequences
    values: dict[str, float] = {
        "max_num_seqs": sequences,
        "max_num_batched_tokens": max(SMALL_STEP_TOKENS, sequences),
    }
    if trial.device.kind != "cpu":
        values["utilization"] = HIGH_UTILIZATION
    free = (name for name in levers if name in values and getattr(trial.setup, name) is None)
    return _with_setup(trial, **{name: values[name] for name in free})


def _with_levers(trial: Solver) -> Solver | None:
    """The trial with as few levers pulled as it needs; None: all of them are not enough."""
    if not _fits(_pulled(trial)):
        return None
    kept = _LEVERS
    for lever in _LEVERS:
        fewer = tuple(name for name in kept if name != lever)
        if _fits(_pulled(trial, fewer)):
            kept = fewer
    trial = _pulled(trial, kept)
    while "max_num_seqs" in kept:  # raise the limit of sequences to what then fits
        limit = trial.setup.max_num_seqs or 1
        sequences = _sequences(_with_setup(trial, max_num_seqs=2 * limit))
        if sequences <= limit:
            break
        trial = _with_setup(trial, max_num_seqs=sequences)
    return trial


def _shorter(trial: Solver) -> Solver | None:
    """The longest round context that fits; None: none does, or the lengths of a load are given."""
    work = trial.workload
    for context in CONTEXTS if work.load is None else ():
        if LEAST_CONTEXT <= context < work.context:
            with suppress(BadInput):  # a prompt, images or an answer that it has no room for
                shorter = replace(trial, workload=replace(work, context=context))
                if (fitting := _with_levers(shorter)) is not None:
                    return fitting
    return None


def _with_smaller_dtypes(trial: Solver) -> Iterator[Solver]:
    """Smaller dtypes, least reduced first: those of the cache before those of the weights."""
    model, work, stored = trial.model, trial.workload, engine_rule(trial.setup.engine).kv_dtypes
    small = next((name for name in ("fp8", "int8", "q8_0") if name in stored), work.kv_dtype)
    caches = [work.kv_dtype]
    if work.kv_dtype in ("bf16", "f16", "float32") and small != work.kv_dtype:
        caches.append(small)
    for recipe in (trial.recipe, *lighter_recipes(trial.recipe, model.shape, model.plain_bytes)):
        for cache in caches:
            if (recipe, cache) != (trial.recipe, work.kv_dtype):
                yield replace(trial, recipe=recipe, workload=replace(work, kv_dtype=cache))


def _change(trial: Solver, planned: Solver) -> Change:
    work, setup = trial.workload, trial.setup
    options = []
    if trial.recipe is not planned.recipe:
        options.append(f"--weights {trial.recipe.name}")
    if work.kv_dtype != planned.workload.kv_dtype:
        options.append(f"--kv-dtype {work.kv_dtype}")
    if work.context != planned.workload.context:
        options.append(f"--ctx {format_tokens(work.context).replace(',', '')}")
    names = {"utilization": "gpu-memory-utilization"}
    for name in reversed(_LEVERS):
        value = getattr(setup, name)
        if value != getattr(planned.setup, name):
            options.append(f"--{names.get(name, name).replace('_', '-')} {value:g}")
    gpus = (setup.tp or 1) * (setup.pp or 1)
    return Change(trial.device.name, gpus, tuple(options), _sequences(trial))
