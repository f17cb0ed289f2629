"""Formulas of a plan with their numbers, as printed by `--explain`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from ...quant.families.shapes import ModelShape
from ..base.units import format_gib
from .cache_size import KvDtype, kv_dtype
from .engine_rules import RULES, CacheKnobs
from .memory import SAMPLER_COPIES
from .plan import DeploymentPlan, DevicePlan
from .probed_shape import ProbedShape, cache_line
from .speed import StepTime


@dataclass(frozen=True, slots=True)
class Formula:
    """A quantity: its formula, the formula with numbers, and the result."""

    name: str
    formula: str
    numbers: str
    result: str


def explain(plan: DeploymentPlan) -> list[Formula]:
    """Formulas of a plan; device-specific ones for the first device."""
    return [
        *_weights(plan),
        *_cache(plan),
        *_memory(plan, plan.first_that_fits),
        *_images(plan, plan.first_that_fits),
        *_speed(plan, plan.first_that_fits),
        *_gains(plan, plan.first_that_fits),
    ]


def _weights(plan: DeploymentPlan) -> Iterator[Formula]:
    shape, recipe = plan.model.shape, plan.recipe
    elements: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in shape.tensors():
        elements[tensor.role] += tensor.num_elements * tensor.count
        sizes[tensor.role] += recipe.tensor_bytes(tensor) * tensor.count
    yield Formula(
        "parameters",
        "sum over the tensors, tied ones once",
        " + ".join(f"{role} {count:,}" for role, count in elements.items()),
        f"{shape.num_parameters:,}",
    )
    yield Formula(
        f"weights, {recipe.label}",
        "sum over the tensors of elements x bits / 8 + scales + zeros",
        " + ".join(f"{role} {size:,}" for role, size in sizes.items()),
        f"{recipe.bytes_of(shape.tensors()):,} B = {format_gib(recipe.bytes_of(shape.tensors()))}",
    )
    if recipe.stored_bytes:
        yield Formula(
            "weights, checkpoint",
            "sum of data_offsets in the safetensors headers",
            plan.model.source,
            f"{recipe.stored_bytes:,} B",
        )


def _probed_cache(plan: DeploymentPlan, shape: ProbedShape, dtype: KvDtype) -> Iterator[Formula]:
    element = dtype.bytes_per_element(shape)
    yield Formula(
        "KV per token",
        f"sum over the tensors of the cache, as {plan.model.how} holds them",
        f"({cache_line(shape)}) x {_number(element)} ({dtype.description})",
        f"{shape.kv_bytes_per_token(element):,} B",
    )
    if shape.state_bytes:
        states = Counter(
            (t.name, t.heads * t.width) for t in shape.layer_tensors if t.law != "growing"
        )
        yield Formula(
            "state of a sequence",
            "sum over the layers of elements x bytes, in the model's own dtypes",
            " + ".join(f"{count} x {size:,} {name}" for (name, size), count in states.items()),
            f"{shape.state_bytes:,} B = {format_gib(shape.state_bytes)}",
        )


def _cache(plan: DeploymentPlan) -> Iterator[Formula]:
    shape, work = plan.model.shape, plan.workload
    dtype = kv_dtype(work.kv_dtype)
    if isinstance(shape, ProbedShape):
        yield from _probed_cache(plan, shape, dtype)
    else:
        yield from _table_cache(plan, shape, dtype)
    element = dtype.bytes_per_element(shape)
    knobs = CacheKnobs(work.block_size, plan.devices[0].reserve.chunk_tokens)
    for rule in RULES.values():
        size = rule.kv_bytes(shape, work.context, element, knobs)
        if isinstance(shape, ProbedShape):
            kept, numbers = "KV and state", f"{work.context:,} tokens, blocks of {work.block_size}"
        else:
            slot = rule.cached_elements(shape) * element
            kept, numbers = "KV", f"{round(size / slot):,} slots x {_number(slot)}"
        yield Formula(
            f"{kept} of a sequence in {rule.name}",
            rule.description,
            numbers,
            f"{size:,} B = {format_gib(size)}",
        )


def _table_cache(plan: DeploymentPlan, shape: ModelShape, dtype: KvDtype) -> Iterator[Formula]:
    work, element = plan.workload, dtype.bytes_per_element(shape)
    per_layer = f"2 x {shape.num_kv_heads} x {shape.head_dim}"
    if shape.latent:
        per_layer = f"({shape.latent.kv_rank} + {shape.latent.rope_dim})"
    yield Formula(
        "KV per token",
        "layers x (latent + rope) x bytes"
        if shape.latent
        else "layers x 2 x KV heads x head_dim x bytes",
        f"{shape.num_layers} x {per_layer} x {_number(element)} ({dtype.description})",
        f"{shape.kv_bytes_per_token(element):,} B",
    )
    counts = Counter(shape.windows)
    listing = " + ".join(
        f"{count} layers x {min(work.context, window or work.context):,}"
        for window, count in counts.items()
    )
    size = shape.kv_bytes(work.context, element)
    yield Formula(
        "KV of a sequence",
        "sum over the layers of min(context, window) x bytes of a token in a layer",
        f"({listing}) x {_number(shape.cached_elements * element)}",
        f"{size:,} B = {format_gib(size)}",
    )


def _memory(plan: DeploymentPlan, device: DevicePlan) -> Iterator[Formula]:
    shape, reserve, deployment = plan.model.shape, device.reserve, device.deployment
    prefill, sampler = deployment.activation_terms(reserve)
    formula, numbers = _activation_widths(shape, deployment.tp)
    yield Formula(
        "activation, prefill",
        f"chunk x 2 B x ({formula} + 3 x hidden)",
        f"{reserve.chunk_tokens} x 2 x ({numbers} + 3 x {shape.hidden_size})",
        format_gib(prefill),
    )
    yield Formula(
        "activation, sampler",
        "9.7 (fitted) x sequences x vocabulary x 4 B",
        f"{SAMPLER_COPIES} x {reserve.max_num_seqs} x {shape.vocab_size} x 4",
        format_gib(sampler),
    )
    budget = f"KV-cache budget on {device.gpu}"
    size = format_gib(device.kv_budget_bytes)
    if reserve.kv_cache_bytes is not None:
        rule = "as set, or the engine's fraction of free memory on a CPU"
        yield Formula(budget, rule, format_gib(reserve.kv_cache_bytes), size)
    else:
        yield Formula(
            budget,
            "visible x utilization - weights - peak activations - runtime",
            f"{format_gib(device.device.memory_bytes)} x {reserve.utilization} - "
            f"{format_gib(device.weight_bytes)} - {format_gib(device.activation_bytes)} - "
            f"{format_gib(device.overhead_bytes)}",
            size,
        )
    per_sequence = deployment.kv_bytes(plan.workload.context, reserve)
    yield Formula(
        "concurrent sequences",
        "min(KV-cache budget / KV of a sequence on a rank, max_num_seqs)",
        f"min({format_gib(device.kv_budget_bytes)} / {format_gib(per_sequence)}, {reserve.max_num_seqs})",
        str(device.max_concurrent_sequences),
    )


def _activation_widths(shape: ModelShape, tp: int) -> tuple[str, str]:
    """MLP activation width per token on one rank: the larger of dense and MoE layers."""
    dense = f"3 x {shape.intermediate_size} / {tp}"
    if (experts := shape.experts) is None:
        return "3 x intermediate / tp", dense
    formula = "top_k x (3 x width / tp + hidden) + 3 x shared / tp"
    routed = (
        f"{experts.per_token} x (3 x {experts.width} / {tp} + {shape.hidden_size}) + "
        f"3 x {experts.shared_width} / {tp}"
    )
    if not experts.dense_layers:
        return formula, routed
    return f"max({formula}, 3 x intermediate / tp)", f"max({routed}, {dense})"


def _images(plan: DeploymentPlan, device: DevicePlan) -> Iterator[Formula]:
    load = plan.workload.images
    if load is None:
        return
    yield Formula(
        "image tokens",
        "images x tokens of one",
        f"{load.count} x {load.tokens.num_tokens} ({load.tokens.formula})",
        f"{load.num_tokens:,}",
    )
    yield Formula(
        "encode, compute",
        "images x (2 x (tower x patches + projector x tokens) + 4 x layers x hidden x patches^2 / tiles)",
        f"{load.count} x (2 x ({load.vision_parameters:,} x {load.tokens.num_patches:,} + "
        f"{load.projector_parameters:,} x {load.tokens.num_tokens:,}) + 4 x {load.layers} x "
        f"{load.hidden_size} x {load.tokens.num_patches:,}^2 / {load.tokens.num_tiles})",
        f"{load.flops / 1e12:,.4g} TFLOP",
    )
    if device.encode_seconds is not None:
        yield Formula(
            "encode",
            "max(FLOP / (peak x MFU), weights / (bandwidth x MBU)) + launches",
            f"{load.flops / 1e12:,.4g} TFLOP on {device.gpu}",
            _time(device.encode_seconds),
        )


def _speed(plan: DeploymentPlan, device: DevicePlan) -> Iterator[Formula]:
    hardware, recipe = device.device, plan.recipe
    peak = hardware.peak_flops(recipe.bits, recipe.name)
    for name, time in (("idle step", device.decode), ("idle prefill", device.prefill)):
        if time is None or hardware.bandwidth is None or peak is None:
            continue
        ranks = device.deployment.tp
        yield Formula(
            f"{name}, memory",
            "bytes of a rank / (bandwidth x MBU)",
            f"{time.num_bytes / 1e9:,.4g} GB / ({hardware.bandwidth / 1e9:,.4g} GB/s x "
            f"{time.num_bytes / hardware.bandwidth / time.moving:.3g})",
            _time(time.moving),
        )
        yield Formula(
            f"{name}, compute",
            "FLOP of all ranks / (tp x peak x MFU)",
            f"{time.flops / 1e12:,.4g} TFLOP / ({ranks} x {peak / 1e12:,.4g} TFLOP/s x "
            f"{time.flops / (ranks * peak) / time.computing:.3g})",
            _time(time.computing),
        )
        yield _step(name, time)
    yield from _loaded(plan, device)


def _step(name: str, time: StepTime) -> Formula:
    """Time of a step: the sum of its operators, or its roofs where a run measured their shares."""
    is_fixed = time.communication + time.fixed > max(time.moving, time.computing)
    bound = "launches and communication" if is_fixed else time.bound
    result = f"{_time(time.seconds)}, bound by {bound}"
    if time.operators:
        return Formula(
            name,
            "sum of the operators, each the longer of memory and compute, messages and launches",
            " + ".join(
                f"{operator} {_time(part)}{'' if source == 'fit' else f' ({source})'}"
                for operator, part, source in time.operators
            ),
            result,
        )
    return Formula(
        name,
        "max(memory, compute) + launches + communication",
        f"max({_time(time.moving)}, {_time(time.computing)}) + {_time(time.fixed)} + "
        f"{_time(time.communication)}",
        result,
    )


def _loaded(plan: DeploymentPlan, device: DevicePlan) -> Iterator[Formula]:
    if device.load is not None or (loaded := device.predicted) is None:
        return
    work = plan.workload
    yield Formula(
        f"under {work.sequences} clients",
        "TPOT + prefills of the others / answer; TTFT + steps, prompts and places waited for",
        f"prompts of {work.prompt_tokens:,}, answers of {work.answer_tokens:,} tokens",
        f"TPOT {_time(loaded.tpot_seconds)}, TTFT {_time(loaded.ttft_seconds)}, "
        f"{loaded.throughput:,.4g} tokens/s",
    )
    if (band := loaded.band) is None:
        return
    yield Formula(
        "error of TPOT",
        "the band of deployments like it, moved and narrowed by this machine's own rows"
        if band.own
        else "measured / predicted - 1 of 90 % of the held-out deployments most like it",
        band.alike,
        band.text,
    )


def _gains(plan: DeploymentPlan, device: DevicePlan) -> Iterator[Formula]:
    draft, gain = plan.setup.speculation, device.speculation
    if draft and gain:
        a, k = draft.acceptance, draft.draft_tokens
        yield Formula(
            "tokens per verification",
            "(1 - a^(k+1)) / (1 - a)",
            f"(1 - {a}^{k + 1}) / (1 - {a})",
            f"{gain.expected_tokens:.2f}",
        )
        yield Formula(
            "speed-up of speculation",
            "expected tokens / (verification in steps + k x draft cost)",
            f"{gain.expected_tokens:.2f} / ({gain.verification_steps:.2f} + {k} x {draft.draft_cost})",
            f"{gain.speedup:.2f}",
        )
    prices, cost = plan.setup.prices, device.cost
    dollars, speed = device.dollars_per_million, device.tokens_per_second
    if prices and cost and dollars and speed:
        gpus = device.deployment.gpus
        yield Formula(
            "dollars per million output tokens",
            "GPUs x price / (3600 x tokens/s x duty cycle) x 1e6",
            f"{gpus} x {prices.gpu_hour} / (3600 x {speed:.1f} x {prices.duty_cycle}) x 1e6",
            f"{dollars:.2f}",
        )
        if cost.break_even_requests_per_day is not None and cost.api_request is not None:
            yield Formula(
                "break-even, requests per day",
                "24 x GPUs x price / API price of a request",
                f"24 x {gpus} x {prices.gpu_hour} / {cost.api_request:.6f}",
                f"{cost.break_even_requests_per_day:,.0f}",
            )


def _number(value: float | Fraction) -> str:
    return f"{float(value):.6g}"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
