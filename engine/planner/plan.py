"""Deployment plan of a model on several devices: fit, concurrency, step times, cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from ...base.errors import BadInput
from .cache_size import (
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    CacheRequest,
    CacheSize,
    KvCacheBudget,
    has_sparse_latents,
    kv_dtype,
    size_cache,
    size_states,
)
from .catalog import PlannedModel
from .devices import Device, HourPrice
from .engine_rules import RULES, engine_rule, resident_tokens
from .expected import Expectation, fitted_efficiency
from .load import Prediction
from .load_plan import Fleet, LoadPlan, LoadPlanner, order_of
from .memory import Deployment, EvictedCache, Reserve, check_evictable
from .setup import Cost, PlannedWorkload, Setup, cost_of
from .solver import Constraint, DtypeChoice, Relaxation, Solver
from .speed import DATA_SHEET, Efficiency, StepTime, decode_time, prefill_time
from .weights import WeightRecipe, weight_bytes


@dataclass(frozen=True, slots=True)
class SpeculationGain:
    """Expected gain of speculative decoding: tokens per verification, its time in plain decode steps, and
    the speed-up."""

    expected_tokens: float
    verification_steps: float
    speedup: float
    tpot_seconds: float


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The workload on `tp` x `pp` of one device; all bytes per rank, times None if the speed is unknown.
    `encode_seconds` is the time of a prompt's images in the vision encoder, before its prefill. `load` is the
    deployment under the load that is asked for, if one is. `dollars_per_million` is for output tokens, with
    the prefill of their prompts. `beside` is the same device under a second engine, without a simulated load.

    `gpus_needed` is None if the largest arrangement tried does not fit the workload. `max_context` is for
    the workload's number of sequences, without a KV-cache budget. The binding constraint is what prevents
    one more sequence; the relaxations are changes that would allow more."""

    device: Device
    deployment: Deployment
    reserve: Reserve
    sequences: int
    gpus_needed: int | None
    fits: bool
    kv_budget_bytes: int
    kv_bytes: int
    max_concurrent_sequences: int
    max_context: int
    binding_constraint: Constraint
    relaxations: tuple[Relaxation, ...]
    dtypes_that_fit: tuple[DtypeChoice, ...]
    engine_cache: CacheSize | None
    decode: StepTime | None = None
    decode_bound: StepTime | None = None
    prefill: StepTime | None = None
    prefill_bound: StepTime | None = None
    speculation: SpeculationGain | None = None
    cost: Cost | None = None
    evicted: EvictedCache | None = None
    encode_seconds: float | None = None
    load: LoadPlan | None = None
    expectation: Expectation | None = None
    predicted: Prediction | None = None
    engine: str = "llmopt"
    price: HourPrice | None = None
    dollars_per_million: float | None = None
    beside: DevicePlan | None = None

    @property
    def gpu(self) -> str:
        return self.device.name

    @property
    def weight_bytes(self) -> int:
        return self.deployment.weight_bytes

    @property
    def activation_bytes(self) -> int:
        return self.deployment.activation_bytes(self.reserve)

    @property
    def overhead_bytes(self) -> int:
        return self.deployment.overhead_bytes()

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.predicted is None else self.predicted.throughput

    @property
    def tokens_per_second_bound(self) -> float | None:
        """Output tokens per second while all sequences decode at their full context and none is prefilled."""
        if self.decode is None:
            return None
        tpot = self.decode.seconds if self.speculation is None else self.speculation.tpot_seconds
        return self.sequences / tpot


@dataclass(frozen=True, slots=True)
class DeploymentPlan:
    """Plans of a model and a workload, one per device. `fleets` are those of a rate that was asked for, the
    fewest GPUs first; the devices then are those of a replica of the first one."""

    model: PlannedModel
    recipe: WeightRecipe
    workload: PlannedWorkload
    setup: Setup
    devices: tuple[DevicePlan, ...] = ()
    warnings: tuple[str, ...] = ()
    fleets: tuple[Fleet, ...] = ()

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self.model.shape, self.recipe)

    @property
    def first_that_fits(self) -> DevicePlan:
        return next((device for device in self.devices if device.fits), self.devices[0])

    def solvers(
        self, devices: Sequence[Device], recipe: WeightRecipe | None = None
    ) -> list[Solver]:
        """A solver for each device, with the weights as the engine holds them there."""
        shared: dict[Any, Deployment | None] = {}
        model, recipe, planned = self.model, recipe or self.recipe, (self.workload, self.setup)
        return [
            Solver(
                model, self.setup.run_recipe(recipe, model.shape, device), *planned, device, shared
            )
            for device in devices
        ]

    @property
    def efficiency(self) -> Efficiency:
        expected = next((d.expectation for d in self.devices if d.expectation), None)
        return expected.efficiency if expected else self.setup.measured or fitted_efficiency()


