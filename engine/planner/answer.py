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
from typing import Any

from ...base.errors import BadInput
from ..base.units import format_tokens
from .catalog import PlannedModel
from .devices import Device, devices
from .engine_rules import engine_rule
from .expected import Expectation
from .formats import FormatSpeed, format_speeds
from .load import Prediction
from .load_plan import LoadPlan, LoadPlanner
from .memory import Deployment
from .plan import DeploymentPlan, DevicePlan, solvers_on
from .plan_json import load_as_dict, rounded
from .setup import PlannedWorkload, Setup
from .solver import Solver
from .weights import WeightRecipe, lighter_recipes

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
    device = first.device
    (solver,) = solvers_on([device], plan.model, plan.recipe, plan.workload, plan.setup)
    planner = LoadPlanner(load, solver, device, plan.setup, plan.model.name)
    requested = planner.asked(first.load.deployment)
    return requested, load.slo.share_of(requested.result)


def _would_fit(plan: DeploymentPlan, first: DevicePlan) -> Iterator[Change]:
    model, setup = plan.model, plan.setup
    others = plan.devices if len(plan.devices) <= MOST_LINES else ()
    for device in (first, *(d for d in others if d is not first and not d.fits)):
        deployment = device.deployment
        if deployment.attention_dp > 1 or (device.fits and deployment.gpus == 1):
            continue
        recipe = setup.run_recipe(plan.recipe, model.shape, device.device)
        search = FitSearch(model, recipe, plan.workload, setup, device.device)
        sizes = [(1, 1)] if setup.has_free_sizes else []
        if not device.fits:
            sizes.append((deployment.tp, deployment.pp))
        for tp, pp in dict.fromkeys(sizes):
            yield from search.changes(tp, pp)


def _savings(plan: DeploymentPlan, first: DevicePlan) -> list[Saving]:
    """Other GPUs with these weights, and this one with lighter ones, that cost less by 5 % or more."""
    is_settled = first.device.kind == "cpu" or plan.setup.host is not None or plan.fleets
    if not first.fits or first.price is None or is_settled:
        return []
    priced = [d for d in devices() if d.name != first.gpu and plan.setup.price_of(d) is not None]
    planned = plan.model, plan.recipe, plan.workload, plan.setup
    solver, *other_solvers = solvers_on([first.device, *priced], *planned)
    now = _least_cost(plan, solver, first.device)
    if now is None:
        return []
    savings = []
    others = [
        (f"--gpu {device.name.lower().replace(' ', '-')}", other, device)
        for other, device in zip(other_solvers, priced, strict=True)
    ]
    for recipe in lighter_recipes(plan.recipe, plan.model.shape, plan.model.plain_bytes):
        (lighter,) = solvers_on([first.device], plan.model, recipe, *planned[2:])
        others.append((f"--weights {recipe.name}", lighter, first.device))
    for options, other, device in others:
        cost = None
        with suppress(BadInput):
            cost = _least_cost(plan, other, device)
        if cost is not None and cost[0] < (1 - LEAST_SAVING) * now[0]:
            saved, deployment = 1 - cost[0] / now[0], cost[1]
            expected = Expectation.of(deployment, device, plan.model.name, plan.setup)
            band = expected.band(plan.workload.sequences)
            near = band is not None and band.is_near
            savings.append(Saving(options, deployment.gpus, device.name, saved, near))
    return sorted(savings, key=lambda saving: -saving.saved)


def _least_cost(
    plan: DeploymentPlan, solver: Solver, device: Device
) -> tuple[float, Deployment] | None:
    """Dollars of a million output tokens in closed form, and the deployment: at the SLO, at the clients that
    are asked for, or with all places taken. None: it does not fit, misses the SLO, or has no price."""
    work, model, setup = plan.workload, plan.model, plan.setup
    if work.load is not None and work.load.slo is not None:
        planner = LoadPlanner(work.load, solver, device, setup, model.name)
        nearest = planner.nearest(
            [*solver.machine_arrangements()] if setup.has_free_sizes else [solver.choose(device)[0]]
        )
        if nearest is None:
            return None
        deployment, state = nearest
    else:
        deployment, needed = solver.choose(device)
        places = solver.sequences(deployment, device)
        if needed is None or places < work.sequences:
            return None
        expected = Expectation.of(deployment, device, model.name, setup)
        clients = work.sequences if work.sequences > 1 else places
        state = expected.loaded_by(work, clients, places)
    dollars = setup.dollars_per_million(device, deployment.gpus, state.throughput)
    return None if dollars is None else (dollars, deployment)


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
        "full": None
        if full is None
        else {
            "clients": full.clients,
            "ttft_ms": round(1e3 * full.state.ttft_seconds, 3),
            "tpot_ms": round(1e3 * full.state.tpot_seconds, 3),
            "throughput_tokens_per_s": round(full.state.throughput, 2),
            "dollars_per_million_output_tokens": rounded(full.dollars_per_million),
        },
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


@dataclass(frozen=True, slots=True)
class _Trial:
    recipe: WeightRecipe
    workload: PlannedWorkload
    setup: Setup


