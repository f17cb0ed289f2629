"""Dry run: predicted output sizes, time and memory of a quantization."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

import torch

from ..base.atomic_io import entry_bytes
from ..base.scheme import Scheme
from ..kinds.base.format import WeightFormat
from ..kinds.base.kind import kind_of
from ..plan.loaders import Loader, loaders, loads_in, stored
from ..plan.parts import TEXT, parts_of
from ..plan.plan import QuantizePlan
from ..plan.selection import TORCH_DTYPES
from ..stream.calibration import Calibration
from .estimate import MemoryEstimate, estimate_memory, estimate_operations
from .stages import Session


@dataclass(frozen=True, slots=True)
class ModuleKind:
    """All modules of one name and scheme, such as every `down_proj`.

    Attributes:
        scheme: None: not quantized.
        part: `text`, `vision` or `projector`.
        bytes: of their tensors in the first format.
    """

    name: str
    scheme: str | None
    count: int
    weights: int
    bytes: int
    part: str = TEXT

    @property
    def bits_per_weight(self) -> float:
        """Including scales and zero points."""
        return self.bytes * 8 / self.weights


@dataclass(frozen=True, slots=True)
class Preflight:
    """The result of `--dry-run`.

    Attributes:
        kinds: the target scheme of every linear.
        tensor_bytes: of all tensors to be written, by format.
        source_bytes: of all source tensors.
        memory: predicted resident memory beyond the start of the process.
        seconds: estimate from a measured GEMM rate.
        loaders: which loaders support the result.
    """

    kinds: tuple[ModuleKind, ...]
    tensor_bytes: dict[str, int]
    source_bytes: int
    memory: MemoryEstimate
    seconds: float
    loaders: tuple[Loader, ...]

    @property
    def bits_per_weight(self) -> float:
        """Mean stored bits of the quantized linears."""
        chosen = [kind for kind in self.kinds if kind.scheme]
        return sum(kind.bytes for kind in chosen) * 8 / sum(kind.weights for kind in chosen)

    @property
    def loads_in(self) -> str:
        """The loaders of the first format, with their requirements."""
        first = self.loaders[0].format
        return loads_in(loader for loader in self.loaders if loader.format == first)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {
            "bits_per_weight": self.bits_per_weight,
            "memory": asdict(self.memory) | {"bytes": self.memory.bytes},
        }

    def line(self) -> str:
        """One-line summary."""
        chosen = [kind for kind in self.kinds if kind.scheme]
        size = next(iter(self.tensor_bytes.values()))
        return (
            f"{sum(kind.count for kind in chosen)} linears at {self.bits_per_weight:.2f} bits per weight, "
            f"{size / 2**20:.1f} MiB of tensors to write from {self.source_bytes / 2**20:.1f}; about "
            f"{self.seconds:.0f} s and {self.memory.bytes / 2**20:.0f} MiB of memory beyond the start; "
            f"loads in {self.loads_in}"
        )


def preflight(session: Session) -> Preflight:
    """Predict the run of a prepared session; writes nothing."""
    plan, calibration = session.plan, session.calibration
    tokens = calibration.num_tokens
    sizes = [module_sizes(plan, weight_format) for weight_format in plan.formats]
    others = unquantized_bytes(plan)
    extra = others + plan.kv_scale_bytes
    return Preflight(
        kinds=_kinds(plan, sizes[0]),
        tensor_bytes={
            weight_format.name: sum(size.values()) + extra
            for weight_format, size in zip(plan.formats, sizes, strict=True)
        },
        source_bytes=others + plan.plain_bytes,
        memory=replace(
            estimate_memory(
                plan,
                session.stream.hidden_size,
                tokens,
                held_out=bool(len(calibration.held_out)),
                measured_now=session.statistics is None,
            ),
            images=_image_bytes(plan, calibration),
        ),
        seconds=estimate_operations(plan, tokens) / _operations_per_second(),
        loaders=tuple(
            loader
            for weight_format in plan.formats
            for loader in loaders(stored(plan), weight_format.name, session.request.tensor_parallel)
        ),
    )


def _image_bytes(plan: QuantizePlan, calibration: Calibration) -> int:
    """Pixels of all samples, and the vision side in float32, which makes features of them."""
    if not calibration.num_images:
        return 0
    samples = (*calibration.images, *calibration.held_out_images)
    pixels = sum(tensor.nbytes for each in samples for tensor in each.tensors.values())
    checkpoint = plan.checkpoint
    weights = sum(
        prod(checkpoint.shape(name)) for name, part in parts_of(plan).items() if part != TEXT
    )
    return pixels + weights * torch.float32.itemsize


def unquantized_bytes(plan: QuantizePlan) -> int:
    """Bytes of every tensor that is copied unchanged."""
    checkpoint = plan.checkpoint
    return sum(
        entry_bytes((checkpoint.dtype_name(name), checkpoint.shape(name)))
        for name in checkpoint.names
        if name.removesuffix(".weight") not in plan.modules
        and not name.endswith("rotary_emb.inv_freq")
    )


def module_sizes(plan: QuantizePlan, weight_format: WeightFormat) -> dict[str, int]:
    """Packed bytes of every module, by packing zero weights of the same shape."""
    known: dict[tuple[Scheme, tuple[int, int], torch.dtype], int] = {}
    sizes = {}
    for module, shape in plan.modules.items():
        scheme = plan.schemes[module]
        stored = TORCH_DTYPES[plan.checkpoint.dtype_name(f"{module}.weight")]
        key = scheme, shape, weight_format.scale_dtype(stored, scheme)
        if key not in known:
            packed = weight_format.pack(module, kind_of(scheme).blank(*shape, key[2]))
            known[key] = sum(tensor.nbytes for tensor in packed.values())
        sizes[module] = known[key]
    return sizes


def _kinds(plan: QuantizePlan, sizes: dict[str, int]) -> tuple[ModuleKind, ...]:
    """Modules grouped by the last part of their name and their scheme."""
    groups: dict[tuple[str, str | None, str], list[tuple[int, int]]] = defaultdict(list)
    parts = parts_of(plan)
    for module, (out_features, in_features) in plan.modules.items():
        part = parts[f"{module}.weight"]
        key = module.rpartition(".")[2], plan.schemes[module].label, part
        groups[key].append((out_features * in_features, sizes[module]))
    for module in plan.unquantized:
        name = f"{module}.weight"
        if name in plan.checkpoint:
            entry = plan.checkpoint.dtype_name(name), plan.checkpoint.shape(name)
            key = module.rpartition(".")[2], None, parts[name]
            groups[key].append((prod(entry[1]), entry_bytes(entry)))
    return tuple(
        ModuleKind(
            name=name,
            scheme=scheme,
            count=len(members),
            weights=sum(weights for weights, _ in members),
            bytes=sum(size for _, size in members),
            part=part,
        )
        for (name, scheme, part), members in groups.items()
    )


def _operations_per_second() -> float:
    """Measured float32 GEMM rate of this machine, with the current thread count."""
    square = torch.ones(512, 512)
    torch.mm(square, square)  # warm-up
    began, rounds = time.perf_counter(), 8
    for _ in range(rounds):
        torch.mm(square, square)
    return rounds * 2 * 512**3 / (time.perf_counter() - began)
