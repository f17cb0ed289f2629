"""The search: lanes of file formats that the loader takes, and their fronts with bytes, KL, speed and memory.

A lane is one file format with the kinds of weights that the loader takes on the hardware. Its front is solved
by `search_fronts` (expected KL divergence under a bound on bytes), and each of its points is planned at the
wanted load by the planner. The usual quantizations next to the fronts are compared with the answer.

The result is written as JSON once, so that a resumed run decides from the same numbers.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from ...base.atomic_io import write_atomically
from ...base.errors import BadInput
from ...base.extras import require
from ...base.option import offer
from ...base.progress import Progress, SubRun
from ...engine.config.plan_options import PlanRequest
from ...engine.planner.catalog import find_model
from ...engine.planner.devices import Device, choose_devices
from ...engine.planner.engine_rules import engine_rule
from ...engine.planner.expected import Loop
from ...engine.planner.plan_request import named_recipe, plan_for
from ...engine.planner.weights import WeightRecipe, weight_bytes
from ...quant.base.scheme import Scheme
from ...quant.check.contents import codes_of
from ...quant.check.engines import loaders
from ...quant.check.kernels import Question, engine_rules, kernel_for
from ...quant.check.loaders import vllm_refuses_on_cpu
from ...quant.methods.options import MethodOptions
from ...quant.model.checkpoint import read_json
from ...quant.pipeline.candidates import Search, search_of
from ...quant.pipeline.mixed_precision import Allocation, Lane, with_schemes
from ...quant.pipeline.preflight import module_sizes, unquantized_bytes
from ...quant.pipeline.prepare import search_fronts
from ...quant.plan.plan import QuantizePlan, make_plan, stored
from ...quant.plan.request import QuantizeRequest
from ...quant.source.models import resolve_model
from ..options.options import BenchOptions
from ..session.run_sessions import run_bench, write_run
from .decision import FULL, mean_speed
from .target import DATASET, STATISTICS, BestRequest, PlanContext, device_of, local_gpu

SEARCH_NAME, MACHINE = "search.json", "machine"
POINTS = 16  # bounds of the front of each lane
_ROWS = {name: name for name in ("llmopt", "transformers", "llama.cpp")} | {"vllm": "vLLM"}
_MOST_CLIENTS = 1024


@dataclass(frozen=True, slots=True)
class Format:
    """The making of a lane's mixtures: the searching `method` of `quantize`, the `base` method whose plan
    shows the linears to the rules of loaders, the prefix of the points' names, candidates (none: the method's
    own), and candidates that only GPUs gain from. `gpu_only`: its solver takes too long on a CPU."""

    method: str
    base: str
    prefix: str
    kinds: tuple[str, ...] = ()
    gpu_kinds: tuple[str, ...] = ()
    gpu_only: bool = False


FORMATS = {
    "compressed-tensors": Format(
        "auto",
        "gptq",
        "ct",
        ("int2", "int3", "int4", "int6", "int8", "int2-asym", "int3-asym", "int4-asym"),
        ("fp8", "nvfp4", "mxfp4"),
    ),
    "gguf": Format("auto", "gptq", "gguf"),
    "exl3": Format("trellis", "trellis", "exl3", gpu_only=True),
}
USUAL: Mapping[str, Mapping[str, Any]] = {
    "awq int4": {"method": "awq", "bits": 4},
    **{name: {"method": name} for name in ("Q4_K_M", "Q5_K_M", "Q8_0")},
    "fp8": {"method": "fp8"},
}
"""The usual choices of a user, by the options of `quantize`."""
ORIGINAL = "original"
_RECIPES = {ORIGINAL: "bf16", "awq int4": "awq"}


@dataclass(frozen=True, slots=True)
class Target:
    """A question with its model and hardware. `is_here`: the hardware is this machine's and the loader
    llmopt, so that finalists' speed is measured. `measured` is the run on this machine that its CPU is
    planned by."""

    asked: BestRequest
    model: str
    path: Path
    device: Device
    is_here: bool
    measured: Path | None = None

    @classmethod
    def of(cls, request: BestRequest, model: str) -> Target:
        """Find the model and the hardware. Raises BadInput: there is no such model, GPU or file format."""
        path = resolve_model(model)
        for name in request.formats:
            if name not in FORMATS:
                raise BadInput(f"--format {name}: {offer(name, FORMATS)}")
        if request.loads_in != "vllm" and "gguf" in (request.formats or FORMATS):
            require("the format gguf (else give --format compressed-tensors)", "gguf", "gguf")
        longest, shape = PlanContext.of(request).context, find_model(str(path)).shape
        if request.context is not None and longest > shape.max_context:
            raise BadInput(
                f"--ctx {longest}: {model} was trained for {shape.max_context} tokens: give fewer"
            )
        here = local_gpu() or "cpu"
        device = device_of(request.gpu or here)
        is_here = device.kind == "cpu"
        with suppress(BadInput):  # the table may lack this machine's GPU
            is_here = is_here or choose_devices([here], None) == [device]
        return cls(request, model, path, device, is_here and request.loads_in == "llmopt")

    def planned(self, recipe: WeightRecipe, kv_dtype: str | None) -> dict[str, Any]:
        """Fit and expected speed of weights at the load: times in milliseconds, with their bands."""
        request, work = self.asked, PlanContext.of(self.asked)
        rate = request.request_rate
        of_rate = request.context is not None and rate is not None  # which needs both lengths
        ask = PlanRequest(
            model=str(self.path),
            context=request.context,
            sequences=request.sequences,
            input_len=work.prompt if of_rate else None,
            output_tokens=work.output if of_rate else request.output_tokens,
            request_rate=rate,
            dataset=None if request.context else DATASET,
            gpus=("cpu" if self.device.kind == "cpu" else self.device.name,),
            tp=1,
            engine=request.loads_in,
            kv_dtype=kv_dtype,
            measured=self.measured,
        )
        plan = plan_for(ask, recipe).devices[0]
        speed, why = None, None
        if not plan.fits:
            why = (
                f"memory: {plan.max_concurrent_sequences} of {request.sequences} sequences fit in that of "
                f"{self.device.name}"
            )
        elif plan.predicted is not None and math.isinf(plan.predicted.ttft_seconds):
            most = plan.predicted.throughput / work.output
            why = f"load: {most:.3g} of {rate:g} requests per second on {self.device.name}"
        elif (predicted := plan.predicted) is not None:
            ttft, tpot = 1e3 * predicted.ttft_seconds, 1e3 * predicted.tpot_seconds
            band = predicted.band
            speed = {
                "tpot_ms": tpot,
                "ttft_ms": ttft,
                "e2el_ms": ttft + tpot * (work.output - 1),
                "tokens_per_s": predicted.throughput,
                "band": band and [factor * tpot for factor in band.tpot],
                "ttft_band": band and [factor * ttft for factor in band.ttft],
                "source": "planned",
            }
        throughput: dict[str, float] = {}  # by clients: powers of two below the places
        if (expected := plan.expectation) is not None and plan.fits:
            places = min(plan.max_concurrent_sequences, _MOST_CLIENTS)
            loads = {str(1 << n): 1 << n for n in range((places - 1).bit_length())}
            for name, clients in {**loads, FULL: places}.items():
                state = expected.loaded(Loop(work.prompt, work.output, clients, places))
                throughput[name] = state.throughput
        return {"speed": speed, "throughput": throughput, "unfit": why}


def measure_machine(target: Target, folder: Path, progress: Progress) -> Target:
    """The target with one user's run of the original on this CPU, whose ceilings the planner takes."""
    if target.device.kind != "cpu":
        return target
    if not (folder / "result.json").is_file():
        options = BenchOptions(
            model=target.model,
            max_concurrency=1,
            num_prompts=8,
            num_runs=1,
            quality=False,
            name=MACHINE,
            device="cpu",
        )
        run = run_bench(options, SubRun(progress, lambda: "speed of this machine", ("warning",)))
        if run.interrupted:
            raise KeyboardInterrupt
        write_run(run, folder, with_report=False)
    return replace(target, measured=folder)


