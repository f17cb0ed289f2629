"""Operator times that were measured: the tables of the package aiconfigurator-core, where they hold a shape.

A table has one kind of operator of one engine version on one GPU. Of a deployment only the curves of its own
shapes are kept, so that a step costs a few interpolations, linear in logarithms between the nearest
measurements: GEMMs and experts over their tokens, attention over batch and length, all-reduces over elements.
What the tables do not hold (another dtype, head size or window, a latent, more tokens) keeps its fitted time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from math import ceil, exp, log
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...quant.base.errors import BadInput
from ...quant.base.extras import missing
from ...quant.families.shapes import ModelShape
from .devices import Device, find_device
from .probed_shape import ProbedShape
from .step_model import Parallelism, StepWork
from .weights import WeightRecipe

if TYPE_CHECKING:
    import numpy as np

PACKAGE = "aiconfigurator-core"
ENGINES = ("vllm", "sglang", "trtllm")
ROUTING = "power_law_1.01"
"""Measured distribution of tokens over experts that is taken: even routing is far from any model's."""
_DTYPES = {"bf16": "bfloat16", "fp8": "fp8", "fp8-block": "fp8_block", "nvfp4": "nvfp4"}
_EXPERT_DTYPES = {**_DTYPES, "mxfp4": "w4a16_mxfp4", "int4": "int4_wo"}
_CACHE_DTYPES = {1.0: "fp8", 2.0: "bfloat16"}
_SECONDS = 1e-3
"""The tables are in milliseconds."""

