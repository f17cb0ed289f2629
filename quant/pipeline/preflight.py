"""Dry run: predicted output sizes, time and memory of a quantization."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from ...base.atomic_io import Entry, entry_bytes, file_bytes, layout_of
from ...base.progress import in_words
from ..base.lanes import shares_of
from ..base.scheme import Scheme
from ..check.engines import loaders
from ..check.loaders import Loader, loads_in
from ..kinds.base.format import WeightFormat
from ..kinds.base.kind import kind_of
from ..methods.registry import AUTO
from ..model.checkpoint import GGUF_SUFFIX
from ..plan.manifest import TEXT, parts_of
from ..plan.plan import QuantizePlan, stored
from ..plan.request import data_needs
from ..plan.selection import TORCH_DTYPES
from ..stream.calibration import Calibration
from ..stream.calls import kv_heads
from ..stream.layer_stream import TOKENS_PER_BATCH
from ..stream.sources import CPU_SAMPLES, CPU_SEQ_LEN
from .estimate import (
    QUICK_TOKENS,
    LayerTime,
    MemoryEstimate,
    Stopwatch,
    estimate_memory,
    estimate_operations,
    solvers_of,
    weights_of,
)
from .stages import Session

if TYPE_CHECKING:
    from ..gguf.container import TensorToWrite

_BUFFER = "rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class ModuleKind:
    """All modules of one name and scheme, such as every `down_proj`.

    Attributes:
        scheme: label of the scheme; None: not quantized.
        bytes: bytes of the tensors in the first format.
        part: `text`, `vision` or `projector`.
        is_table: True for an embedding or output head that a GGUF file rounds by itself.
    """

    name: str
    scheme: str | None
    count: int
    weights: int
    bytes: int
    part: str = TEXT
    is_table: bool = False

    @property
    def bits_per_weight(self) -> float:
        return self.bytes * 8 / self.weights


@dataclass(frozen=True, slots=True)
class Preflight:
    """The result of `--dry-run`.

    Attributes:
        kinds: the target scheme of every linear.
        tensor_bytes: bytes of all tensors to be written, by format.
        file_bytes: bytes of all weight files by format, headers included.
        source_bytes: bytes of all source tensors.
        memory: predicted resident memory beyond the start of the process.
        seconds: time by a timed layer, or by the number of operations and a measured GEMM rate.
        quick_seconds: time with `CPU_SAMPLES` samples of `CPU_SEQ_LEN` tokens; None: there are no more.
        bare_seconds: time without measured errors, of a method that needs no data for anything else.
        workers: processes that share the work, memory and time being those of one; None: one process.
        is_timed: True if `seconds` are by a timed layer.
    """

    kinds: tuple[ModuleKind, ...]
    tensor_bytes: dict[str, int]
    file_bytes: dict[str, int]
    source_bytes: int
    memory: MemoryEstimate
    seconds: float
    loaders: tuple[Loader, ...]
    quick_seconds: float | None = None
    bare_seconds: float | None = None
    workers: int | None = None
    is_timed: bool = False

    @property
    def quantized(self) -> list[ModuleKind]:
        return [kind for kind in self.kinds if kind.scheme and not kind.is_table]

    @property
    def bits_per_weight(self) -> float:
        chosen = self.quantized
        return sum(kind.bytes for kind in chosen) * 8 / sum(kind.weights for kind in chosen)

    @property
    def loads_in(self) -> str:
        first = self.loaders[0].format
        return loads_in(loader for loader in self.loaders if loader.format == first)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "bits_per_weight": self.bits_per_weight,
            "memory": asdict(self.memory) | {"bytes": self.memory.bytes},
        }

    def line(self) -> str:
        chosen = self.quantized
        size = next(iter(self.file_bytes.values()))
        of_each = "" if self.workers is None else f" of each of {self.workers} workers"
        return (
            f"{sum(kind.count for kind in chosen)} linears at {self.bits_per_weight:.2f} bits per weight, "
            f"{size / 2**20:.2f} MiB to write from {self.source_bytes / 2**20:.2f}; "
            f"{self.memory.bytes / 2**20:.0f} MiB of memory beyond the start{of_each}; {self.time}; "
            f"loads in {self.loads_in}"
        )

    @property
    def time(self) -> str:
        """The time in words, with that of a quick run, or of one without errors, where it is much less."""
        duration = f"about {in_words(self.seconds)}{'' if self.is_timed else ' by its operations'}"
        if self.bare_seconds is not None and self.bare_seconds < self.seconds / 2:
            return f"{duration}, to measure errors; with --no-errors about {in_words(self.bare_seconds)}"
        if self.quick_seconds is None or self.quick_seconds > self.seconds / 2:
            return duration
        quick = f"--num-samples {CPU_SAMPLES} --seq-len {CPU_SEQ_LEN}"
        return f"{duration}; with {quick} about {in_words(self.quick_seconds)}"


def preflight(
    session: Session, workers: int | None = None, layer: LayerTime | None = None
) -> Preflight:
    """Predict the run of a session, in one process or by workers, its time by that of a layer where one was
    timed; writes nothing."""
    number = workers or 1
    plan, calibration, request = session.plan, session.calibration, session.request
    tokens, lanes = busiest(calibration, workers)
    packed = [packed_entries(plan, weight_format) for weight_format in plan.formats]
    sizes = [_sizes(entries) for entries in packed]
    rate = _operations_per_second()

    def seconds_with(tokens: int) -> float:
        if layer is None:
            return estimate_operations(plan, tokens, number) / rate
        return layer.seconds(weights_of(plan), tokens, solvers_of(plan, 0, number))

    has_more = calibration.num_tokens > QUICK_TOKENS
    source = (name for name in plan.checkpoint.names if not name.endswith(_BUFFER))
    return Preflight(
        kinds=_kinds(plan, sizes[0]),
        tensor_bytes={
            weight_format.name: sum(size.values()) + unquantized_bytes(plan, weight_format)
            for weight_format, size in zip(plan.formats, sizes, strict=True)
        },
        file_bytes={
            weight_format.name: _file_bytes(session, weight_format, entries)
            for weight_format, entries in zip(plan.formats, packed, strict=True)
        },
        source_bytes=sum(entry_bytes(plan.checkpoint.entry(name)) for name in source),
        memory=replace(
            estimate_memory(
                plan,
                session.stream.hidden_size,
                tokens,
                held_out=bool(len(calibration.held_out)),
                measured_now=request.stats is None or request.method == AUTO,
                lanes=lanes,
            ),
            images=_image_bytes(plan, calibration),
        ),
        seconds=seconds_with(tokens),
        quick_seconds=seconds_with(QUICK_TOKENS // number) if has_more else None,
        bare_seconds=seconds_with(0) if request.errors and not data_needs(request) else None,
        workers=workers,
        is_timed=layer is not None,
        loaders=tuple(
            loader
            for weight_format in plan.formats
            for loader in loaders(stored(plan), weight_format.name, request.tensor_parallel)
        ),
    )


def busiest(calibration: Calibration, workers: int | None) -> tuple[int, int | None]:
    """Tokens and lanes of calibration samples of the worker that has most; of one process all, and none."""
    if workers is None:
        return calibration.num_tokens, None
    tokens, most = 0, []
    for ids in (calibration.token_ids, calibration.held_out):
        rows = max(1, TOKENS_PER_BATCH // max(1, ids.shape[1]))  # as of most layer streams
        shares = shares_of(len(ids), rows, workers)
        tokens += max(share.own.stop - share.own.start for share in shares) * ids.shape[1]
        most.append(max(len(share.lanes) for share in shares))
    return tokens, most[0]


def _image_bytes(plan: QuantizePlan, calibration: Calibration) -> int:
    """Pixels of all samples, and the vision side in float32, which makes features of them."""
    if not calibration.num_images:
        return 0
    samples = (*calibration.images, *calibration.held_out_images)
    pixels = sum(tensor.nbytes for images in samples for tensor in images.tensors.values())
    others = (name for name, part in parts_of(plan).items() if part != TEXT)
    weights = sum(prod(plan.checkpoint.shape(name)) for name in others)
    return pixels + weights * torch.float32.itemsize


def unquantized_bytes(plan: QuantizePlan, weight_format: WeightFormat) -> int:
    if weight_format.name == "gguf":
        blocks = sum(
            _data_bytes(str(plan.schemes[module].ggml_type), shape)
            for module, shape in plan.modules.items()
        )
        return sum(_data_bytes(part.type, part.shape) for part in _gguf_tensors(plan)) - blocks
    return sum(map(entry_bytes, _unquantized(plan, weight_format).values()))


def _data_bytes(block: str, shape: Sequence[int]) -> int:
    from ..gguf.container import data_bytes

    return data_bytes(block, shape)


def _gguf_tensors(plan: QuantizePlan) -> list[TensorToWrite]:
    from ..gguf.assemble import planned_tensors

    return planned_tensors(plan.checkpoint, plan.schemes, plan.gguf_type, plan.gguf_tables)


def _unquantized(plan: QuantizePlan, weight_format: WeightFormat) -> dict[str, Entry]:
    """The tensors that are copied unchanged, and the scales of the KV cache."""
    entries = {
        name: plan.checkpoint.entry(name)
        for name in plan.checkpoint.names
        if name.removesuffix(".weight") not in plan.modules and not name.endswith(_BUFFER)
    }
    if plan.kv_cache is not None:
        per_head = plan.kv_cache_strategy == "attn_head"
        shape = (kv_heads(plan.checkpoint.text_config), 1, 1) if per_head else (1,)
        for prefix in map(plan.architecture.layer_prefix, range(plan.num_layers)):
            for part in "kv":
                name = weight_format.kv_scale_name(f"{prefix}.self_attn.{part}_scale")
                entries[name] = "F32", shape
    return entries


def _file_bytes(session: Session, weight_format: WeightFormat, packed: PackedEntries) -> int:
    """Bytes of all weight files in a format: those of layers, and that of everything else."""
    plan, request = session.plan, session.request
    if weight_format.name == "gguf":
        from ..gguf.assemble import gguf_name, planned_bytes

        name = gguf_name(request.model_name or request.model.resolve().name, plan.gguf_type)
        stem = name.removesuffix(GGUF_SUFFIX)
        return planned_bytes(plan.checkpoint, _gguf_tensors(plan), plan.gguf_type, stem)
    tensors = {
        module + suffix: entry
        for module, entries in packed.items()
        for suffix, entry in entries.items()
    }
    tensors |= _unquantized(plan, weight_format)
    starts = plan.layer_starts
    shards: dict[str, dict[str, Entry]] = defaultdict(dict)
    for name, entry in tensors.items():
        shards[next((start for start in starts if name.startswith(start)), "")][name] = entry
    return sum(file_bytes(shard) for shard in shards.values())


PackedEntries = Mapping[str, Mapping[str, Entry]]
"""The packed tensors of every module, by the rest of their name after the module's."""


