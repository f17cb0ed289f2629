"""Step time of an engine: the operators of one step, each from its bytes, FLOP and messages.

An operator takes the smooth maximum of moving its bytes and computing its FLOP at fractions of the data
sheet's roofs, and its launches or messages a latency each. Fractions and latencies were fitted to measured
deployments by `tools/plan_error`; a parameter is a value times the factor of each tag that a deployment has
(engine, GPU generation, weight dtype, attention), so that a device or a model that was not measured takes
the shared physics. Loads are per rank of one tensor-parallel group.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, e, inf, log1p
from typing import Any, NamedTuple, Protocol

from ...base.errors import BadInput
from ...quant.families.shapes import ModelShape
from .devices import Device
from .engine_rules import cache_classes
from .offload import Offload
from .step_parameters import Deployed, StepParameters, fitted_parameters
from .weights import WeightRecipe

ACTIVATION_BYTES = 2
ATTENTION_LAUNCHES = {"heads": 6, "latent": 11, "linear attention": 9}
"""Kernels of a layer's attention with its norm, as engines fuse them: projections, rotation and cache write,
the attention in two parts; latent attention projects down and up, and absorbs in two multiplications."""
MLP_LAUNCHES, EXPERT_LAUNCHES = 4, 8
"""Norm, two multiplications and the activation; experts have a router, a choice and two permutations more."""
DENSE_LAUNCHES = ATTENTION_LAUNCHES["heads"] + MLP_LAUNCHES


class StepWork(NamedTuple):
    """Tokens that one engine step computes, summed over its sequences. `decode_context_tokens` are the cached
    tokens that the decode rows read; `prefill_context_tokens` sums, over the prompt tokens of the step, the
    tokens that each attends to."""

    decode_sequences: int = 0
    decode_context_tokens: float = 0
    prefill_tokens: int = 0
    prefill_context_tokens: float = 0
    prefill_sequences: int = 0

    @classmethod
    def of(cls, sequences: int, context: float, prompt: int = 0, cached: int = 0) -> StepWork:
        """A decode of `sequences` of mean length `context`, and one prompt chunk after `cached` tokens."""
        attended = prompt * (cached + (prompt + 1) / 2)
        return cls(sequences, sequences * context, prompt, attended, int(prompt > 0))

    def times(self, ranks: int) -> StepWork:
        """The work of `ranks` ranks that have this each."""
        return self._make(ranks * value for value in self)


class TimesSteps(Protocol):
    """Seconds of an engine's steps."""

    def seconds(self, work: StepWork) -> float: ...


class Loads(NamedTuple):
    """Bytes, FLOP, messages and launches of one step on one rank. `expert_bytes` counts all its experts;
    under uniform routing e to the `expert_miss` of them stay idle. `layers` and `mixture_layers` count
    launches, in units of a dense bf16 layer and of its bf16 experts."""

    linear_bytes: float
    linear_flops: float
    expert_bytes: float
    expert_miss: float
    expert_flops: float
    expert_row_flops: float
    expert_width: float
    expert_skew: float
    cache_bytes: float
    cache_flops: float
    pair_flops: float
    state_bytes: float
    activation_bytes: float
    reduces: float
    reduce_bytes: float
    exchanges: float
    exchange_bytes: float
    layers: float
    mixture_layers: float
    rows: float