def make_plan(
    model: PlannedModel,
    recipe: WeightRecipe,
    workload: PlannedWorkload,
    devices: Sequence[Device],
    setup: Setup = Setup(),
    *,
    ranked: bool = False,
    beside: str | None = None,
) -> DeploymentPlan:
    """Plan the workload on each device; without a parallel size in the setup, on as few as fit it.
    `ranked` sorts by fit, then by the cost within an SLO, or without one by number of devices and speed.
    `beside` is a second engine for every GPU. Raises BadInput: heads or layers do not divide as requested, or
    the KV dtype does not suit the model."""
    kv_dtype(workload.kv_dtype).bytes_per_element(model.shape)
    if workload.eviction is not None:
        check_evictable(model.shape, workload.eviction.budget)
        if setup.engine != "llmopt":
            raise BadInput(f"kv_budget is an option of llmopt's engine, not of {setup.engine}")
        if setup.speculation is not None:
            raise BadInput("--draft-tokens: draft tokens and a kv_budget do not go together")
    planned = DeploymentPlan(model, recipe, workload, setup)
    plans = [_on_device(solver) for solver in planned.solvers(devices)]
    setups = [setup]
    if beside is not None:
        second = replace(setup, engine=beside, engine_version="")
        setups.append(second)
        without_load = replace(planned, workload=replace(workload, load=None), setup=second)
        solvers = without_load.solvers(devices)
        for index, (plan, solver) in enumerate(zip(plans, solvers, strict=True)):
            if plan.device.kind == "cpu":
                continue
            other = _on_device(solver)
            # llmopt's own cache is known for either engine
            cache = plan.engine_cache or other.engine_cache
            plans[index] = replace(plan, beside=other, engine_cache=cache)
    if ranked:
        plans.sort(key=_rank)
    warnings = tuple(_warnings(model, workload, setups, plans))
    return replace(planned, devices=tuple(plans), warnings=warnings)


def _rank(plan: DevicePlan) -> tuple[bool, bool, bool, float, float]:
    """Sort key: fit, the SLO, and the cost of a token: in dollars, else in GPU hours; without an SLO the
    number of devices, and speed."""
    if plan.load is not None and plan.load.searched is not None:
        misses, hours = order_of(plan.load)
        dollars = plan.dollars_per_million
        return not plan.fits, misses, dollars is None, hours if dollars is None else dollars, 0.0
    speed = plan.tokens_per_second or 0.0
    gpus = plan.gpus_needed or plan.deployment.gpus
    return not plan.fits, plan.load is None, False, gpus, -speed


def _on_device(solver: Solver) -> DevicePlan:
    """The plan of one device, with the load simulated where its speed is known."""
    workload, setup, device = solver.workload, solver.setup, solver.device
    deployment, needed = solver.choose()
    load = None
    has_speed = device.bandwidth is not None and bool(device.peaks)
    if workload.load is not None and has_speed:
        varied = workload.load.slo is not None and setup.has_free_sizes and not device.is_single
        tried = solver.machine_arrangements() if varied else [deployment]
        if (load := LoadPlanner(solver).plan(tried)) is not None:
            deployment = load.deployment
    reserve = solver.reserve(deployment)
    max_sequences = solver.sequences(deployment)
    fits = max_sequences >= workload.sequences
    limit = max(solver.model.shape.max_context, workload.context)
    # No times for what does not fit: they would be misleading.
    times = _times(solver, deployment, reserve, max_sequences) if fits and has_speed else {}
    if load is not None:
        times["predicted"] = load.predicted
    plan = DevicePlan(
        device=device,
        deployment=deployment,
        reserve=reserve,
        sequences=workload.sequences,
        gpus_needed=needed,
        fits=fits,
        kv_budget_bytes=max(0, deployment.kv_budget(device.memory_bytes, reserve)),
        kv_bytes=workload.sequences * deployment.kv_bytes(workload.held_tokens, reserve),
        max_concurrent_sequences=max_sequences,
        max_context=deployment.max_context(device.memory_bytes, reserve, workload.sequences, limit),
        binding_constraint=solver.constraint(deployment),
        relaxations=tuple(solver.relaxations(deployment)),
        dtypes_that_fit=tuple(solver.dtypes_that_fit()),
        engine_cache=_engine_cache(solver, deployment, reserve),
        evicted=solver.evicted(deployment, reserve),
        load=load,
        engine=setup.engine,
        price=setup.price_of(device),
        **times,
    )
    if not (speed := plan.tokens_per_second):
        return plan
    dollars = setup.dollars_per_million(device, deployment.gpus, speed)
    return replace(plan, dollars_per_million=dollars, cost=_cost(plan, workload, setup))


def _times(
    solver: Solver, deployment: Deployment, reserve: Reserve, max_sequences: int
) -> dict[str, Any]:
    """The times of a `DevicePlan`, by its fields."""
    expected, workload, device = solver.expected(deployment), solver.workload, solver.device
    draft = solver.setup.speculation
    count, held_tokens, context = workload.sequences, workload.held_tokens, workload.context
    decode, cached = expected.decode(count, held_tokens), int(workload.prefix_share * context)
    times: dict[str, Any] = {
        "expectation": expected,
        "decode": decode,
        "decode_bound": decode_time(deployment, device, count, held_tokens, DATA_SHEET),
        "prefill": expected.prefill(context, reserve, cached),
        "prefill_bound": prefill_time(deployment, device, context, reserve, DATA_SHEET),
        "predicted": expected.loaded_by(workload, count, max_sequences),
    }
    if draft is not None:
        verification = expected.decode(count, held_tokens, draft.draft_tokens + 1)
        steps = verification.seconds / decode.seconds
        speedup = draft.speedup(steps)
        gain = draft.expected_tokens, steps, speedup, decode.seconds / speedup
        times["speculation"] = SpeculationGain(*gain)
    if workload.images is not None:
        times["encode_seconds"] = workload.images.encode_seconds(device, expected.efficiency)
    return times