def packed_entries(plan: QuantizePlan, weight_format: WeightFormat) -> PackedEntries:
    """The packed tensors in a format, by packing zero weights of the same shape."""
    known: dict[tuple[Scheme, tuple[int, int], torch.dtype], dict[str, Entry]] = {}
    entries = {}
    for module, shape in plan.modules.items():
        scheme = plan.schemes[module]
        stored = TORCH_DTYPES[plan.checkpoint.dtype_name(f"{module}.weight")]
        key = scheme, shape, weight_format.scale_dtype(stored, scheme)
        if key not in known:
            packed = weight_format.pack(module, kind_of(scheme).blank(*shape, key[2]))
            known[key] = {
                name.removeprefix(module): entry for name, entry in layout_of(packed).items()
            }
        entries[module] = known[key]
    return entries


def module_sizes(plan: QuantizePlan, weight_format: WeightFormat) -> dict[str, int]:
    return _sizes(packed_entries(plan, weight_format))


def _sizes(packed: PackedEntries) -> dict[str, int]:
    return {module: sum(map(entry_bytes, entries.values())) for module, entries in packed.items()}


def _kinds(plan: QuantizePlan, sizes: dict[str, int]) -> tuple[ModuleKind, ...]:
    """Modules grouped by the last part of their name and their scheme."""
    groups: dict[tuple[str, str | None, str], list[tuple[int, int]]] = defaultdict(list)
    parts = parts_of(plan)
    for module, (out_features, in_features) in plan.modules.items():
        part = parts[f"{module}.weight"]
        key = module.rpartition(".")[2], plan.schemes[module].label, part
        groups[key].append((out_features * in_features, sizes[module]))
    tables = plan.table_types(plan.format.name)
    for module in plan.unquantized:
        name = f"{module}.weight"
        if name in plan.checkpoint:
            entry, block = plan.checkpoint.entry(name), tables.get(module)
            size = entry_bytes(entry) if block is None else _data_bytes(block, entry[1])
            key = module.rpartition(".")[2], block, parts[name]
            groups[key].append((prod(entry[1]), size))
    return tuple(
        ModuleKind(
            name=name,
            scheme=scheme,
            count=len(members),
            weights=sum(weights for weights, _ in members),
            bytes=sum(size for _, size in members),
            part=part,
            is_table=name in {module.rpartition(".")[2] for module in tables},
        )
        for (name, scheme, part), members in groups.items()
    )


def _operations_per_second() -> float:
    """Measured float32 GEMM rate of this machine, with the current thread count and no other program."""
    square = torch.ones(512, 512)
    torch.mm(square, square)  # warm-up
    rounds = 8
    with Stopwatch() as watch:
        for _ in range(rounds):
            torch.mm(square, square)
    return rounds * 2 * 512**3 / watch.seconds
