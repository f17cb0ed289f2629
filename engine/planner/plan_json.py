"""JSON form of a plan: printed by `--json`, written by `--output`, read back for a benchmark run's load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import ceil, isfinite
from pathlib import Path
from typing import Any

from ...base.errors import BadInput
from ...quant.model.checkpoint import check_kinds, read_json
from .cache_size import kv_dtype
from .catalog import PlannedModel
from .devices import Device
from .engine_rules import RULES, CacheKnobs, engine_rule
from .error_bands import MEASURES
from .expected import Expectation
from .load import ImageLoad, Prediction
from .load_plan import Fleet, LoadPlan
from .memory import Deployment, Reserve
from .plan import DeploymentPlan, DevicePlan
from .probed_shape import ProbedShape
from .setup import Setup
from .speed import Efficiency, StepTime
from .weights import checkpoint_file_bytes

SCHEMA = 1
_NUMBER = (int, float)
_REQUIRED = {
    "param_count": int,
    "weight_bytes": int,
    "kv_dtype": str,
    "kv_bytes_per_element": _NUMBER,
    "context": int,
    "block_size": int,
    "engine_cache": (None, {"kv_tokens": int}),
    "reserve": {"*": (*_NUMBER, None)},
    "efficiency": {"source": str, "*": _NUMBER},
    "gpu": str,
    "gpu_memory_bytes": int,
    "gpu_bandwidth": (*_NUMBER, None),
    "gpu_peaks": (None, {"*": _NUMBER}),
    "gpu_link_bytes_per_second": _NUMBER,
    "tp": int,
    "pp": int,
}
# Keys that plans of earlier versions lack.
_LATER = {
    "model": str,
    "engine": str,
    "weight_bytes_per_rank": int,
    "run_plain_bytes": (int, None),
}


def plan_as_dict(plan: DeploymentPlan) -> dict[str, Any]:
    """Bytes, milliseconds, tokens, dollars. Device-specific values are those of the first device at the top
    level, and of each device under `gpus`. `kv_bytes_per_rank` and `_all_ranks` are `kv_bytes_total` with
    replicas, without any engine's rounding; under `gpus` they follow the engine's rule."""
    shape, work, first = plan.model.shape, plan.workload, plan.devices[0]
    element = kv_dtype(work.kv_dtype).bytes_per_element(shape)
    full = shape.without_windows()
    count, context, block = work.sequences, work.context, work.block_size
    stages = [stage.cache.kv_bytes(context, element) for stage in first.deployment.stages]
    indexer_elements = shape.indexer_elements if isinstance(shape, ProbedShape) else 0
    slo, evicted = work.load and work.load.slo, first.evicted
    return {
        "schema": SCHEMA,
        "model": plan.model.name,
        "model_note": plan.model.note,
        "source": plan.model.source,
        "shape_from": plan.model.how,
        "warnings": list(plan.warnings),
        "model_type": shape.family,
        "param_count": shape.num_parameters,
        "active_param_count": shape.num_active_parameters,
        "param_count_by_part": plan.model.parts,
        "max_model_context": shape.max_context,
        "weights": plan.recipe.label,
        "weight_bytes": plan.weight_bytes,
        "checkpoint_file_bytes": checkpoint_file_bytes(shape, plan.recipe),
        "weight_bytes_from": "headers" if plan.recipe.stored_bytes else "recipe",
        "engine": plan.setup.engine,
        "run_plain_bytes": plan.setup.run_bytes(plan.recipe, first.device.kind),
        "prefix_hit_rate": work.prefix_share,
        "kv_dtype": work.kv_dtype,
        "kv_bytes_per_element": float(element),
        "context": context,
        "output_tokens": work.answer_tokens,
        "batch": count,
        "tp": first.deployment.tp,
        "pp": first.deployment.pp,
        "slo": slo and {"limits_ms": dict(slo.limits_ms), "share": slo.share, "by": slo.by},
        "dataset": work.load and work.load.dataset,
        "block_size": block,
        "kv_bytes_per_token": shape.kv_bytes_per_token(element),
        "kv_bytes_per_extra_token": shape.kv_bytes_per_extra_token(element),
        "indexer_bytes_per_token": ceil(indexer_elements * element),
        "state_bytes_per_sequence": shape.state_bytes,
        "kv_bytes_total": count * shape.kv_bytes(context, element),
        "kv_bytes_total_no_window": count * full.kv_bytes(context, element),
        "kv_bytes_paged": count * shape.kv_bytes(context, element, block),
        "kv_bytes_paged_no_window": count * full.kv_bytes(context, element, block),
        "engines": engines_as_dict(plan, first),
        **_device_dict(first),
        "kv_eviction": evicted
        and {
            "method": evicted.rule.method,
            "budget": evicted.rule.budget,
            "kv_tokens_per_sequence": evicted.num_slots,
            "kv_bytes_per_sequence": evicted.kv_bytes,
            "kv_bytes_of_prompt": evicted.prompt_kv_bytes,
            "max_concurrent_sequences": first.max_concurrent_sequences,
        },
        "images": _images_dict(work.images),
        "kv_bytes_per_rank": count * max(stages),
        "kv_bytes_all_ranks": count * first.deployment.tp * sum(stages),
        "efficiency": asdict(plan.efficiency),
        "speed_from": "fit" if plan.setup.measured is None else "measured",
        "gpus": [_device_dict(device) for device in plan.devices],
        **({"fleets": [_fleet_dict(fleet) for fleet in plan.fleets]} if plan.fleets else {}),
    }


def _fleet_dict(fleet: Fleet) -> dict[str, Any]:
    return {
        "gpu": fleet.device.name,
        "gpus": fleet.gpus,
        "replicas": fleet.replicas,
        **asdict(fleet.deployment.parallel),
        "kept_rate_per_replica": round(fleet.kept_rate, 4),
        "dollars_per_hour": fleet.dollars_per_hour,
        "is_simulated": fleet.simulated is not None,
    }


def _images_dict(load: ImageLoad | None) -> dict[str, Any] | None:
    """The images of each prompt and their encoder; `ttft_ms` of a device follows its `encode_ms`."""
    if load is None:
        return None
    return {
        "count": load.count,
        "width": load.width,
        "height": load.height,
        "tokens_per_image": load.tokens.num_tokens,
        "tokens": load.num_tokens,
        "patches_per_image": load.tokens.num_patches,
        "tiles_per_image": load.tokens.num_tiles,
        "rule": load.tokens.formula,
        "encoder_weight_bytes": load.weight_bytes,
        "encoder_activation_bytes": load.activation_bytes,
        "embedding_bytes": load.embedding_bytes,
        "encode_flops": load.flops,
    }


def engines_as_dict(plan: DeploymentPlan, first: DevicePlan) -> dict[str, Any]:
    """KV-cache sizes of the workload by each engine's rule, in total and on the first plan's devices."""
    work, reserve = plan.workload, first.reserve
    knobs = CacheKnobs(work.block_size, reserve.chunk_tokens)
    engines = {}
    for rule in RULES.values():
        name = work.kv_dtype
        if work.kv_dtype_is_default and rule is not engine_rule(plan.setup.engine):
            name = rule.default_kv_dtype
        element = kv_dtype(name).bytes_per_element(plan.model.shape)
        deployment = replace(first.deployment, kv_bytes_per_element=element, engine=rule)
        per_sequence = rule.kv_bytes(plan.model.shape, work.context, element, knobs)
        engines[rule.name] = {
            "kv_bytes": work.sequences * per_sequence,
            "kv_bytes_per_rank": work.sequences * deployment.kv_bytes(work.context, reserve),
            "kv_bytes_all_ranks": work.sequences * deployment.all_kv_bytes(work.context, reserve),
            "max_concurrent_sequences": deployment.max_sequences(
                first.device.memory_bytes, reserve, work.context
            ),
            "kv_dtype": name,
            "stores_kv_dtype": name in rule.kv_dtypes,
            "rule": rule.description,
        }
    return engines


def _device_dict(plan: DevicePlan) -> dict[str, Any]:
    device, cache, offload = plan.device, plan.engine_cache, None
    if (in_ram := plan.deployment.offload) is not None:
        offload = {
            "flag": in_ram.flag,
            "weight_bytes": in_ram.weight_bytes,
            "layers": in_ram.waits,
            "batch_tokens": in_ram.batch_tokens,
            "ram_bytes": in_ram.host.ram_bytes,
            "ram_bandwidth": in_ram.host.ram_bandwidth,
            "pcie_bandwidth": in_ram.host.pcie_bandwidth,
        }
    relaxations = [asdict(change) for change in plan.relaxations]
    operators = plan.decode.operators if plan.decode else ()
    predicted = plan.predicted and means_as_dict(plan.predicted)
    if plan.predicted is not None and predicted is not None:
        # The error that deployments like it had.
        error: dict[str, Any] = {"note": "unknown", "rows": 0}
        if (band := plan.predicted.band) is not None:
            error = {"note": band.alike, "rows": band.num_rows}
            error |= {name: list(getattr(band, name)) for name in MEASURES}
        predicted["error"] = error
    return {
        "gpu": device.name,
        "gpu_memory_bytes": device.memory_bytes,
        "gpu_memory_is_estimated": device.memory_is_estimated,
        "gpu_bandwidth": device.bandwidth,
        "gpu_peaks": dict(device.peaks or {}),
        "gpu_link_bytes_per_second": device.link_bytes_per_second,
        "gpu_kind": device.kind,
        "gpu_hour_price": None if plan.price is None else asdict(plan.price),
        "engine": plan.engine,
        **asdict(plan.deployment.parallel),
        "fits": plan.fits,
        **({} if offload is None else {"offload": offload}),
        "gpus_needed": plan.gpus_needed,
        "max_concurrent_sequences": plan.max_concurrent_sequences,
        "max_context": plan.max_context,
        "binding_constraint": plan.binding_constraint,
        "next_relaxation": relaxations[0] if relaxations else None,
        "relaxations": relaxations,
        "dtypes_that_fit": [asdict(choice) for choice in plan.dtypes_that_fit],
        "weight_bytes_per_rank": plan.weight_bytes,
        "activation_bytes_per_rank": plan.activation_bytes,
        "overhead_bytes_per_rank": plan.overhead_bytes,
        "kv_budget_bytes_per_rank": plan.kv_budget_bytes,
        "kv_bytes_per_rank": plan.kv_bytes,
        "reserve": asdict(plan.reserve),
        "engine_cache": cache
        and {
            "num_blocks": cache.num_blocks,
            "block_size": cache.block_size,
            "kv_tokens": cache.num_tokens,
            "kv_bytes": cache.num_bytes,
        },
        "encode_ms": None if plan.encode_seconds is None else round(1e3 * plan.encode_seconds, 3),
        "ttft_ms": predicted and predicted["ttft_ms"],
        "idle_prefill_ms": _milliseconds(plan.prefill),
        "ttft_bound_ms": _milliseconds(plan.prefill_bound),
        "ttft_limit": plan.prefill and plan.prefill.bound,
        "tpot_ms": predicted and predicted["tpot_ms"],
        "idle_step_ms": _milliseconds(plan.decode),
        "tpot_bound_ms": _milliseconds(plan.decode_bound),
        "tpot_limit": plan.decode and plan.decode.bound,
        "throughput_tokens_per_s": rounded(plan.tokens_per_second, 2),
        "throughput_bound_tokens_per_s": rounded(plan.tokens_per_second_bound, 2),
        "load": None if plan.load is None else load_as_dict(plan.load),
        "predicted": predicted,
        "loaded": predicted,
        "operators": [
            {"operator": name, "ms": round(1e3 * seconds, 4), "source": source}
            for name, seconds, source in operators
        ],
        "speculation": None if plan.speculation is None else asdict(plan.speculation),
        "cost": None if plan.cost is None else asdict(plan.cost),
        "dollars_per_million_output_tokens": rounded(plan.dollars_per_million),
        "beside": None if plan.beside is None else _device_dict(plan.beside),
    }


def load_as_dict(plan: LoadPlan) -> dict[str, Any]:
    """A device under load. `throughput_tokens_per_s` is output; TTFT counts from the arrival."""
    load, result, searched = plan.load, plan.result, plan.searched
    prompt, output = load.mean_lengths()
    latencies = {"ttft_ms": result.ttft, "tpot_ms": result.tpot, "e2e_ms": result.e2e}
    return {
        "concurrency": load.concurrency,
        "request_rate": load.rate,
        "mean_prompt_tokens": round(prompt, 1),
        "mean_output_tokens": round(output, 1),
        "prefix_hit_rate": load.prefix_share,
        "num_requests": len(result.requests),
        "seed": load.seed,
        "kv_blocks": plan.num_blocks,
        **{
            name: {key: round(1e3 * value, 3) for key, value in asdict(quantiles).items()}
            if not plan.queue_growth or name == "tpot_ms"
            else dict.fromkeys(asdict(quantiles))
            for name, quantiles in latencies.items()
        },
        "queue_growth_requests_per_s": round(plan.queue_growth, 4),
        "output_tokens_per_s": round(result.output_tokens_per_second, 2),
        "output_tokens_per_s_per_gpu": round(
            result.output_tokens_per_second / plan.deployment.gpus, 2
        ),
        "requests_per_s": round(result.requests_per_second, 4),
        "gpu_hours_per_million_output_tokens": round(plan.gpu_hours_per_million, 6),
        "num_steps": result.steps,
        "num_preemptions": result.preemptions,
        "most_running": result.most_running,
        "most_waiting": result.most_waiting,
        "slo": searched and {"best": searched.best, "lowest_failed": searched.failed},
    }


def means_as_dict(predicted: Prediction) -> dict[str, Any]:
    """Means under a load. Where the load is not kept, the TTFT grows without end and is null."""
    ttft = predicted.ttft_seconds
    return {
        "clients": round(predicted.clients, 2),
        "ttft_ms": round(1e3 * ttft, 3) if isfinite(ttft) else None,
        "tpot_ms": round(1e3 * predicted.tpot_seconds, 3),
        "throughput_tokens_per_s": round(predicted.throughput, 2),
    }


def rounded(value: float | None, digits: int = 6) -> float | None:
    return None if value is None else round(value, digits)


def _milliseconds(time: StepTime | None) -> float | None:
    return None if time is None else round(1e3 * time.seconds, 3)


@dataclass(frozen=True, slots=True)
class WrittenPlan:
    """A plan file written by `llmopt kv-plan --output`, and its model."""

    path: Path
    values: Mapping[str, Any]
    model: PlannedModel

    @property
    def weight_bytes(self) -> int:
        return self.values["weight_bytes"]

    @property
    def held_weight_bytes(self) -> int:
        """Bytes of weights in the engine's memory; as stored, if the plan file does not tell them apart."""
        if self.values["tp"] * self.values["pp"] > 1:
            return self.weight_bytes
        return self.values.get("weight_bytes_per_rank", self.weight_bytes)

    @property
    def kv_tokens(self) -> int | None:
        """Planned KV-cache capacity of llmopt's engine in tokens; None for a plan of another engine."""
        cache = self.values["engine_cache"]
        return cache and cache["kv_tokens"]

    def times(self, prompt_tokens: int, context: int, batch: int) -> tuple[float, float] | None:
        """TTFT of a prompt and TPOT of `batch` sequences of `context` tokens, in seconds; None if the plan
        has no device speed."""
        values = self.values
        if not values["gpu_bandwidth"] or not values["gpu_peaks"]:
            return None
        device = Device(
            values["gpu"],
            values["gpu_memory_bytes"],
            bandwidth=values["gpu_bandwidth"],
            peaks=values["gpu_peaks"],
            link_bytes_per_second=values["gpu_link_bytes_per_second"],
        )
        recipe = self.model.as_stored()
        if plain_bytes := values.get("run_plain_bytes"):
            recipe = recipe.as_run(self.model.shape, plain_bytes)
        deployment = Deployment(
            self.model.shape,
            recipe,
            values["kv_bytes_per_element"],
            values["block_size"],
            values["tp"],
            values["pp"],
        )
        measured = None
        if values.get("speed_from", "measured") == "measured":
            measured = Efficiency(**values["efficiency"])
        # llmopt runs. A plan with its cache was made for it, even next to another engine.
        engine = "llmopt" if values["engine_cache"] else values["engine"]
        setup = Setup(engine=engine, measured=measured)
        expected = Expectation.of(deployment, device, values["model"], setup)
        prefill = expected.prefill(prompt_tokens, Reserve(**values["reserve"]))
        return prefill.seconds, expected.decode(batch, context).seconds


def read_plan(path: Path, model: PlannedModel) -> WrittenPlan:
    """Read a plan file for this model. Raises BadInput: not a plan file, or a plan for another model."""
    values = read_json(path)
    if missing := [key for key in _REQUIRED if key not in values]:
        raise BadInput(
            f"{path} is no plan ({missing[0]} is missing): write one with kv-plan --output"
        )
    check_kinds(path, values, _REQUIRED | _LATER)
    if values["param_count"] != model.shape.num_parameters:
        raise BadInput(
            f"{path} is a plan for {values.get('model')} with {values['param_count']:,} parameters, but "
            f"{model.name} has {model.shape.num_parameters:,}: plan for this model"
        )
    plan = WrittenPlan(path, values, model)
    try:
        _ = plan.kv_tokens, Reserve(**values["reserve"]), Efficiency(**values["efficiency"])
    except (KeyError, TypeError) as error:
        raise BadInput(
            f"{path} is damaged ({error}): write it anew with kv-plan --output"
        ) from error
    return plan