def kv_dtype_of(target: Target) -> str:
    """The dtype of the KV cache: the engine's default, or fp8 if the load fits by fp8 alone."""
    rule = engine_rule(target.asked.loads_in)
    kv_dtype = rule.default_kv_dtype
    if target.device.kind != "cpu" and "fp8" in rule.kv_dtypes:
        model = find_model(str(target.path))
        lightest = WeightRecipe("int4", 4, scale_bits=0, plain_bytes=model.plain_bytes)
        fits = {n: target.planned(lightest, n)["unfit"] is None for n in (kv_dtype, "fp8")}
        kv_dtype = "fp8" if fits["fp8"] and not fits[kv_dtype] else kv_dtype
    return kv_dtype


def search(
    target: Target,
    folder: Path,
    progress: Progress,
    first: Callable[[str], Sequence[Mapping[str, Any]]] | None = None,
) -> dict[str, Any]:
    """The fronts of all lanes, planned, and the usual quantizations; read if they were written before.
    `first` makes the first answer for a dtype of the KV cache, whose KL divergences the usual ones keep.
    Raises BadInput: the loader takes nothing of this model, or the size is impossible."""
    path = folder / SEARCH_NAME
    if path.is_file():
        return _with_paths(read_json(path), folder)
    stats, kv_dtype = target.asked.stats or folder / STATISTICS, kv_dtype_of(target)
    lanes, requests = _lanes(target, stats, kv_dtype)
    if not requests:
        reasons = "; ".join(f"{lane['format']}: {lane['refused']}" for lane in lanes)
        raise BadInput(
            f"--loads-in {target.asked.loads_in} takes nothing of {target.model} that was asked for: "
            f"{reasons}"
        )
    usual = first(kv_dtype) if first else ()
    first_kl = {point["name"]: point["first_kl"] for point in usual if "first_kl" in point}
    fronts = search_fronts(requests, progress)
    target, points = measure_machine(target, folder / MACHINE, progress), []
    for request, lane in zip(requests, fronts, strict=True):
        points += _front(target, lane, request, kv_dtype)
    stats_name = STATISTICS if target.asked.stats is None else str(stats.resolve())
    usual_points: list[dict[str, Any]] = [
        usual_point(target, name, kv_dtype) | {"first_kl": first_kl.get(name)} for name in USUAL
    ]
    solved = {"stats": stats_name, **target.asked.shared}
    if not requests[0].options.true_sequential:
        solved["true_sequential"] = False
    for point in (*points, *(point for point in usual_points if point.get("is_solved"))):
        point["quantize"] |= solved
    result = {
        "hardware": {"name": target.device.name, "kind": target.device.kind, "count": 1},
        "context": PlanContext.of(target.asked).context,
        "kv_dtype": kv_dtype,
        "lanes": lanes,
        "front": sorted(points, key=lambda point: point["bytes"]),
        "original": config_point(target, ORIGINAL, kv_dtype),
        "usual": usual_points,
    }
    write_atomically(path, json.dumps(result, indent=1) + "\n")
    return _with_paths(result, folder)


