"""The answer to "will it fit, on what, how many at once, how fast", for one model and several devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ...quant.errors import BadInput
from .catalog import PlannedModel
from .devices import Device
from .memory import Deployment, Reserve
from .speed import DATA_SHEET, Efficiency, StepTime, decode_time, prefill_time
from .weights import WeightRecipe, weight_bytes

RANKS = (1, 2, 4, 8)  # one machine
KV_BYTES = {"bf16": 2, "fp8": 1}

Constraint = Literal["weights", "kv_cache", "max_num_seqs"]


@dataclass(frozen=True, slots=True)
class Workload:
    """What is to be served: `sequences` at once, each of `context` tokens, prompt and answer together."""

    context: int
    sequences: int = 1
    kv_dtype: str = "bf16"
    block_size: int = 16

    def __post_init__(self) -> None:
        if self.kv_dtype not in KV_BYTES:
            raise BadInput(f"no KV dtype {self.kv_dtype!r}: choose {', '.join(KV_BYTES)}")
        for name, value in (("--ctx", self.context), ("--concurrency", self.sequences)):
            if value < 1:
                raise BadInput(f"{name} {value}: at least 1 is needed")
        if self.block_size < 1:
            raise BadInput(f"--block-size {self.block_size}: at least 1 token is needed")


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The workload on `ranks` of one device; all bytes per rank, times None where speed is unknown.

    `gpus_needed` is None if eight do not hold the workload. `max_context` is for the workload's number
    of sequences. The binding constraint is what stands in the way of one sequence more.
    """

    gpu: str
    sequences: int
    memory_bytes: int
    memory_is_estimated: bool
    ranks: int
    gpus_needed: int | None
    fits: bool
    weight_bytes: int
    activation_bytes: int
    overhead_bytes: int
    kv_budget_bytes: int
    kv_bytes: int
    max_concurrent_sequences: int
    max_context: int
    binding_constraint: Constraint
    reserve: Reserve
    decode: StepTime | None
    decode_bound: StepTime | None
    prefill: StepTime | None
    prefill_bound: StepTime | None

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens per second of the whole workload, while all its sequences decode."""
        return None if self.decode is None else self.sequences / self.decode.seconds


@dataclass(frozen=True, slots=True)
class Plan:
    """A model, a workload, and what each device makes of them."""

    model: PlannedModel
    recipe: WeightRecipe
    workload: Workload
    devices: tuple[DevicePlan, ...]
    efficiency: Efficiency

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, on all ranks together, without replicas."""
        return weight_bytes(self.model.shape, self.recipe)

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON: bytes, milliseconds, tokens. What depends on a device is that of the first
        one at the top level, and of each one under `gpus`."""
        shape, work = self.model.shape, self.workload
        element, full = KV_BYTES[work.kv_dtype], self.model.shape.without_windows()
        first = self.devices[0]
        rank = full.cache_on_rank(first.ranks)
        count, context, block = work.sequences, work.context, work.block_size
        paged = count * full.kv_bytes(context, element, block)
        per_rank = count * rank.kv_bytes(context, element, block)
        return {
            "model": self.model.name,
            "model_note": self.model.note,
            "source": self.model.source,
            "model_type": shape.model_type,
            "param_count": shape.num_parameters,
            "active_param_count": shape.num_active_parameters,
            "max_model_context": shape.max_context,
            "weights": self.recipe.label,
            "weight_bytes": self.weight_bytes,
            "kv_dtype": work.kv_dtype,
            "context": context,
            "batch": count,
            "tp": first.ranks,
            "block_size": block,
            "kv_bytes_per_token": shape.kv_bytes_per_token(element),
            "kv_bytes_per_extra_token": shape.kv_bytes_per_extra_token(element),
            "kv_bytes_total": count * shape.kv_bytes(context, element),
            "kv_bytes_total_no_window": count * full.kv_bytes(context, element),
            "kv_bytes_paged": count * shape.kv_bytes(context, element, block),
            "kv_bytes_paged_no_window": paged,
            "kv_bytes_per_rank": per_rank,
            "kv_bytes_all_ranks": per_rank * first.ranks,
            "engines": {"llmopt": {"kv_bytes": paged}},
            **_device_dict(first),
            "efficiency": asdict(self.efficiency),
            "gpus": [_device_dict(device) for device in self.devices],
        }


def make_plan(
    model: PlannedModel,
    recipe: WeightRecipe,
    workload: Workload,
    devices: Sequence[Device],
    ranks: int | None = None,
) -> Plan:
    """Plan the workload on each device; without `ranks`, on as few of 1, 2, 4 or 8 as hold it.

    Raises:
        BadInput: the context is longer than the model's own, or the heads do not divide over `ranks`.
    """
    limit = model.shape.max_context
    if workload.context > limit:
        raise BadInput(
            f"--ctx {workload.context} is longer than {model.name} can attend to: its config says "
            f"{limit} at most"
        )
    efficiency = Efficiency()
    plans = tuple(
        _on_device(model, recipe, workload, device, ranks, efficiency) for device in devices
    )
    return Plan(model, recipe, workload, plans, efficiency)


def _on_device(
    model: PlannedModel,
    recipe: WeightRecipe,
    workload: Workload,
    device: Device,
    ranks: int | None,
    efficiency: Efficiency,
) -> DevicePlan:
    reserve = Reserve.for_memory(device.memory_bytes)
    element = KV_BYTES[workload.kv_dtype]
    deployments = {}
    for number in RANKS if ranks is None else (ranks, *RANKS):
        try:
            deployments[number] = Deployment(
                model.shape, recipe, element, workload.block_size, number
            )
        except BadInput:
            if number == ranks:
                raise
    holding = [
        number
        for number, deployment in sorted(deployments.items())
        if deployment.max_sequences(device.memory_bytes, reserve, workload.context)
        >= workload.sequences
    ]
    chosen = ranks or (holding[0] if holding else max(deployments))
    deployment = deployments[chosen]
    budget = deployment.kv_budget(device.memory_bytes, reserve)
    most = deployment.max_sequences(device.memory_bytes, reserve, workload.context)
    fits = most >= workload.sequences
    timed = fits and device.bandwidth is not None and bool(device.peaks)

    def decode(share: Efficiency) -> StepTime | None:
        if not timed:
            return None
        return decode_time(deployment, device, workload.sequences, workload.context, share)

    def prefill(share: Efficiency) -> StepTime | None:
        if not timed:
            return None
        return prefill_time(deployment, device, workload.context, reserve, share)

    return DevicePlan(
        gpu=device.name,
        sequences=workload.sequences,
        memory_bytes=device.memory_bytes,
        memory_is_estimated=device.memory_is_estimated,
        ranks=chosen,
        gpus_needed=min(holding) if holding else None,
        fits=fits,
        weight_bytes=deployment.weight_bytes,
        activation_bytes=deployment.activation_bytes(reserve),
        overhead_bytes=deployment.overhead_bytes(),
        kv_budget_bytes=max(0, budget),
        kv_bytes=workload.sequences * deployment.kv_bytes(workload.context),
        max_concurrent_sequences=most,
        max_context=deployment.max_context(device.memory_bytes, reserve, workload.sequences),
        binding_constraint=(
            "weights"
            if budget <= 0
            else "max_num_seqs"
            if most == reserve.max_num_seqs
            else "kv_cache"
        ),
        reserve=reserve,
        decode=decode(efficiency),
        decode_bound=decode(DATA_SHEET),
        prefill=prefill(efficiency),
        prefill_bound=prefill(DATA_SHEET),
    )


def _device_dict(plan: DevicePlan) -> dict[str, Any]:
    def milliseconds(time: StepTime | None) -> float | None:
        return None if time is None else round(1e3 * time.seconds, 3)

    speed = plan.tokens_per_second
    return {
        "gpu": plan.gpu,
        "gpu_memory_bytes": plan.memory_bytes,
        "gpu_memory_is_estimated": plan.memory_is_estimated,
        "tp": plan.ranks,
        "fits": plan.fits,
        "gpus_needed": plan.gpus_needed,
        "max_concurrent_sequences": plan.max_concurrent_sequences,
        "max_context": plan.max_context,
        "binding_constraint": plan.binding_constraint,
        "weight_bytes_per_rank": plan.weight_bytes,
        "activation_bytes_per_rank": plan.activation_bytes,
        "overhead_bytes_per_rank": plan.overhead_bytes,
        "kv_budget_bytes_per_rank": plan.kv_budget_bytes,
        "kv_bytes_per_rank": plan.kv_bytes,
        "reserve": asdict(plan.reserve),
        "ttft_ms": milliseconds(plan.prefill),
        "ttft_bound_ms": milliseconds(plan.prefill_bound),
        "ttft_limit": plan.prefill and plan.prefill.bound,
        "tpot_ms": milliseconds(plan.decode),
        "tpot_bound_ms": milliseconds(plan.decode_bound),
        "tpot_limit": plan.decode and plan.decode.bound,
        "throughput_tokens_per_s": None if speed is None else round(speed, 2),
    }