def check_counts(**counts: int | None) -> None:
    """Raises BadInput: a count, by the name of its option, is below 1."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise BadInput(f"--{name.replace('_', '-')} {count}: at least 1 is needed")


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Ranks of a deployment: the attention is split over `tp` and repeated `attention_dp` times, the experts
    over `ep` ranks and their widths over the rest, the layers over `pp`."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    attention_dp: int = 1

    def __post_init__(self) -> None:
        check_counts(tp=self.tp, pp=self.pp, ep=self.ep, attention_dp=self.attention_dp)
        if (self.tp * self.attention_dp) % self.ep:
            raise BadInput(
                f"--ep {self.ep} does not divide the {self.tp * self.attention_dp} ranks of a stage"
            )

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.attention_dp


def longer(moving: Any, computing: Any) -> Any:
    return (moving * moving * moving + computing * computing * computing) ** (1 / 3)


def operator_seconds(loads: Any, roofs: Any, p: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds of each operator of a step; plain arithmetic, so that a fit can pass columns for numbers."""
    bandwidth, link = roofs.bandwidth, roofs.link
    return {
        "linear layers": longer(
            loads.linear_bytes / (bandwidth * p["linear.bandwidth"]),
            loads.linear_flops / (roofs.linear_peak * p["linear.compute"]),
        ),
        "experts": longer(
            loads.expert_bytes
            * (1 - e ** (loads.expert_miss * p["experts.spread"]))
            / (bandwidth * p["experts.bandwidth"]),
            (
                loads.expert_flops
                + p["experts.padding"]
                * loads.expert_row_flops
                * (1 - e ** (loads.expert_miss * p["experts.spread"]))
            )
            * (1 + p["experts.narrow"] / loads.expert_width)
            * (1 + p["experts.skew"] * loads.expert_skew)
            / (roofs.expert_peak * p["experts.compute"]),
        ),
        "decode attention": longer(
            loads.cache_bytes / (bandwidth * p["attention.bandwidth"]),
            loads.cache_flops / (roofs.attention_peak * p["attention.compute"]),
        ),
        "prefill attention": loads.pair_flops / (roofs.attention_peak * p["prefill.compute"]),
        "states": loads.state_bytes / (bandwidth * p["states.bandwidth"]),
        "norms and activations": loads.activation_bytes / (bandwidth * p["activations.bandwidth"]),
        "all-reduce": loads.reduces * p["all_reduce.latency"]
        + loads.reduce_bytes / (link * p["all_reduce.bandwidth"]),
        "all-to-all": loads.exchanges * p["all_to_all.latency"]
        + loads.exchange_bytes / (link * p["all_to_all.bandwidth"]),
        "launches": loads.layers * p["layer.seconds"]
        + loads.mixture_layers * p["mixture_layer.seconds"],
        "host": p["host.step"] + loads.rows * p["host.sequence"],
    }


class Roofs(NamedTuple):
    """Data-sheet roofs that a deployment's operators run against: bytes/s and FLOP/s of one device."""

    bandwidth: float
    link: float
    linear_peak: float
    expert_peak: float
    attention_peak: float


class RankWeights(NamedTuple):
    """Weight bytes and parameters on a rank: of the parts that each token passes, and of the experts."""

    linear_bytes: float
    linear_elements: float
    head_bytes: float
    head_elements: float
    expert_bytes: float
    expert_elements: float
    used_expert_elements: float