class FitSearch:
    """Searches for options for one model and workload on one kind of device."""

    def __init__(
        self,
        model: PlannedModel,
        recipe: WeightRecipe,
        workload: PlannedWorkload,
        setup: Setup,
        device: Device,
    ) -> None:
        self._model, self._device = model, device
        self._asked = _Trial(recipe, workload, setup)

    def changes(self, tp: int, pp: int) -> list[Change]:
        """Up to two ways to fit `tp` x `pp` devices: by a shorter context, and by smaller dtypes."""
        work = self._asked.workload
        if work.eviction is not None:
            return []
        divided = replace(self._asked, setup=replace(self._asked.setup, tp=tp, pp=pp))
        with suppress(BadInput):
            if self._fits(divided):
                return []
            trials = [self._with_levers(divided)]
            if trials == [None]:
                lighter = map(self._with_levers, self._dtypes(divided))
                trials = [self._shorter(divided), next(filter(None, lighter), None)]
            if trials == [None, None]:
                trials = [self._shorter(trial) for trial in [*self._dtypes(divided)][-1:]]
            return [self._change(trial) for trial in trials if trial is not None]
        return []

    def _held(self, trial: _Trial) -> int:
        """Sequences that run at once."""
        solver = Solver(self._model.shape, trial.recipe, trial.workload, trial.setup)
        deployment = solver.deployment(trial.setup.tp or 1, trial.setup.pp or 1)
        return 0 if deployment is None else solver.sequences(deployment, self._device)

    def _fits(self, trial: _Trial) -> bool:
        return self._held(trial) >= trial.workload.sequences

    def _pulled(self, trial: _Trial, levers: tuple[str, ...] = _LEVERS) -> _Trial:
        """The trial with the levers pulled that the user left alone."""
        setup, sequences = trial.setup, trial.workload.sequences
        values = {
            "utilization": HIGH_UTILIZATION,
            "max_num_seqs": sequences,
            "max_num_batched_tokens": max(SMALL_STEP_TOKENS, sequences),
        }
        if self._device.kind == "cpu":
            del values["utilization"]
        changed = {
            name: value
            for name, value in values.items()
            if name in levers and getattr(setup, name) is None
        }
        return replace(trial, setup=replace(setup, **changed))

    def _with_levers(self, trial: _Trial) -> _Trial | None:
        """The trial with as few levers pulled as it needs; None: all of them are not enough."""
        if not self._fits(self._pulled(trial)):
            return None
        kept = _LEVERS
        for lever in _LEVERS:
            fewer = tuple(name for name in kept if name != lever)
            if self._fits(self._pulled(trial, fewer)):
                kept = fewer
        trial = self._pulled(trial, kept)
        while "max_num_seqs" in kept:  # raise the limit of sequences to what then fits
            limit = trial.setup.max_num_seqs or 1
            raised = replace(trial, setup=replace(trial.setup, max_num_seqs=2 * limit))
            sequences = self._held(raised)
            if sequences <= limit:
                break
            trial = replace(trial, setup=replace(trial.setup, max_num_seqs=sequences))
        return trial

    def _shorter(self, trial: _Trial) -> _Trial | None:
        """The longest round context that fits; None: none does, or the lengths of a load are given."""
        work = trial.workload
        if work.load is not None:
            return None
        for context in CONTEXTS:
            if not LEAST_CONTEXT <= context < work.context:
                continue
            with suppress(BadInput):  # a prompt, images or an answer that it has no room for
                shorter = replace(trial, workload=replace(work, context=context))
                if (fitting := self._with_levers(shorter)) is not None:
                    return fitting
        return None

    def _dtypes(self, trial: _Trial) -> Iterator[_Trial]:
        """Smaller dtypes, least reduced first: those of the cache before those of the weights."""
        work, stored = trial.workload, engine_rule(trial.setup.engine).kv_dtypes
        small = next((name for name in ("fp8", "int8", "q8_0") if name in stored), work.kv_dtype)
        caches = [work.kv_dtype]
        if work.kv_dtype in ("bf16", "f16", "float32") and small != work.kv_dtype:
            caches.append(small)
        model = self._model
        recipes = [trial.recipe, *lighter_recipes(trial.recipe, model.shape, model.plain_bytes)]
        for recipe in recipes:
            for cache in caches:
                if (recipe, cache) != (trial.recipe, work.kv_dtype):
                    yield replace(trial, recipe=recipe, workload=replace(work, kv_dtype=cache))

    def _change(self, trial: _Trial) -> Change:
        request, work, setup = self._asked, trial.workload, trial.setup
        options = []
        if trial.recipe is not request.recipe:
            options.append(f"--weights {trial.recipe.name}")
        if work.kv_dtype != request.workload.kv_dtype:
            options.append(f"--kv-dtype {work.kv_dtype}")
        if work.context != request.workload.context:
            options.append(f"--ctx {format_tokens(work.context).replace(',', '')}")
        names = {"utilization": "gpu-memory-utilization"}
        for name in reversed(_LEVERS):
            value = getattr(setup, name)
            if value != getattr(request.setup, name):
                options.append(f"--{names.get(name, name).replace('_', '-')} {value:g}")
        gpus = (setup.tp or 1) * (setup.pp or 1)
        return Change(self._device.name, gpus, tuple(options), self._held(trial))