Table = Mapping[str, "np.ndarray"]
Place = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds over a quantity, at rising places; with a curve at each place, over two."""

    places: tuple[float, ...]
    values: tuple[float | Curve, ...]

    def at(self, place: float, *rest: float) -> float | None:
        """Seconds there; before the first place those of the first, past the last None."""
        index = bisect_left(self.places, place)
        if index == len(self.places):
            return None
        high = self._value(index, rest)
        if index == 0 or self.places[index] == place or high is None:
            return high
        if (low := self._value(index - 1, rest)) is None:
            return None
        start, end = self.places[index - 1], self.places[index]
        return low * (high / low) ** (log(place / start) / log(end / start))

    def _value(self, index: int, rest: Place) -> float | None:
        value = self.values[index]
        return value.at(*rest) if isinstance(value, Curve) else value


Repeated = tuple[int, Curve | None]
"""Equal operators of a step, and their curve where the tables hold them."""


@dataclass(frozen=True, slots=True)
class OperatorTables:
    """Curves of one deployment: of GEMMs of all tokens, of the sampled ones, and of a layer's experts, over
    tokens; of decode and prefill attention over sequences and length; of all-reduces over elements."""

    source: str
    attention_dp: int
    hidden_size: int
    gemms: tuple[Repeated, ...]
    head: tuple[Repeated, ...]
    experts: tuple[Repeated, ...]
    decode: tuple[Repeated, ...]
    prefill: tuple[Repeated, ...]
    reduces: tuple[Repeated, ...]

    def seconds(self, work: StepWork) -> dict[str, float]:
        """Seconds of the operators of a step that the tables hold."""
        tokens = work.decode_sequences + work.prefill_tokens
        rank = tokens / self.attention_dp
        rows = (work.decode_sequences + work.prefill_sequences) / self.attention_dp
        linear, head = _sum(self.gemms, (rank,)), _sum(self.head, (rows,))
        found = {
            "linear layers": None if linear is None or head is None else linear + head,
            "experts": _sum(self.experts, (tokens,)),
            "all-reduce": _sum(self.reduces, (rank * self.hidden_size,)),
        }
        if sequences := work.decode_sequences:
            place = (sequences / self.attention_dp, work.decode_context_tokens / sequences)
            found["decode attention"] = _sum(self.decode, place)
        if prompts := work.prefill_sequences:
            length = work.prefill_tokens / prompts
            # The tables' prompts have no cached tokens before them.
            if work.prefill_context_tokens < 1.02 * work.prefill_tokens * (length + 1) / 2:
                place = (prompts / self.attention_dp, length)
                found["prefill attention"] = _sum(self.prefill, place)
        return {name: seconds for name, seconds in found.items() if seconds}


def tables_for(
    shape: ModelShape,
    recipe: WeightRecipe,
    device: Device,
    engine: str,
    parallel: Parallelism,
    kv_bytes_per_element: float,
) -> OperatorTables | None:
    """The curves of a deployment; None where no table is of its GPU, or holds its linear layers.

    Raises:
        BadInput: the package is not installed, or it has no tables of this engine.
    """
    if engine not in ENGINES:
        raise BadInput(
            f"--operators silicon: the tables are of {', '.join(ENGINES)}, not of {engine}: give --engine"
        )
    if (folder := _folders().get(device.name)) is None:
        return None
    tables = _Tables(folder, engine)
    return _curves(tables, shape, recipe, parallel, kv_bytes_per_element)


@cache
def _curves(
    tables: _Tables,
    shape: ModelShape,
    recipe: WeightRecipe,
    parallel: Parallelism,
    kv_bytes_per_element: float,
) -> OperatorTables | None:
    from importlib.metadata import version

    gemms = list(tables.gemms(shape, recipe, parallel.tp))
    if any(curve is None for _, curve in gemms):
        return None
    return OperatorTables(
        f"{PACKAGE} {version(PACKAGE)}",
        parallel.attention_dp,
        shape.hidden_size,
        tuple(gemms[:-1]),
        tuple(gemms[-1:]),
        tuple(tables.experts(shape, recipe, parallel)),
        tuple(tables.attention("generation", "step", shape, parallel, kv_bytes_per_element)),
        tuple(tables.attention("context", "isl", shape, parallel, kv_bytes_per_element)),
        tuple(tables.reduces(shape, parallel)),
    )


def _sum(parts: Sequence[Repeated], place: Place) -> float | None:
    """Seconds of operators; None where the tables do not hold one of them."""
    total = 0.0
    for count, curve in parts:
        if curve is None or (seconds := curve.at(*place)) is None:
            return None
        total += count * seconds
    return total


@dataclass(frozen=True, slots=True)
class _Tables:
    """Tables of an engine in the folder of a GPU."""

    folder: Path
    engine: str

    def gemms(self, shape: ModelShape, recipe: WeightRecipe, tp: int) -> Iterator[Repeated]:
        """The linear layers of a rank, and the output head at the end."""
        if isinstance(shape, ProbedShape) or (table := self._read("gemm")) is None:
            yield 1, None  # of a probed model the projections are not told apart
            return
        for count, outputs, inputs, role in rank_gemms(shape, tp):
            dtype = _DTYPES.get(recipe.name, "") if role in recipe.roles else "bfloat16"
            known = _where(table, gemm_dtype=dtype)
            # One wider than any that was measured takes as long as its parts.
            parts = ceil(outputs / max(known["n"], default=outputs))
            yield count * parts, _between(known, outputs / parts, inputs)

    def experts(
        self, shape: ModelShape, recipe: WeightRecipe, parallel: Parallelism
    ) -> Iterator[Repeated]:
        """The experts of a layer, over the tokens of all ranks."""
        if (experts := shape.experts) is None:
            return
        table = self._read("moe") or {}
        known = _where(
            table,
            moe_dtype=_EXPERT_DTYPES.get(recipe.name, ""),
            distribution=ROUTING,
            hidden_size=shape.hidden_size,
            inter_size=experts.width,
            topk=experts.per_token,
            num_experts=experts.count,
            moe_tp_size=parallel.tp * parallel.attention_dp // parallel.ep,
            moe_ep_size=parallel.ep,
        )
        yield shape.num_layers - len(experts.dense_layers), _curve(known, "num_tokens")

    def attention(
        self,
        phase: str,
        length: str,
        shape: ModelShape,
        parallel: Parallelism,
        kv_bytes_per_element: float,
    ) -> Iterator[Repeated]:
        """Attention of a rank, for each window that layers have."""
        table = self._read("attention", f"{phase}_attention") or {}
        for window, count in Counter(shape.windows).items():
            known = _where(
                {} if shape.latent or shape.chunked or isinstance(shape, ProbedShape) else table,
                num_heads=shape.num_heads // parallel.tp,
                num_key_value_heads=shape.kv_heads_per_rank(parallel.tp),
                head_dim=shape.head_dim,
                window_size=window or 0,
                kv_cache_dtype=_CACHE_DTYPES.get(kv_bytes_per_element, ""),
                attn_dtype="bfloat16",
            )
            yield count, _curve(known, "batch_size", length)

    def reduces(self, shape: ModelShape, parallel: Parallelism) -> Iterator[Repeated]:
        """The all-reduces of a step, over the elements of a message."""
        if parallel.tp > 1:
            table = self._read("comm", "custom_allreduce") or {}
            known = _where(table, num_gpus=parallel.tp, allreduce_dtype="bfloat16")
            yield 2 * shape.num_layers, _curve(known, "message_size")

    def _read(self, kind: str, name: str = "") -> Table | None:
        """A table of the newest version of the engine that has one."""
        from packaging.version import Version

        files = (self.folder / kind / self.engine).glob(f"*/{name or kind}_perf.parquet")
        newest = max(files, key=lambda file: Version(file.parent.name), default=None)
        return None if newest is None else _columns(newest)


def rank_gemms(shape: ModelShape, tp: int) -> Iterator[tuple[int, float, float, str]]:
    """Count, outputs, inputs and role of the GEMMs of a rank, the output head last; engines fuse those that
    read the same input."""
    hidden, heads, layers = shape.hidden_size, shape.num_heads / tp, shape.num_layers
    if latent := shape.latent:
        queries = heads * latent.query_dim
        if latent.query_rank is not None:
            yield layers, queries, latent.query_rank, "linear"
            queries = latent.query_rank
        yield layers, queries + latent.cached_elements, hidden, "linear"
        yield layers, heads * (latent.nope_dim + latent.value_dim), latent.kv_rank, "linear"
        yield layers, hidden, heads * latent.value_dim, "linear"
    else:
        cached = 2 * shape.kv_heads_per_rank(tp)
        yield layers, (heads + cached) * shape.head_dim, hidden, "linear"
        yield layers, hidden, heads * shape.head_dim, "linear"
    mlps = {shape.intermediate_size: layers}
    if (experts := shape.experts) is not None:
        mixtures = layers - len(experts.dense_layers)
        mlps = {shape.intermediate_size: layers - mixtures, experts.shared_width: mixtures}
        yield mixtures, experts.count, hidden, "router"
    for width, count in mlps.items():
        if width and count:
            yield count, (2 if shape.gated_mlp else 1) * width / tp, hidden, "linear"
            yield count, hidden, width / tp, "linear"
    yield 1, shape.vocab_size / tp, hidden, "head"


def _between(table: Table, outputs: float, inputs: float) -> Curve | None:
    """A GEMM's curve over its tokens, between the nearest measured widths and depths in logarithms."""
    logs: dict[float, float] = {}
    for n, across in _nearest(table["n"], outputs):
        for k, along in _nearest(table["k"], inputs):
            curve = _curve(_where(table, n=n, k=k), "m")
            if curve is None:
                return None
            for m, seconds in zip(curve.places, curve.values, strict=True):
                assert isinstance(seconds, float)
                logs[m] = logs.get(m, 0.0) + across * along * log(seconds)
    return Curve(tuple(logs), tuple(map(exp, logs.values()))) if logs else None