def _engine_cache(solver: Solver, deployment: Deployment, reserve: Reserve) -> CacheSize | None:
    """The KV cache that llmopt's engine would allocate on one such device; None if it could not start, or
    does not support the planned deployment."""
    workload, setup, device = solver.workload, solver.setup, solver.device
    supported = workload.kv_dtype in RULES["llmopt"].kv_dtypes
    if setup.engine != "llmopt" or deployment.gpus > 1 or not supported:
        return None
    sequences = setup.max_num_seqs or DEFAULT_MAX_NUM_SEQS[device.kind]
    step_tokens = setup.max_num_batched_tokens or max(
        DEFAULT_MAX_NUM_BATCHED_TOKENS[device.kind], sequences
    )
    resident = resident_tokens(deployment.shape, workload.context, step_tokens, workload.block_size)
    request = CacheRequest(
        bytes_per_element=deployment.kv_bytes_per_element,
        block_size=workload.block_size,
        max_model_len=resident,
        max_num_seqs=sequences,
        memory_bytes=setup.kv_cache_bytes,
    )
    if device.kind == "cpu":
        budget = KvCacheBudget.on_cpu(max(0, device.memory_bytes - deployment.weight_bytes))
    else:
        profile_run = replace(reserve, chunk_tokens=step_tokens, max_num_seqs=sequences)
        budget = KvCacheBudget.on_cuda(
            device.memory_bytes,
            reserve.utilization,
            deployment.weight_bytes,
            deployment.activation_bytes(profile_run),
            deployment.overhead_bytes(),
        )
    states = size_states(
        deployment.shape.state_bytes, sequences, caching=True, memory_bytes=budget.num_bytes
    )
    if not deployment.shape.kv_bytes_per_token(1):
        return None
    try:
        return size_cache(deployment.shape, request, budget.less("states", states.num_bytes))
    except BadInput:
        return None


def _cost(plan: DevicePlan, workload: PlannedWorkload, setup: Setup) -> Cost | None:
    """Cost at the predicted throughput, in which prompts take the share that they take of an idle engine."""
    prices, expected, speed = setup.prices, plan.expectation, plan.tokens_per_second
    bound = plan.tokens_per_second_bound
    if prices is None or prices.gpu_hour is None or not (expected and speed and bound):
        return None
    prompt, answer = workload.prompt_tokens, workload.answer_tokens
    prefill = expected.prefill(prompt, plan.reserve, workload.cached_tokens).seconds
    share = prefill / (prefill + answer / bound)
    return cost_of(
        prices,
        gpus=plan.deployment.gpus,
        input_tokens=prompt,
        output_tokens=answer,
        input_tokens_per_second=prompt * speed / (share * answer),
        output_tokens_per_second=speed / (1 - share),
    )


def _warnings(
    model: PlannedModel,
    workload: PlannedWorkload,
    setups: Sequence[Setup],
    plans: Sequence[DevicePlan],
) -> list[str]:
    warnings = []
    limit, context = model.shape.max_context, workload.context
    if context > limit:
        remedy = "its positions are learned, so no rope scaling extends it"
        if not model.shape.learned_positions:
            scaling = model.config.get("rope_scaling") or {}
            original = scaling.get("original_max_position_embeddings") or limit
            factor = ceil(10 * context / original) / 10
            remedy = (
                f'it would need rope_scaling {{"rope_type": "yarn", "factor": {factor}, '
                f'"original_max_position_embeddings": {original}}}, and quality has to be checked'
            )
        past = f"--ctx {context} is past the {limit} tokens that {model.name} was trained for"
        warnings.append(f"{past}: {remedy}")
    if workload.eviction is not None and any(plan.deployment.gpus > 1 for plan in plans):
        warnings.append(
            "the engine evicts in one process: a kv_budget on several devices is arithmetic"
        )
    for setup in setups:
        rule = engine_rule(setup.engine)
        if workload.kv_dtype not in rule.kv_dtypes:
            warnings.append(
                f"{setup.engine} does not store its cache in {workload.kv_dtype} (it supports "
                f"{', '.join(rule.kv_dtypes)}): the numbers are arithmetic"
            )
        if (
            setup.engine == "vllm"
            and workload.kv_dtype == "fp8"
            and has_sparse_latents(model.shape)
        ):
            warnings.append(
                "vllm stores an fp8 cache of latents with an indexer as fp8_ds_mla, 656 bytes per token and "
                "layer where fp8 has 576: plan with --kv-dtype fp8_ds_mla"
            )
    return warnings