def _with_paths(result: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The search with the statistics' folder relative to the working directory, not to its own folder."""
    for point in (*result["front"], *result["usual"]):
        if (stats := point.get("quantize", {}).get("stats")) is not None:
            point["quantize"]["stats"] = str(folder / stats)
    return result


def _lanes(
    target: Target, stats: Path, kv_dtype: str
) -> tuple[list[dict[str, Any]], list[QuantizeRequest]]:
    """A record of every lane, with its reason of refusal, and the search of each lane that is not refused."""
    request, on_gpu = target.asked, target.device.kind != "cpu"
    lanes, requests = [], []
    for name in request.formats or FORMATS:
        form = FORMATS[name]
        kinds = request.candidates or (*form.kinds, *(form.gpu_kinds if on_gpu else ()))
        if form.gpu_only and not on_gpu and name not in request.formats:
            kinds = ()
            refused = f"its codes take too long to solve on a CPU: ask for --format {name}"
        else:
            kinds, refused = _taken(target, name, form.base, kinds)
        lane = {"name": name, "format": name, "kinds": list(kinds)}
        lanes.append(lane | {"kv_dtype": kv_dtype, "refused": refused})
        if refused is None:
            given = {"method": form.method, "format": name, "stats": stats}
            given["options"] = MethodOptions.asked(true_sequential=request.device != "cpu")
            if form.kinds or request.candidates:
                given["candidates"] = kinds
            if kv_dtype == "fp8":
                given["kv_cache"] = "fp8"
            requests.append(QuantizeRequest.of(target.model, Path(), **request.shared, **given))
    return lanes, requests


def _taken(
    target: Target, name: str, base: str, kinds: Sequence[str]
) -> tuple[tuple[str, ...], str | None]:
    """The kinds that the loader takes in a mixture, and the reason that there is none within the size."""
    try:
        plan = make_plan(QuantizeRequest.of(target.model, Path(), method=base, format=name))
    except BadInput as error:
        return (), str(error)
    layer = plan.architecture.layer_prefix(plan.num_layers - 1)
    taken, refused, least, last = [], None, [], {}
    for names in [(kind,) for kind in kinds] or [()]:
        try:
            candidates = search_of(plan, None, None, names)
        except BadInput as error:
            refused = str(error)
            continue
        pairs = zip(candidates.schemes, candidates.sizes, strict=True)
        uniform = [(schemes, sum(sizes.values())) for schemes, sizes in pairs if schemes]
        # With another kind in the last layer: some loaders take a kind alone and do not mix it.
        reasons = [_refusal(target, with_schemes(plan, schemes | last)) for schemes, _ in uniform]
        refused = next(filter(None, reasons), None)
        if refused is None:
            least += [size for _, size in uniform]
            kept = uniform[-1][0].items() if names else ()
            last = {module: scheme for module, scheme in kept if module.startswith(layer)}
            taken += names or sorted({s.label for kind, _ in uniform for s in kind.values()})
    if not taken:
        return (), refused
    searched = search_of(plan, None, None, taken if kinds else ())
    bound, smallest = _bound(target.asked, searched), min(least)
    if bound is None or smallest <= bound:
        return tuple(taken), None
    return tuple(taken), (
        f"its fewest bits are {8 * smallest / searched.num_weights:.3f} per weight, "
        f"{smallest + searched.rest_bytes:,} bytes of all tensors"
    )


def _refusal(target: Target, plan: QuantizePlan) -> str | None:
    """The reason that the loader does not take a plan."""
    row, contents = _ROWS[target.asked.loads_in], stored(plan)
    for loader in loaders(contents, plan.format.name):
        if loader.name == row and not loader.loads:
            return loader.reason
    if target.asked.loads_in != "vllm":
        return None
    if target.device.kind == "cpu":
        return vllm_refuses_on_cpu(contents, plan.format.name)
    card, release = target.device.capability, engine_rules()["vllm"].version(None)
    for scheme in dict.fromkeys(contents.schemes.values()):
        question = Question("vllm", release, plan.format.name, codes_of(scheme), card)
        if (answer := kernel_for(question)).answer == "does not":
            return f"on {target.device.name}: {answer.reason}"
    return None


def _front(
    target: Target, lane: Lane, request: QuantizeRequest, kv_dtype: str
) -> list[dict[str, Any]]:
    """The mixtures of a lane under bounds at equal ratios, from the fewest bytes to those of its largest kind
    or to the requested bound."""
    search, best_request = lane.search, target.asked
    least = sum(min(choice.bytes) for choice in lane.choices)
    pairs = zip(search.schemes, search.sizes, strict=True)
    most = max(sum(sizes.values()) for schemes, sizes in pairs if schemes)
    if (bound := _bound(best_request, search)) is not None:
        most = max(least, min(most, bound))
    bounds = np.geomspace(least, most, POINTS).astype(np.int64)
    bounds[[0, -1]] = least, most  # which rounding may miss
    by_bytes = {mix.bytes: mix for mix in map(lane.allocate, map(int, bounds))}
    points = [_point(target, lane, mix, request, kv_dtype) for _, mix in sorted(by_bytes.items())]
    return [*{point["id"]: point for point in points}.values()]


def _bound(request: BestRequest, search: Search) -> int | None:
    """Bytes that the linears may take; None without a limit."""
    if request.size is not None:
        return request.size - search.rest_bytes
    if request.target_bpw is not None:
        return int(request.target_bpw * search.num_weights / 8)
    return None


def _point(
    target: Target, lane: Lane, allocation: Allocation, request: QuantizeRequest, kv_dtype: str
) -> dict[str, Any]:
    """A mixture for JSON."""
    schemes, search = lane.schemes_of(allocation), lane.search
    size = allocation.bytes + search.rest_bytes
    bits = allocation.bytes * 8 / search.num_weights
    layers = {
        name: schemes[name].label if name in schemes else "16 bits" for name in search.sizes[0]
    }
    made = {
        "method": request.method,
        "format": request.format,
        "target_size": lane.target_bytes(allocation),
    }
    if request.candidates:
        made["candidates"] = list(request.candidates)
    if request.kv_cache:
        made["kv_cache"] = request.kv_cache
    counts = Counter(layers.values()).most_common()
    return {
        "id": f"{FORMATS[str(request.format)].prefix}-{bits:.3f}",
        "lane": request.format,
        "label": ", ".join(f"{count} {label}" for label, count in counts),
        "bytes": size,
        "bits_per_weight": bits,
        "expected_kl": allocation.cost,
        "gap": allocation.gap,
        **_planned(target, schemes, search.plan, size, kv_dtype),
        "layers": layers,
        "quantize": made,
    }


def _planned(
    target: Target, schemes: Mapping[str, Scheme], plan: QuantizePlan, size: int, kv_dtype: str
) -> dict[str, Any]:
    """Fit of weights of their exact bytes, and expected speed, also by number of clients: linears run one
    after the other, so times are the mean over the kinds by their share of the weights. At an arrival rate
    each of the kinds has to keep up."""
    weights: Counter[str] = Counter()
    bits: dict[str, Fraction] = {}
    for module, (rows, columns) in plan.modules.items():
        scheme = schemes.get(module)
        kind = scheme.label if scheme else "bf16"
        width = 16 if scheme is None else scheme.bits_per_weight(rows, columns)
        weights[kind] += rows * columns
        bits[kind] = bits.get(kind, Fraction(0)) + Fraction(width) * rows * columns
    parts = []
    for kind, count in weights.items():
        width = (bits[kind] / count).limit_denominator(1 << 20)
        recipe = WeightRecipe(kind, width, scale_bits=0, stored_bytes=size)
        parts.append((count / weights.total(), target.planned(recipe, kv_dtype)))
    for _, planned in parts:
        if planned["speed"] is None:
            return planned
    _, plan_of_first = parts[0]
    throughput = {
        clients: 1 / sum(share / p["throughput"][clients] for share, p in parts)
        for clients in plan_of_first["throughput"]
    }
    speed = mean_speed([(share, p["speed"]) for share, p in parts])
    return plan_of_first | {"speed": speed, "throughput": throughput}


def config_point(target: Target, name: str, kv_dtype: str) -> dict[str, Any]:
    """The original or a usual quantization for JSON, from `config.json` alone."""
    shape = find_model(str(target.path)).shape
    recipe = named_recipe(_RECIPES.get(name, name), shape)
    return {
        "name": name,
        "id": name.replace(" ", "-"),
        "refused": None,
        "bytes": weight_bytes(shape, recipe),
        "bits_per_weight": float(recipe.bits),
        "expected_kl": None,
        **target.planned(recipe, kv_dtype),
    }


def usual_point(target: Target, name: str, kv_dtype: str) -> dict[str, Any]:
    """A usual quantization for JSON, with the reason that it is no answer before it is made."""
    made = dict(USUAL[name])
    record = {"name": name, "id": name.replace(" ", "-"), "quantize": made | target.asked.shared}
    try:
        # Rotations, which take long to find, change no size.
        plan = make_plan(QuantizeRequest.of(target.model, Path(), **made, rotations=()))
    except BadInput as error:
        return record | {"refused": str(error)}
    if reason := _refusal(target, plan):
        return record | {"refused": f"{target.asked.loads_in} does not load it: {reason}"}
    linears = sum(module_sizes(plan, plan.format).values())
    size = linears + unquantized_bytes(plan, plan.format)
    num_weights = sum(rows * columns for rows, columns in plan.modules.values())
    return record | {
        "refused": None,
        "is_solved": plan.method.needs_statistics,
        "lane": plan.format.name,
        "label": name,
        "bytes": size,
        "bits_per_weight": linears * 8 / num_weights,
        "expected_kl": None,
        "gap": None,
        **_planned(target, plan.schemes, plan, size, kv_dtype),
        "layers": {module: scheme.label for module, scheme in plan.schemes.items()},
    }
