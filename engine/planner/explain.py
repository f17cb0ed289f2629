"""Formulas of a plan with their numbers, as printed by `--explain`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from ...quant.families.shapes import ModelShape
from ..base.units import format_gib
from .cache_size import kv_dtype
from .engine_rules import RULES, CacheKnobs
from .load import Prediction
from .memory import SAMPLER_COPIES
from .plan import DeploymentPlan, DevicePlan
from .probed_shape import ProbedShape, cache_line
from .setup import PlannedWorkload


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
    sizes = recipe.bytes_by_role(shape.tensors())
    elements: Counter[str] = Counter()
    for tensor in shape.tensors():
        elements[tensor.role] += tensor.num_elements * tensor.count
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
        _size(sizes.total()),
    )
    if recipe.stored_bytes:
        rule = "sum of data_offsets in the safetensors headers"
        yield Formula("weights, checkpoint", rule, plan.model.source, f"{recipe.stored_bytes:,} B")


def kv_line(shape: ModelShape, element: Fraction) -> str:
    """Numbers of the bytes of a token in the KV cache: `2 x 32 layers x 8 KV heads x 128 x 2 B`."""
    size = f"{float(element):.5g} B"
    if isinstance(shape, ProbedShape):
        return f"{cache_line(shape)}, x {size}"
    if shape.latent:
        return f"{shape.num_layers} layers x {shape.cached_elements} latent elements x {size}"
    return (
        f"2 x {shape.num_layers} layers x {shape.num_kv_heads} KV heads x {shape.head_dim} x {size}"
    )


def _cache(plan: DeploymentPlan) -> Iterator[Formula]:
    shape, work = plan.model.shape, plan.workload
    dtype = kv_dtype(work.kv_dtype)
    element = dtype.bytes_per_element(shape)
    rule = "2 x layers x KV heads x head_dim x bytes"
    if isinstance(shape, ProbedShape):
        rule = f"sum over the tensors of the cache, as {plan.model.how} holds them"
    elif shape.latent:
        rule = "layers x (latent + rope) x bytes"
    per_token = f"{shape.kv_bytes_per_token(element):,} B"
    numbers = f"{kv_line(shape, element)} ({dtype.description})"
    yield Formula("KV per token", rule, numbers, per_token)
    if not isinstance(shape, ProbedShape):
        listing = " + ".join(
            f"{count} layers x {min(work.context, window or work.context):,}"
            for window, count in Counter(shape.windows).items()
        )
        yield Formula(
            "KV of a sequence",
            "sum over the layers of min(context, window) x bytes of a token in a layer",
            f"({listing}) x {_number(shape.cached_elements * element)}",
            _size(shape.kv_bytes(work.context, element)),
        )
    elif shape.state_bytes:
        tensors = (t for t in shape.layer_tensors if t.law != "growing")
        states = Counter((t.name, t.heads * t.width) for t in tensors)
        yield Formula(
            "state of a sequence",
            "sum over the layers of elements x bytes, in the model's own dtypes",
            " + ".join(f"{count} x {size:,} {name}" for (name, size), count in states.items()),
            _size(shape.state_bytes),
        )
    knobs = CacheKnobs(work.block_size, plan.devices[0].reserve.chunk_tokens)
    for engine in RULES.values():
        size = engine.kv_bytes(shape, work.context, element, knobs)
        if isinstance(shape, ProbedShape):
            kept, numbers = "KV and state", f"{work.context:,} tokens, blocks of {work.block_size}"
        else:
            slot = engine.cached_elements(shape) * element
            kept, numbers = "KV", f"{round(size / slot):,} slots x {_number(slot)}"
        name = f"{kept} of a sequence in {engine.name}"
        yield Formula(name, engine.description, numbers, _size(size))


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
    budget = format_gib(device.kv_budget_bytes)
    rule = "as set, or the engine's fraction of free memory on a CPU"
    numbers = format_gib(reserve.kv_cache_bytes or 0)
    if reserve.kv_cache_bytes is None:
        rule = "visible x utilization - weights - peak activations - runtime"
        taken = (device.weight_bytes, device.activation_bytes, device.overhead_bytes)
        visible = f"{format_gib(device.device.memory_bytes)} x {reserve.utilization}"
        numbers = " - ".join((visible, *map(format_gib, taken)))
    yield Formula(f"KV-cache budget on {device.gpu}", rule, numbers, budget)
    per_sequence = deployment.kv_bytes(plan.workload.context, reserve)
    yield Formula(
        "concurrent sequences",
        "min(KV-cache budget / KV of a sequence on a rank, max_num_seqs)",
        f"min({budget} / {format_gib(per_sequence)}, {reserve.max_num_seqs})",
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
    hardware, ranks = device.device, device.deployment.tp
    peak = hardware.peak_flops(plan.recipe.bits, plan.recipe.name)
    for name, time in (("idle step", device.decode), ("idle prefill", device.prefill)):
        if time is None or hardware.bandwidth is None or peak is None:
            continue
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
        # The sum of its operators, or its roofs where a run measured their shares.
        rule = "sum of the operators, each the longer of memory and compute, messages and launches"
        numbers = " + ".join(
            f"{operator} {_time(part)}{'' if source == 'fit' else f' ({source})'}"
            for operator, part, source in time.operators
        )
        if not time.operators:
            rule = "max(memory, compute) + launches + communication"
            moving, computing = _time(time.moving), _time(time.computing)
            added = f"{_time(time.fixed)} + {_time(time.communication)}"
            numbers = f"max({moving}, {computing}) + {added}"
        is_fixed = time.communication + time.fixed > max(time.moving, time.computing)
        bound = "launches and communication" if is_fixed else time.bound
        yield Formula(name, rule, numbers, f"{_time(time.seconds)}, bound by {bound}")
    if device.load is None and device.predicted is not None:
        yield from _loaded(plan.workload, device.predicted)


def _loaded(work: PlannedWorkload, loaded: Prediction) -> Iterator[Formula]:
    yield Formula(
        f"under {work.sequences} clients",
        "TPOT + prefills of the others / answer; TTFT + steps, prompts and places waited for",
        f"prompts of {work.prompt_tokens:,}, answers of {work.answer_tokens:,} tokens",
        f"TPOT {_time(loaded.tpot_seconds)}, TTFT {_time(loaded.ttft_seconds)}, "
        f"{loaded.throughput:,.4g} tokens/s",
    )
    if (band := loaded.band) is not None:
        rule = "measured / predicted - 1 of 90 % of the held-out deployments most like it"
        if band.own:
            rule = "the band of deployments like it, moved and narrowed by this machine's own rows"
        yield Formula("error of TPOT", rule, band.alike, band.text)


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


def _size(num_bytes: int) -> str:
    return f"{num_bytes:,} B = {format_gib(num_bytes)}"


def _number(value: float | Fraction) -> str:
    return f"{float(value):.6g}"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
