"""Plain checkpoints: every weight dequantized, by the names that transformers loads, or adapters merged.

LoRA adds `scale · B·A`. DoRA (arXiv:2402.09353, section 4) gives each output channel of the sum the learned
magnitude: `m · (W + scale · B·A) / ‖W + scale · B·A‖`. A quantized base is dequantized first (QLoRA,
arXiv:2305.14314), as the adapter learned on those values. All is computed in float32.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...base.atomic_io import (
    atomic_folder,
    check_absent,
    write_atomically,
    write_tensors,
)
from ...base.errors import BadInput
from ...base.progress import Progress, Silent
from ...base.version import VERSION
from ..families.registry import type_of
from ..formats.registry import (
    checkpoint_format,
    module_scheme,
    quantized_modules,
    read_quantized,
    tensor_names,
)
from ..kinds.base.format import CACHE_SCALES
from ..kinds.registry import scheme_record
from ..model.checkpoint import INDEX_NAME, Checkpoint
from ..model.parameters import ModelParameters, model_parameters
from ..plan.journal import sha256_of_file, weight_digests
from ..plan.manifest import Conversion, to_json
from ..source.models import short_name
from .adapter import WEIGHTS_NAME, AdapterWeights, LoraSettings, with_tokenizer_of

PLAIN = "hf"
"""The plain checkpoint among the formats that `convert` writes."""
RECORD_NAME = "conversion.json"
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
SHARD_BYTES = 2**30


def write_shards(
    folder: Path, parts: Iterable[Mapping[str, torch.Tensor]], release: Callable[[], None]
) -> None:
    """Write tensors as they come in shards of 1 GiB, one in memory, and an index; `release` after each."""
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    total = size = 0

    def write() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        write_tensors(folder / name, shard)
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()
        release()

    for tensors in parts:
        shard |= tensors
        added = sum(tensor.nbytes for tensor in tensors.values())
        size, total = size + added, total + added
        if size >= SHARD_BYTES:
            write()
            size = 0
    if shard:
        write()
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_atomically(folder / INDEX_NAME, to_json(index))


Edit = Callable[[str, torch.Tensor, torch.dtype], torch.Tensor]
"""Function of a linear's name, its float32 weight and the result's dtype that returns the stored tensor."""


def plain_tensors(
    source: Checkpoint,
    dtype: torch.dtype | None,
    edit: Edit,
    *,
    edited: Collection[str] = (),
    progress: Progress,
    what: str,
) -> Iterator[dict[str, torch.Tensor]]:
    """Every tensor plain: quantized linears and `edited` ones, by `edit`, then the others. `dtype` of floats,
    None: as stored, or the config's. `what` describes the progress."""
    quantized = quantized_modules(source)
    modules = sorted({*quantized, *edited})
    taken: set[str] = set()
    progress.start(what, len(modules), "modules")
    for module in modules:
        name = f"{module}.weight"
        if module in quantized:
            taken |= tensor_names(source, module)
            weight, stored = read_quantized(source, module).dequantize(), dtype_of_config(source)
        else:
            taken.add(name)
            weight = source.tensor(name)
            stored = weight.dtype
        yield {name: edit(module, weight.float(), dtype or stored)}
        progress.advance()
    progress.finish()
    left = [name for name in source.names if name not in taken]
    if quantized:
        left = [name for name in left if not name.endswith(CACHE_SCALES)]
        refuse_unplaced(source, left, model_parameters(source))
    for name in left:
        tensor = source.tensor(name)
        is_cast = dtype is not None and tensor.is_floating_point()
        yield {name: tensor.to(dtype) if is_cast else tensor}


def refuse_unplaced(
    source: Checkpoint, names: Sequence[str], parameters: ModelParameters | str
) -> None:
    """Raises BadInput for a tensor of a quantized checkpoint that is no parameter of its model."""
    unplaced = () if isinstance(parameters, str) else parameters.unplaced(names)
    if unplaced:
        raise BadInput(
            f"{source.path}: {len(unplaced)} tensors have no place in the model that config.json "
            f"describes, the first is {unplaced[0]}: what it changes would be lost"
        )


def dtype_of_config(source: Checkpoint) -> torch.dtype:
    """The dtype that a checkpoint's config names; bfloat16 where it names none of `DTYPES`."""
    name = source.config.get("dtype") or source.config.get("torch_dtype") or "bfloat16"
    return DTYPES.get(str(name).removeprefix("torch."), torch.bfloat16)


