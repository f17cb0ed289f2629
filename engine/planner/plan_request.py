"""Command-line options of `llmopt kv-plan`, resolved into a plan; measured runs in place of a data sheet.

Weights are told by names of `llmopt quantize`: `Q4_K_M` is a mix of llama.cpp, whose rules give each weight
its block type; `awq`, `exl3` or `hqq:3` are a method or the format that it writes, with bits after the name.
What a recipe has no field for counts by the scheme's bits per weight, its scales included.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fractions import Fraction
from typing import Any

from ...base.errors import BadInput
from ...base.processor import computes_in_bf16
from ...quant.families.shapes import ModelShape
from ..base.units import parse_bytes, parse_size, parse_tokens, required_slo
from ..config.config import EngineConfig
from ..config.plan_options import PlanRequest
from .cache_size import DEFAULT_BLOCK_SIZE, kv_dtype
from .catalog import PlannedModel, find_model, stored_quantization_of
from .devices import Device, choose_devices, counted_name, find_device
from .engine_rules import engine_rule
from .load import Lengths, Load, PlannedLoad, Slo, dataset_lengths, image_load
from .load_plan import Fleet, least_fleets
from .offload import ENGINES, Host, parse_host
from .own_runs import MeasuredRun, lost_models, own_rows, read_runs, sent_in, together
from .plan import DeploymentPlan, make_plan
from .setup import PlannedWorkload, Prices, Setup, Speculation
from .solver import RANKS
from .step_model import check_counts
from .weights import RECIPES, UNQUANTIZED_BYTES, WeightRecipe, chosen_group, recipe_for


def plan_for(ask: PlanRequest, recipe: WeightRecipe | None = None) -> DeploymentPlan:
    """Make the requested plan; `recipe` replaces the request's weights. Raises BadInput: an invalid option
    value, or one that contradicts the model."""
    ask = _with_count(ask)
    choose_devices(ask.gpus, None)  # a wrong name is refused before a model is probed
    model = find_model(ask.model, trust_remote_code=ask.trust_remote_code)
    recipe = recipe or _recipe(ask, model)
    runs = _runs(ask, model, recipe)
    devices = _devices(ask, runs)
    on_cpu = all(device.kind == "cpu" for device in devices)
    block_size = ask.block_size
    if block_size is None:
        block_size = DEFAULT_BLOCK_SIZE["cpu" if on_cpu else "cuda"]
    engine, beside = ask.engine, None
    devices = _on_metal(devices, ask)
    if (host := _host(ask, devices)) is not None and engine is None:
        engine = ENGINES[0]
    if engine in (None, "all"):
        # Without a choice vLLM and llmopt; llmopt alone for what only it has.
        if on_cpu or ask.measured is not None or ask.kv_budget is not None:
            engine = "llmopt"
        elif any(device.kind == "mps" for device in devices) or _GGUF.match(recipe.name):
            engine = "llama.cpp"  # vLLM loads no GGUF file without a plugin
        else:
            engine, beside = "vllm", "llmopt"
    load = _load(ask)
    workload = PlannedWorkload(
        _context(ask, model, load),
        ask.sequences,
        kv_dtype(ask.kv_dtype or _default_kv_dtype(model, engine)).name,
        block_size,
        ask.output_tokens,
        EngineConfig(kv_budget=ask.kv_budget, kv_eviction=ask.kv_eviction).eviction(block_size),
        None if ask.images is None else image_load(model, ask.images),
        prefix_share=ask.prefix_hit_rate,
        kv_dtype_is_default=ask.kv_dtype is None,
    )
    if load is None and ask.slo is not None:
        load = _asked(ask, ((workload.prompt_tokens, workload.answer_tokens),))
    workload = replace(workload, load=load)
    # Where the CPU has no bfloat16 llmopt's engine runs float32; an explicit format is an explicit --dtype.
    plain_bytes = 2 if computes_in_bf16() else 4
    if engine != "llmopt" or ask.weights is not None:
        plain_bytes = None
    sizes = ("tp", "pp", "ep", "attention_dp")
    limits = ("utilization", "max_num_batched_tokens", "max_num_seqs")
    chosen = {name: getattr(ask, name) for name in (*sizes, *limits)}
    if host is not None and engine == "llama.cpp" and ask.max_num_seqs is None:
        chosen["max_num_seqs"] = ask.sequences  # `--parallel`: slots that the server allocates
    setup = Setup(
        **chosen,
        host=host,
        engine=engine,
        engine_version=ask.engine_version,
        kv_cache_bytes=None if ask.kv_cache_memory is None else parse_size(ask.kv_cache_memory),
        measured=together(runs).efficiency if runs else None,
        own=own_rows(runs, (model.name, recipe.label), devices, engine, plain_bytes)
        if runs
        else None,
        prices=_prices(ask),
        speculation=_speculation(ask),
        cpu_plain_bytes=plain_bytes,
        keeps_float32=ask.weights is not None and recipe.plain_bytes == recipe.bits / 8,
    )
    ranked = any(name.lower() == "all" for name in ask.gpus)
    fleets: list[Fleet] = []
    if ask.target_request_rate is not None:
        solvers = DeploymentPlan(model, recipe, workload, setup).solvers(devices)
        fleets = least_fleets(solvers, ask.target_request_rate)
        best, beside = fleets[0], None
        devices = [best.device]
        division = {name: getattr(best.deployment, name) for name in sizes}
        setup = replace(setup, **division)
        assert workload.load is not None
        share = ask.target_request_rate / best.replicas
        load = replace(workload.load.load, concurrency=None, rate=share)
        workload = replace(workload, load=PlannedLoad(load, dataset=workload.load.dataset))
    plan = make_plan(model, recipe, workload, devices, setup=setup, ranked=ranked, beside=beside)
    lost = [
        f"runs of {path} in {ask.measured} are left out: the model is no longer there"
        for path in lost_models(runs)
    ]
    if not on_cpu and setup.run_bytes(recipe, "cuda") is not None:
        lost.append(
            "the checkpoint is float32, which engines hold in 16 bits on a GPU: --weights float32 plans "
            "--dtype float32"
        )
    return replace(plan, warnings=(*plan.warnings, *lost), fleets=tuple(fleets))


def _default_kv_dtype(model: PlannedModel, engine: str) -> str:
    """The dtype that the engine stores without an option: that of ModelOpt's scales in the checkpoint, where
    it takes them by itself, such as vLLM's `auto` (`resolve_kv_cache_dtype_string`)."""
    if engine in ("vllm", "sglang", "trtllm"):
        stored = stored_quantization_of(model)
        if stored is not None and stored.kv_dtype is not None:
            return stored.kv_dtype
    return engine_rule(engine).default_kv_dtype