@dataclass(frozen=True, slots=True)
class StepModel:
    """Times of an engine's steps for one model on one kind of device. Raises BadInput: the device's speed is
    unknown."""

    shape: ModelShape
    recipe: WeightRecipe
    device: Device
    model: str
    engine: str
    parallel: Parallelism
    kv_bytes_per_element: float
    parameters: StepParameters
    roofs: Roofs
    weights: RankWeights
    cache: tuple[tuple[float, float], ...]
    offload: Offload | None = None

    @classmethod
    def build(
        cls,
        shape: ModelShape,
        recipe: WeightRecipe,
        device: Device,
        *,
        model: str = "",
        engine: str = "llmopt",
        version: str = "",
        parallel: Parallelism = Parallelism(),
        kv_bytes_per_element: float = 2,
        parameters: StepParameters | None = None,
        offload: Offload | None = None,
    ) -> StepModel:
        """The model of a deployment, with the fitted parameters unless others are given. `model` is its name
        in the planner's table, by which measured deployments of it are found."""
        if parameters is None:
            parameters = fitted_parameters(deployed_as(shape, recipe, device, engine, version))
        peaks = device.peaks or {}
        plain = peaks.get("bf16", peaks.get("fp16"))
        if device.bandwidth is None or plain is None:
            raise BadInput(f"{device.name} has no known speed: name a GPU, or give --measured")
        quantized = peaks.get(weight_dtype(recipe), plain)
        linear = quantized if "linear" in recipe.roles else plain
        link = device.link_bytes_per_second
        roofs = Roofs(device.bandwidth, link, linear, quantized, plain)
        return cls(
            shape,
            recipe,
            device,
            model,
            engine,
            parallel,
            float(kv_bytes_per_element),
            parameters,
            roofs,
            _weights_on_rank(shape, recipe, parallel),
            _cache_classes(shape, parallel.tp),
            offload,
        )

    def seconds(self, work: StepWork) -> float:
        return sum(seconds for _, seconds, _ in self.operators(work))

    def operators(self, work: StepWork) -> tuple[tuple[str, float, str], ...]:
        """Each operator of the step that takes time: its name, its seconds, and their source. The model's
        correction scales each: the TPOT's for decode tokens and the TTFT's for prompt tokens, by their
        number."""
        tokens = work.decode_sequences + work.prefill_tokens
        share = work.prefill_tokens / tokens if tokens else 0.0
        decode, prefill = self.parameters.tpot_factor, self.parameters.ttft_factor
        factor, source = decode + share * (prefill - decode), self.parameters.source
        parts = self._parts(work).items()
        return tuple((name, factor * part, source) for name, part in parts if part > 0)

    def plain_seconds(self, work: StepWork) -> float:
        return sum(self._parts(work).values())

    def _parts(self, work: StepWork) -> dict[str, float]:
        loads, in_ram = self.loads(work), 0.0
        if self.offload is not None:
            tokens = work.decode_sequences + work.prefill_tokens
            values, in_ram = self.offload.divided(loads._asdict(), tokens)
            loads = Loads(**values)
        parts = operator_seconds(loads, self.roofs, self.parameters.values)
        return {**parts, "weights in RAM": in_ram}

    def loads(self, work: StepWork) -> Loads:
        """Loads of the step on one rank, summed over the pipeline stages."""
        shape, parallel, weights = self.shape, self.parallel, self.weights
        tokens = work.decode_sequences + work.prefill_tokens
        per_rank = tokens / parallel.attention_dp
        rows = (work.decode_sequences + work.prefill_sequences) / parallel.attention_dp
        layers, experts = shape.num_layers, shape.experts
        message = per_rank * shape.hidden_size * ACTIVATION_BYTES
        mixture_layers = 0
        expert_bytes = expert_miss = expert_flops = exchange_bytes = row_flops = skew = 0.0
        width = 1.0
        if experts is not None:
            mixture_layers = layers - len(experts.dense_layers)
            expert_bytes = weights.expert_bytes
            expert_miss = tokens * log1p(-experts.per_token / experts.count)
            expert_flops = 2 * tokens * weights.used_expert_elements
            row_flops = 2 * weights.expert_elements
            width = experts.width * parallel.ep / (parallel.tp * parallel.attention_dp)
            skew = 1 - 1 / parallel.ep
            if parallel.attention_dp > 1:
                exchange_bytes = 2 * mixture_layers * message * min(experts.per_token, parallel.ep)
        share = (parallel.tp - 1) / parallel.tp
        reduces = 2 * layers if parallel.tp > 1 else 0
        sends = parallel.pp - 1
        exchanges = 2 * mixture_layers if parallel.attention_dp > 1 else 0
        cache_bytes, cache_flops = self._decode_attention(work)
        launches, expert_launches = self._launches(mixture_layers)
        return Loads(
            linear_bytes=weights.linear_bytes + weights.head_bytes,
            linear_flops=2 * (per_rank * weights.linear_elements + rows * weights.head_elements),
            expert_bytes=expert_bytes,
            expert_miss=expert_miss,
            expert_flops=expert_flops,
            expert_row_flops=row_flops,
            expert_width=width,
            expert_skew=skew,
            cache_bytes=cache_bytes,
            cache_flops=cache_flops,
            pair_flops=self._prefill_attention(work),
            state_bytes=2 * rows * shape.state_bytes / parallel.tp,
            activation_bytes=message * layers,
            reduces=reduces + sends,
            reduce_bytes=message * (2 * share * reduces + sends),
            exchanges=exchanges,
            exchange_bytes=exchange_bytes,
            layers=launches / DENSE_LAUNCHES,
            mixture_layers=expert_launches / EXPERT_LAUNCHES,
            rows=rows,
        )

    def _launches(self, mixture_layers: int) -> tuple[int, int]:
        """Kernels of a step's norms, attentions and dense MLPs, and of its routers and experts. Quantized
        inputs of a matrix multiplication are a kernel of their own."""
        shape, recipe = self.shape, self.recipe
        quantizing = 2 * (weight_dtype(recipe) in ("fp8", "fp4"))
        attention = ATTENTION_LAUNCHES[attention_kind(shape)] + shape.qk_norm
        dense = shape.num_layers - mixture_layers
        launches = shape.num_layers * attention + dense * MLP_LAUNCHES
        if "linear" in recipe.roles:
            launches += quantizing * (shape.num_layers + dense)
        per_mixture = EXPERT_LAUNCHES + quantizing
        if shape.experts and shape.experts.shared_width:
            per_mixture += MLP_LAUNCHES
        return launches, mixture_layers * per_mixture

    def _decode_attention(self, work: StepWork) -> tuple[float, float]:
        """Bytes of the cache that the decode rows of a rank read, and their FLOP."""
        if not work.decode_sequences:
            return 0.0, 0.0
        context = work.decode_context_tokens / work.decode_sequences
        sequences = work.decode_sequences / self.parallel.attention_dp
        read = sum(min(context, window) * elements for window, elements in self.cache)
        shape, heads = self.shape, ceil(self.shape.num_heads / self.parallel.tp)
        # Multiplications of a cached element: by each query head that shares it.
        if shape.latent:
            reuse = heads * (1 + shape.latent.kv_rank / shape.latent.cached_elements)
        else:
            reuse = max(1.0, heads / ceil(shape.num_kv_heads / self.parallel.tp))
        return sequences * read * self.kv_bytes_per_element, 2 * sequences * read * reuse

    def _prefill_attention(self, work: StepWork) -> float:
        """FLOP of the prompt tokens' attention on a rank, each layer within its window."""
        shape = self.shape
        if not work.prefill_tokens:
            return 0.0
        attended = work.prefill_context_tokens / work.prefill_tokens
        value_dim = shape.latent.value_dim if shape.latent else shape.head_dim
        query_dim = shape.latent.query_dim if shape.latent else shape.head_dim
        keys = sum(attended if w is None else min(attended, w) for w in shape.windows)
        heads = ceil(shape.num_heads / self.parallel.tp)
        tokens = work.prefill_tokens / self.parallel.attention_dp
        return 2 * tokens * keys * heads * (query_dim + value_dim)