def write_plain(
    work: Path,
    source: Checkpoint,
    tensors: Iterable[Mapping[str, torch.Tensor]],
    dtype: torch.dtype | None,
    companions: Mapping[str, bytes] | None = None,
) -> None:
    """Write shards, companions (or else the source's) and a config without a quantization, with the class
    that loads it."""
    write_shards(work, tensors, source.release)
    for name, content in (source.companions() if companions is None else companions).items():
        write_atomically(work / name, content)
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    if dtype is not None:
        config["dtype"] = str(dtype).removeprefix("torch.")
        config.pop("torch_dtype", None)
    loaded_by = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(type_of(config))
    if loaded_by is not None:
        config.setdefault("architectures", [loaded_by])
    write_atomically(work / "config.json", to_json(config))


def dequantize_checkpoint(source: Checkpoint, output: Path, progress: Progress) -> Conversion:
    """Write `source` in its config's dtype. BadInput: `output` exists, or plain safetensors, or damaged."""
    quantized = source.quantization_config is not None
    if not quantized and source.path == source.folder:
        raise BadInput(f"{source.path} is a plain checkpoint already")
    dtype = dtype_of_config(source)
    records: dict[str, dict[str, Any]] = {}

    def rounded(module: str, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        stored = weight.to(dtype).contiguous()
        energy = float(weight.double().square().sum())
        lost = float((weight.double() - stored.double()).square().sum())
        error = lost / energy if energy else 0.0
        reason = f"rounded to {str(dtype).removeprefix('torch.')}" if error else ""
        scheme = scheme_record(module_scheme(source, module))
        records[module] = {"source_scheme": scheme, "error": error, "reason": reason}
        return stored

    check_absent(output)
    with atomic_folder(output, f"{output.name}.converting") as work:
        tensors = plain_tensors(source, dtype, rounded, progress=progress, what="dequantizing")
        write_plain(work, source, tensors, dtype)
        name = checkpoint_format(source).name if quantized else "gguf"
        record = {
            "llmopt": VERSION,
            "model": short_name(source.path),
            "converted_from": {"format": name, "sha256": weight_digests(source)},
            "modules": records,
        }
        write_atomically(work / RECORD_NAME, to_json(record))
    return Conversion(
        output=output,
        source_format=name,
        target_format=PLAIN,
        scheme=str(dtype).removeprefix("torch."),
        modules=records,
        loads_in="llmopt; transformers",
    )


MERGE_RECORD_NAME = "merge.json"
_UNFINISHED = ".merging"
_FROM_LAYER = re.compile(r"(?:^|\.)(layers\.\d+\..+|h\.\d+\..+)$")


@dataclass(frozen=True, slots=True)
class WeightedAdapter:
    """An adapter folder and the factor of its change."""

    folder: Path
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Merged:
    """Changed linears with the norm of change over weight, the least share that rounding left, and notes."""

    output: Path
    dtype: str
    modules: dict[str, float]
    kept: float
    notes: tuple[str, ...] = ()


def merge(
    base: Checkpoint,
    adapters: Sequence[WeightedAdapter],
    output: Path,
    *,
    dtype: str = "auto",
    progress: Progress | None = None,
) -> Merged:
    """Write `base` with the adapters in its weights as a plain checkpoint, one shard in memory at a time. The
    folder `output` appears atomically, once everything is written. `dtype` is that of floating-point tensors;
    `auto` keeps each one's own, and writes dequantized ones in the dtype of the config. Raises BadInput:
    `output` exists, a damaged base or adapter, or adapters that do not fit the base or each other."""
    if dtype not in ("auto", *DTYPES):
        raise BadInput(f"--dtype {dtype!r}: choose auto, {', '.join(DTYPES)}")
    job = _Merge(base, [_Adapter(adapter) for adapter in adapters], dtype, progress or Silent())
    job.check()
    check_absent(output)
    with atomic_folder(output, output.name + _UNFINISHED) as work:
        job.write(work)
        write_atomically(work / MERGE_RECORD_NAME, to_json(job.record()))
    return Merged(output, dtype, job.changes, job.kept, tuple(job.notes))


class _Adapter:
    """An opened adapter."""

    def __init__(self, given: WeightedAdapter) -> None:
        self.folder, self.weight = given.folder, given.weight
        self.settings = LoraSettings.read(given.folder)
        self.weights = AdapterWeights(given.folder, self.settings)

    def change(self, module: str, weight: torch.Tensor) -> torch.Tensor:
        """Change that the adapter adds to a module's `weight`, float32 [out, in]."""
        pair = self.weights.pair(module, *weight.shape)
        change = pair.up @ pair.down
        if not self.settings.is_dora:
            return self.weight * change
        directed = weight + change
        magnitude = self.weights.magnitude(module, len(weight))
        scale = magnitude / torch.linalg.vector_norm(directed, dim=1)
        return scale[:, None] * directed - weight


class _Merge:
    """An unfinished merge: which adapter changes which tensor, and what was changed so far."""

    def __init__(
        self, base: Checkpoint, adapters: Sequence[_Adapter], dtype: str, progress: Progress
    ) -> None:
        self._base, self._adapters, self._progress = base, adapters, progress
        self._dtype = DTYPES.get(dtype)
        self._quantized = quantized_modules(base)
        self.changes: dict[str, float] = {}
        self.kept = 1.0
        self.notes: list[str] = []

    def check(self) -> None:
        """Find every adapter's modules, and check shapes, before anything is written; BadInput as `merge`."""
        for adapter in self._adapters:
            if adapter.settings.is_dora and (len(self._adapters) > 1 or adapter.weight != 1.0):
                raise BadInput(
                    f"{adapter.folder}: a DoRA adapter sets the magnitude of the weights: merge it alone, "
                    "with the weight 1"
                )
        for module, changes in self._targets.items():
            if module in self._quantized:
                continue
            shape = self._base.shape(f"{module}.weight")
            if len(shape) != 2:
                raise BadInput(f"{self._base.folder}: {module}.weight is {shape}, not a matrix")
            for adapter, name in changes:
                outputs_first = reversed(shape) if adapter.settings.is_transposed else shape
                adapter.weights.pair(name, *outputs_first)

    @cached_property
    def _targets(self) -> dict[str, list[tuple[_Adapter, str]]]:
        """The adapters of every linear of the base, each with its name for it."""
        targets: dict[str, list[tuple[_Adapter, str]]] = {}
        for adapter in self._adapters:
            for name in adapter.weights.modules:
                targets.setdefault(self._module_of(adapter, name), []).append((adapter, name))
        return targets

    @cached_property
    def _linears(self) -> set[str]:
        plain = {n.removesuffix(".weight") for n in self._base.names if n.endswith(".weight")}
        return plain | self._quantized

    def _module_of(self, adapter: _Adapter, name: str) -> str:
        """The linear of the base that an adapter calls `name`: so, or with another prefix of its layers."""
        if name in self._linears:
            return name
        if in_layer := _FROM_LAYER.search(name):
            ending = f".{in_layer[1]}"
            same = [linear for linear in self._linears if f".{linear}".endswith(ending)]
            if len(same) == 1:
                return same[0]
        tied = self._base.config.get("tie_word_embeddings") and name == "lm_head"
        why = "is tied to the embeddings" if tied else "is no linear of it"
        raise BadInput(f"{adapter.weights.path}: {name} {why}: {self._base.folder} is not its base")

    def write(self, work: Path) -> None:
        tensors = plain_tensors(
            self._base,
            self._dtype,
            self._merged,
            edited=self._targets,
            progress=self._progress,
            what="merging",
        )
        files = self._base.companions()
        for adapter in self._adapters:
            files, note = with_tokenizer_of(adapter.folder, files)
            if note is not None:
                self.notes.append(note)
        write_plain(work, self._base, tensors, self._dtype, files)

    def _merged(self, module: str, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        change = torch.zeros_like(weight)
        for adapter, name in self._targets.get(module, ()):
            is_transposed = adapter.settings.is_transposed
            added = adapter.change(name, weight.T if is_transposed else weight)
            change += added.T if is_transposed else added
        merged = (weight + change).to(dtype)
        if module in self._targets:
            norm = float(change.norm())
            self.changes[module] = norm / max(float(weight.norm()), 1e-30)
            if norm:
                stored = merged.float() - weight.to(dtype).float()
                self.kept = min(self.kept, float((stored * change).sum()) / norm**2)
        return merged.contiguous()

    def record(self) -> dict[str, Any]:
        """Record of what was merged, with the digests of the base and of every adapter."""
        return {
            "llmopt": VERSION,
            "base": short_name(self._base.path),
            "base_sha256": weight_digests(self._base),
            "adapters": [
                {
                    "name": adapter.folder.resolve().name,
                    "sha256": sha256_of_file(adapter.folder / WEIGHTS_NAME),
                    "weight": adapter.weight,
                    "rank": adapter.settings.rank,
                    "dora": adapter.settings.is_dora,
                }
                for adapter in self._adapters
            ],
            "changes": self.changes,
        }