def _with_count(ask: PlanRequest) -> PlanRequest:
    """The request with the number of its GPUs, as in `2x l40s`, as parallel sizes: tensor parallelism in a
    machine, then pipeline stages."""
    counts, names = zip(*map(counted_name, ask.gpus), strict=True) if ask.gpus else ((), ())
    if not any(counts):
        return ask
    given, (count, *others) = ", ".join(ask.gpus), dict.fromkeys(counts)
    if others or not count or "cpu" in map(str.lower, names):
        raise BadInput(
            f"--gpu {given}: give every GPU the same number, from 1, and no number to cpu"
        )
    sizes = ask.tp, ask.pp, ask.ep, ask.attention_dp
    if sizes == (None, None, 1, 1):
        tp = max(ranks for ranks in RANKS if count % ranks == 0)
        return replace(ask, gpus=names, tp=tp, pp=count // tp)
    arranged = (ask.tp or 1) * (ask.pp or 1) * ask.attention_dp
    if arranged != count:
        raise BadInput(
            f"--gpu {given}: --tp x --pp x --attention-dp are {arranged} GPUs; leave the number or them out"
        )
    return replace(ask, gpus=names)


_OF_METAL = ("llama.cpp", "llmopt", "transformers")
"""Engines that run on Apple's GPUs."""


def _on_metal(devices: list[Device], ask: PlanRequest) -> list[Device]:
    """The devices that the engine runs on: of `all` those without Apple's where it does not run on them."""
    if ask.engine in (*_OF_METAL, "all"):
        return devices
    if any(name.lower() == "all" for name in ask.gpus):
        return [device for device in devices if device.kind != "mps"]
    if ask.engine is not None and (apple := [d.name for d in devices if d.kind == "mps"]):
        raise BadInput(
            f"--engine {ask.engine} does not run on {apple[0]}: choose {', '.join(_OF_METAL)}"
        )
    return devices


def _context(ask: PlanRequest, model: PlannedModel, load: PlannedLoad | None) -> int:
    """Tokens per sequence: as given, else those of the longest request, else the model's context."""
    longest = None if load is None else load.load.longest
    if ask.context is None:
        return model.shape.max_context if longest is None else longest
    context = parse_tokens(ask.context)
    if longest is not None and longest > context:
        raise BadInput(f"--ctx {context}: the longest request has {longest} tokens; leave it out")
    return context


def _load(ask: PlanRequest) -> PlannedLoad | None:
    if ask.dataset is not None and (ask.input_len is not None or ask.output_tokens is not None):
        raise BadInput("--dataset has lengths of its own: leave out --input-len and --output-len")
    if ask.dataset is not None:
        return _asked(ask, dataset_lengths(ask.dataset))
    if ask.input_len is None:
        if ask.request_rate is not None:
            raise BadInput(
                "a load needs lengths: give --input-len and --output-len, or --dataset azure"
            )
        return None
    if ask.output_tokens is None:
        raise BadInput(f"--input-len {ask.input_len}: give --output-len too")
    check_counts(input_len=ask.input_len, output_len=ask.output_tokens)
    return _asked(ask, ((ask.input_len, ask.output_tokens),))


def _asked(ask: PlanRequest, lengths: tuple[Lengths, ...]) -> PlannedLoad:
    rate = ask.request_rate
    load = Load(lengths, ask.sequences if rate is None else None, rate, ask.prefix_hit_rate)
    slo = None if ask.slo is None else Slo(required_slo(ask.slo), ask.slo_by, ask.slo_share)
    return PlannedLoad(load, slo, ask.dataset)


def _devices(ask: PlanRequest, runs: Sequence[MeasuredRun]) -> list[Device]:
    """The devices; those without a data sheet get the ceilings that the runs measured."""
    memory = None if ask.gpu_memory is None else parse_bytes(ask.gpu_memory)
    if not runs:
        return choose_devices(ask.gpus, memory)
    run = together(runs)
    if not ask.gpus and memory is None:
        if not run.is_cpu:
            raise BadInput(
                f"{ask.measured} was measured on a GPU: name it with --gpu, or give --gpu-memory"
            )
        return [run.device(host) for host in choose_devices(["cpu"], None)]
    devices = choose_devices(ask.gpus, memory)
    for device in devices:
        if run.is_cpu != (device.kind == "cpu"):
            measured, planned = ("a CPU", device.name) if run.is_cpu else ("a GPU", "cpu")
            raise BadInput(
                f"{ask.measured} was measured on {measured}, and --gpu is {planned}: give a run of the device"
            )
    return [
        run.device(device) if device.bandwidth is None or device.name == run.gpu else device
        for device in devices
    ]


def _runs(ask: PlanRequest, model: PlannedModel, recipe: WeightRecipe) -> tuple[MeasuredRun, ...]:
    deployed = model.name, recipe.label
    if ask.measured is not None:
        on_cpu = ask.gpu_memory is None and all(name.lower() == "cpu" for name in ask.gpus)
        return read_runs(ask.measured, deployed, on_cpu=on_cpu)
    # A plan of our engine on one GPU rests on that GPU's record, if one was sent in.
    if ask.engine != "llmopt" or len(ask.gpus) != 1 or ask.gpus[0].lower() in ("all", "cpu"):
        return ()
    record = sent_in(find_device(ask.gpus[0]))
    return () if record is None else read_runs(record, deployed, on_cpu=False)


def _host(ask: PlanRequest, devices: Sequence[Device]) -> Host | None:
    """The RAM that takes weights, checked against the rest of the request."""
    host = parse_host(ask.ram, ask.ram_bandwidth, ask.pcie)
    if host is None:
        return None
    if all(device.is_unified for device in devices):
        raise BadInput(
            f"--ram: {devices[0].name} has the host's memory already; leave --ram out, or name another --gpu"
        )
    if ask.measured is not None:
        raise BadInput("--ram and --measured: a run of one GPU tells nothing of weights in RAM")
    if (ask.tp, ask.pp, ask.ep, ask.attention_dp) not in ((None, None, 1, 1), (1, None, 1, 1)):
        raise BadInput("--ram plans one GPU: leave out --tp, --pp, --ep and --attention-dp")
    if ask.engine not in (None, *ENGINES):
        raise BadInput(
            f"--ram with --engine {ask.engine}: {' and '.join(ENGINES)} are planned with weights in RAM; "
            "choose one of them"
        )
    return host


def _recipe(ask: PlanRequest, model: PlannedModel) -> WeightRecipe:
    chosen = (ask.weights, ask.group_size, ask.symmetric, ask.file_format)
    if all(value is None for value in chosen):
        return model.as_stored()
    return named_recipe(
        "int4" if ask.weights is None else ask.weights,
        model.shape,
        ask.group_size,
        symmetric=ask.symmetric,
        file_format=ask.file_format,
        plain_bytes=model.plain_bytes,
    )


def _speculation(ask: PlanRequest) -> Speculation | None:
    length = ask.acceptance_length
    if ask.draft_tokens is None and length is not None:
        raise BadInput("--acceptance-length needs --draft-tokens, the draft tokens of a step")
    if ask.draft_tokens is None:
        return None
    if length is not None:
        return Speculation.of_length(ask.draft_tokens, length, ask.draft_cost)
    return Speculation(ask.draft_tokens, ask.acceptance, ask.draft_cost)


def _prices(ask: PlanRequest) -> Prices | None:
    has_api = ask.api_price_in is not None or ask.api_price_out is not None
    if ask.gpu_hour_price is None and has_api:
        raise BadInput("--api-price-in and --api-price-out need --gpu-hour-price to compare with")
    if ask.gpu_hour_price is None and ask.duty_cycle == 1:
        return None
    return Prices(ask.gpu_hour_price, ask.api_price_in, ask.api_price_out, ask.duty_cycle)


_GGUF = re.compile(r"(I|T)?Q\d")
"""The beginning of the name of every GGUF type."""
_SPELLED = re.compile(r"([a-z][a-z0-9_-]*?)(?:[:@-](\d+)(?:\.0)?(?:bits?|bpw)?)?")
_PLAIN_NAMES = {
    "bfloat16": "bf16",
    "fp16": "f16",
    "float16": "f16",
    "f32": "float32",
    "fp32": "float32",
}
_INT4 = {"awq": "awq", "rtn": "compressed-tensors", "autoround": "compressed-tensors"}
"""Methods whose int4 weights the planner knows to the byte, and the layouts that they are written in."""


def named_recipe(
    name: str,
    shape: ModelShape,
    group_size: int | None = None,
    *,
    symmetric: bool | None = None,
    file_format: str | None = None,
    plain_bytes: int = UNQUANTIZED_BYTES,
) -> WeightRecipe:
    """The recipe of one of the planner's formats, or of a type or a method of `llmopt quantize`. Raises
    BadInput: no such name, or an option that it does not have."""
    options: dict[str, Any] = {"symmetric": symmetric, "plain_bytes": plain_bytes}
    if (plain := _PLAIN_NAMES.get(name.lower(), name.lower())) in RECIPES:
        return recipe_for(plain, shape, group_size, file_format=file_format, **options)
    # What follows takes a while to import.
    from ...quant.gguf.mix import ALIASES, DEFAULT_GGUF_TYPE, GGUF_TYPES
    from ...quant.methods.options import SchemeOptions
    from ...quant.methods.registry import METHODS

    mix = DEFAULT_GGUF_TYPE if name.lower() == "gguf" else name.upper()
    if mix in (*GGUF_TYPES, *ALIASES):
        if (group_size, symmetric, file_format) != (None, None, None):
            raise BadInput(
                f"--weights {name}: a GGUF type has its own groups; leave their options out"
            )
        return _mixed(ALIASES.get(mix, mix), shape)
    spelled = _SPELLED.fullmatch(name.lower())
    method = spelled and spelled[1]
    if method not in METHODS:  # the format's name stands for the first method that writes it
        writers = (m.name for m in METHODS.values() if m.default_format == method)
        method = next(writers, None)
    if spelled is None or method is None:
        names = {known.lower(): known for known in (*RECIPES, *METHODS, "exl3", *GGUF_TYPES)}
        close = get_close_matches(name.lower(), names, n=3, cutoff=0.5)
        offered = f"; close: {', '.join(names[key] for key in close)}" if close else ""
        known = ", ".join(RECIPES)
        raise BadInput(
            f"no weight format {name!r}{offered}; choose {known}, a GGUF type such as Q4_K_M, or a method of "
            "quantize, with its bits as in exl3:3"
        )
    bits = None if spelled[2] is None else int(spelled[2])
    if method in ("gptq", *_INT4) and METHODS[method].choose_bits(bits) in (4, 8):
        base = "gptq" if method == "gptq" else f"int{bits or 4}"
        layout = file_format or (None if method == "gptq" or bits == 8 else _INT4[method])
        recipe = recipe_for(base, shape, group_size, file_format=layout, **options)
        return replace(recipe, bits=8, zero_bits=8) if base == "gptq" and bits == 8 else recipe
    if file_format is not None:
        raise BadInput(f"--format has no meaning for {name}")
    if METHODS[method].grouped:
        group_size = chosen_group(RECIPES["int4"], shape, group_size)
    chosen = SchemeOptions(bits=bits, group_size=group_size, symmetric=symmetric)
    scheme = METHODS[method].scheme(chosen)
    if method == "trellis":  # EXL3 with its default codebook, whose multiplier is stored
        label = f"trellis{scheme.bits}"
        return WeightRecipe(label, scheme.bits, bytes_per_input=2, bytes_per_tensor=4)
    elements = num_bits = 0
    for t in shape.tensors():
        if t.role in ("linear", "expert"):
            count = t.num_elements * t.count
            num_bits += count * scheme.bits_per_weight(t.out_features, t.in_features)
            elements += count
    width = Fraction(num_bits / elements).limit_denominator(1 << 20)
    return WeightRecipe(scheme.label, width, scale_bits=0, plain_bytes=plain_bytes)


def _mixed(mix: str, shape: ModelShape) -> WeightRecipe:
    """The mean bits of the linears under a mix of llama.cpp, and those of embedding and head."""
    from ...quant.gguf.mix import MixShape, embedding_type, output_type
    from ...quant.gguf.mix import mix as schemes_of
    from ...quant.kinds.ggml.scheme import GGUF_BLOCKS

    experts = shape.experts.count if shape.experts else 0
    # llama-quantize refuses IQ3_XXS without an importance matrix, so every file of it was made with one.
    heads = shape.num_heads, shape.num_kv_heads
    rules = MixShape(shape.num_layers, *heads, experts, has_importance=mix == "IQ3_XXS")
    modules = {name: size for name, size, _ in _modules(shape)}
    chosen = schemes_of(mix, modules, rules)
    elements = bits = Fraction(0)
    for name, (out_features, in_features), count in _modules(shape):
        width = out_features * in_features * count
        scheme = chosen.get(name)
        per_weight = 16.0 if scheme is None else scheme.bits_per_weight(out_features, in_features)
        elements, bits = elements + width, bits + width * Fraction(per_weight)

    def bits_of(block: str | None) -> Fraction:
        if block is None:
            return Fraction(16)
        weights, size = GGUF_BLOCKS[block]
        return Fraction(8 * size, weights)

    head = bits_of(output_type(mix, shape.hidden_size))
    embedding = head if shape.tied else bits_of(embedding_type(mix, shape.hidden_size))
    width = bits / elements
    return WeightRecipe(mix, width, scale_bits=0, head_bits=head, embedding_bits=embedding)


def _modules(shape: ModelShape) -> Iterator[tuple[str, tuple[int, int], Fraction]]:
    """The linears of each layer under a Llama's names, with their sizes and their mean number; linears that
    only this architecture has count as attention outputs, which have the type of most weights."""
    counts: Counter[tuple[str, int, int, str]] = Counter()
    for t in shape.tensors():
        if t.role in ("linear", "expert"):
            counts[t.role, t.out_features, t.in_features, t.shard] += t.count
    for (role, out_features, in_features, shard), count in counts.items():
        per_layer = Fraction(count, shape.num_layers)
        parts = _parts(shape, role, (out_features, in_features), shard, per_layer)
        for index in range(shape.num_layers):
            for part in parts:
                name = f"model.layers.{index}.{part}"
                yield name, (out_features, in_features), per_layer / len(parts)


def _parts(
    shape: ModelShape, role: str, size: tuple[int, int], shard: str, per_layer: Fraction
) -> list[str]:
    hidden, queries = shape.hidden_size, shape.num_heads * shape.head_dim
    if role == "linear" and shard == "kv_heads":
        return ["self_attn.k_proj", "self_attn.v_proj"]
    if role == "linear" and size in ((queries, hidden), (hidden, queries)) and per_layer <= 2:
        both = ["self_attn.q_proj", "self_attn.o_proj"]
        return both if per_layer == 2 else both[size == (hidden, queries) :][:1]
    if size[1] == hidden and not shape.latent:
        return ["mlp.gate_proj", "mlp.up_proj"]
    is_down = size[0] == hidden and (role == "expert" or not shape.latent)
    return ["mlp.down_proj"] if is_down else ["self_attn.o_proj"]