def deployed_as(
    shape: ModelShape, recipe: WeightRecipe, device: Device, engine: str, version: str = ""
) -> Deployed:
    parts = generation(device), weight_dtype(recipe), attention_kind(shape), mixture_kind(shape)
    is_widened = parts[1] != "bf16" and parts[1] not in (device.peaks or {})
    return Deployed(engine, *parts, version, is_widened)


def mixture_kind(shape: ModelShape) -> str:
    """Kind of a model's MLPs: dense, or experts, of which few are large, and which may have a shared one."""
    if shape.experts is None:
        return "dense"
    if shape.experts.count <= FEW_EXPERTS:
        return "large experts"
    return "shared and small experts" if shape.experts.shared_width else "small experts"


FEW_EXPERTS = 16


def attention_kind(shape: ModelShape) -> str:
    return "latent" if shape.latent else "linear attention" if shape.state_bytes else "heads"


_GENERATIONS = {
    "hopper": r"H\d|GH200",
    "blackwell": r"G?B[23]00",
    "consumer blackwell": r"RTX 50|RTX PRO|.*GB10|DGX Spark",
    "ada": r"L4|RTX 40|RTX 6000 Ada",
    "ampere": r"A\d|RTX 30|RTX A\d",
}


def generation(device: Device) -> str:
    names = (name for name, names in _GENERATIONS.items() if re.match(names, device.name))
    return next(names, "other")


def weight_dtype(recipe: WeightRecipe) -> str:
    """Class of a weight format: fp4 and fp8 multiply in their own tensor cores, int ones in 16 bit."""
    if recipe.bits >= 16:
        return "bf16"
    if "fp4" in recipe.name:
        return "fp4"
    if recipe.name.startswith(("fp8", "mxfp8")):
        return "fp8"
    return "int4" if recipe.bits < 6 else "int8"


def _weights_on_rank(shape: ModelShape, recipe: WeightRecipe, parallel: Parallelism) -> RankWeights:
    tp, ranks = parallel.tp, parallel.tp * parallel.attention_dp
    parts = {"ranks": tp, "kv_heads": min(tp, shape.num_kv_heads), "whole": 1}
    total = dict.fromkeys(RankWeights._fields, 0.0)
    for tensor in shape.tensors():
        role = "expert" if tensor.role in ("expert", "expert_bias") else "linear"
        if tensor.role == "head" or (tensor.role == "embedding" and shape.tied):
            role = "head"
        elif tensor.role in ("embedding", "position", "vision", "projector"):
            continue
        split = ranks if role == "expert" else parts[tensor.shard]
        total[f"{role}_bytes"] += recipe.tensor_bytes(tensor) * tensor.count / split
        total[f"{role}_elements"] += tensor.num_elements * tensor.count / split
        if role == "expert":
            total["used_expert_elements"] += tensor.num_elements * tensor.used / split
    return RankWeights(**total)


def _cache_classes(shape: ModelShape, tp: int) -> tuple[tuple[float, float], ...]:
    """Cached elements per token on a rank by the window that they are read within."""
    heads = 1.0 if shape.latent else ceil(shape.num_kv_heads / tp) / shape.num_kv_heads
    elements: dict[float, float] = defaultdict(float)
    for (size, window, stride), count in cache_classes(shape, 1).items():
        elements[window + 1 if window else inf] += count * float(size) / stride * heads
    return tuple(elements.items())
