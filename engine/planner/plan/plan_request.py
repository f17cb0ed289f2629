"""Command-line options of `llmopt kv-plan`, resolved into a plan."""

from __future__ import annotations

from ....quant.base.errors import BadInput
from ...base.units import parse_bytes, parse_size, parse_tokens
from ...config.config import EngineConfig
from ...config.plan_request import PlanRequest
from ..device.devices import Device, choose_devices
from ..device.money import Prices
from ..device.speed import Efficiency
from ..images.image_load import image_load
from ..images.processor_probe import probed_image_tokens
from ..memory.cache_size import DEFAULT_BLOCK_SIZE
from ..model.catalog import PlannedModel, find_model
from ..model.kv_dtypes import kv_dtype
from ..model.weights import WeightRecipe, recipe_for
from .measured import read_run
from .plan import Plan, make_plan
from .setup import Setup, Workload
from .speculation import Speculation


def plan_for(ask: PlanRequest) -> Plan:
    """Make the requested plan.

    Raises:
        BadInput: an invalid option value, or one that contradicts the model.
    """
    model = find_model(ask.model, trust_remote_code=ask.trust_remote_code)
    devices, efficiency = _devices(ask)
    on_cpu = all(device.kind == "cpu" for device in devices)
    block_size = ask.block_size
    if block_size is None:
        block_size = DEFAULT_BLOCK_SIZE["cpu" if on_cpu else "cuda"]
    workload = Workload(
        model.shape.max_context if ask.context is None else parse_tokens(ask.context),
        ask.sequences,
        kv_dtype(ask.kv_dtype or "bf16").name,
        block_size,
        ask.output_tokens,
        EngineConfig(kv_budget=ask.kv_budget, kv_eviction=ask.kv_eviction).eviction(block_size),
        None if ask.images is None else image_load(model, ask.images, probed_image_tokens),
    )
    setup = Setup(
        tp=ask.tp,
        pp=ask.pp,
        engine="llmopt" if ask.engine == "all" else ask.engine,
        utilization=ask.utilization,
        max_num_batched_tokens=ask.max_num_batched_tokens,
        max_num_seqs=ask.max_num_seqs,
        kv_cache_bytes=None if ask.kv_cache_memory is None else parse_size(ask.kv_cache_memory),
        efficiency=efficiency,
        prices=_prices(ask),
        speculation=None
        if ask.draft_tokens is None
        else Speculation(ask.draft_tokens, ask.acceptance, ask.draft_cost),
    )
    ranked = any(name.lower() == "all" for name in ask.gpus)
    return make_plan(model, _recipe(ask, model), workload, devices, setup=setup, ranked=ranked)


def _devices(ask: PlanRequest) -> tuple[list[Device], Efficiency]:
    memory = None if ask.gpu_memory is None else parse_bytes(ask.gpu_memory)
    if ask.measured is None:
        return choose_devices(ask.gpus, memory), Efficiency()
    run = read_run(ask.measured)
    if not ask.gpus and memory is None:
        if not run.is_cpu:
            raise BadInput(
                f"{ask.measured} was measured on a GPU: name it with --gpu, or give --gpu-memory"
            )
        return [run.device(host) for host in choose_devices(["cpu"], None)], run.efficiency
    # Measured ceilings for devices without a data sheet, and the measured efficiency for all.
    devices = choose_devices(ask.gpus, memory)
    return (
        [run.device(device) if device.bandwidth is None else device for device in devices],
        run.efficiency,
    )


def _recipe(ask: PlanRequest, model: PlannedModel) -> WeightRecipe:
    chosen = (ask.weights, ask.group_size, ask.symmetric, ask.file_format)
    if all(value is None for value in chosen):
        return model.as_stored()
    return recipe_for(
        ask.weights or "int4",
        model.shape,
        ask.group_size,
        symmetric=ask.symmetric,
        file_format=ask.file_format,
        plain_bytes=model.plain_bytes,
    )


def _prices(ask: PlanRequest) -> Prices | None:
    if ask.gpu_hour_price is None:
        if ask.api_price_in is not None or ask.api_price_out is not None:
            raise BadInput(
                "--api-price-in and --api-price-out need --gpu-hour-price to compare with"
            )
        return None
    return Prices(ask.gpu_hour_price, ask.api_price_in, ask.api_price_out, ask.duty_cycle)