def _nearest(known: np.ndarray, wanted: float) -> list[tuple[float, float]]:
    """Measured values around a wanted one, with their weights; none past the largest."""
    values = sorted(set(known.tolist()))
    index = bisect_left(values, wanted)
    if index == len(values):
        return []
    if index == 0 or values[index] == wanted:
        return [(values[index], 1.0)]
    low, high = values[index - 1], values[index]
    share = log(wanted / low) / log(high / low)
    return [(low, 1 - share), (high, share)]


def _curve(table: Table, place: str, *rest: str) -> Curve | None:
    """A curve of rows that differ in the place; of several kernels the fastest one's times."""
    if not table or not len(table["latency"]):
        return None
    places = sorted(set(table[place].tolist()))
    parts = [_where(table, **{place: one}) for one in places]
    if rest:
        curves = [_curve(part, *rest) for part in parts]
        return Curve(tuple(places), tuple(c for c in curves if c is not None))
    return Curve(tuple(places), tuple(_SECONDS * float(part["latency"].min()) for part in parts))


def _where(table: Table, **conditions: Any) -> Table:
    """The rows of a table that meet all conditions; a column that it lacks is met by none."""
    if not table or any(name not in table for name in conditions):
        return {}
    kept = None
    for name, value in conditions.items():
        met = table[name] == value
        kept = met if kept is None else kept & met
    return {name: column[kept] for name, column in table.items()}


@cache
def _columns(file: Path) -> Table:
    import pyarrow.parquet as parquet

    table = parquet.read_table(file)
    return {name: table[name].to_numpy(zero_copy_only=False) for name in table.column_names}


@cache
def _folders() -> Mapping[str, Path]:
    """Folders of the installed package by the name of their GPU in the device table.

    Raises:
        BadInput: the package is not installed.
    """
    spec = find_spec(PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise missing("--operators silicon", PACKAGE, "silicon")
    systems = Path(next(iter(spec.submodule_search_locations))) / "systems" / "data"
    found = {_device_of(folder.name): folder for folder in systems.iterdir()}
    return {name: folder for name, folder in found.items() if name}


def _device_of(system: str) -> str | None:
    try:
        return find_device(system.removesuffix("_sxm").removesuffix("_server")).name
    except BadInput:
        return None
