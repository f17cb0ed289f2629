"""Plain checkpoints from quantized ones: every weight dequantized, by the names that transformers loads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..base.atomic_io import atomic_folder, layout_of, write_atomically, write_tensors
from ..base.errors import BadInput
from ..base.progress import Progress
from ..families.registry import type_of
from ..formats.registry import (
    checkpoint_format,
    module_scheme,
    quantized_modules,
    read_quantized,
    tensor_names,
)
from ..kinds.base.format import KV_SCALES
from ..kinds.registry import scheme_record
from ..model.checkpoint import INDEX_NAME, Checkpoint
from ..models import short_name
from ..plan.journal import weight_digests
from ..plan.manifest import Conversion, to_json

PLAIN = "hf"
"""The plain checkpoint among the formats that `convert` writes."""
RECORD_NAME = "conversion.json"
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
SHARD_BYTES = 2**30


def write_shards(
    folder: Path, parts: Iterable[Mapping[str, torch.Tensor]], release: Callable[[], None]
) -> None:
    """Write tensors as they come in shards of 1 GiB, of which one is in memory, and their index.

    Args:
        release: called after each shard, to let go of what was read for it.
    """
    weight_map: dict[str, str] = {}
    held: dict[str, torch.Tensor] = {}
    total = size = 0

    def write() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        write_tensors(folder / name, held, layout_of(held))
        weight_map.update(dict.fromkeys(held, name))
        held.clear()
        release()

    for tensors in parts:
        held |= tensors
        added = sum(tensor.nbytes for tensor in tensors.values())
        size, total = size + added, total + added
        if size >= SHARD_BYTES:
            write()
            size = 0
    if held:
        write()
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_atomically(folder / INDEX_NAME, to_json(index))


Edit = Callable[[str, torch.Tensor, torch.dtype], torch.Tensor]
"""From a linear's name, its weight in float32 and the dtype of its result to the tensor that is stored."""


def plain_tensors(
    source: Checkpoint,
    dtype: torch.dtype | None,
    edit: Edit,
    *,
    edited: Collection[str] = (),
    progress: Progress,
    what: str,
) -> Iterator[dict[str, torch.Tensor]]:
    """Every tensor of a checkpoint, plain: linears that are quantized or edited, then the others.

    Args:
        dtype: of every float; None: as stored, and for dequantized ones that of the config.
        edited: linears that go through `edit` beside the quantized ones.
        what: the description of the progress.
    """
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
    for name in source.names:
        if name not in taken and not (quantized and name.endswith(KV_SCALES)):
            tensor = source.tensor(name)
            is_cast = dtype is not None and tensor.is_floating_point()
            yield {name: tensor.to(dtype) if is_cast else tensor}


def dtype_of_config(source: Checkpoint) -> torch.dtype:
    """The dtype that a checkpoint's config names; bfloat16 where it names none of `DTYPES`."""
    name = source.config.get("dtype") or source.config.get("torch_dtype") or "bfloat16"
    return DTYPES.get(str(name).removeprefix("torch."), torch.bfloat16)


def write_plain(
    work: Path,
    source: Checkpoint,
    tensors: Iterable[Mapping[str, torch.Tensor]],
    dtype: torch.dtype | None,
) -> None:
    """Write shards, companions and a config without a quantization, with the class that loads it."""
    write_shards(work, tensors, source.release)
    for name, content in source.companions().items():
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
    """Write `source` as a plain checkpoint in the dtype of its config.

    Raises:
        BadInput: `output` exists, or the source is plain safetensors already, or damaged.
    """
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

    with atomic_folder(output, ".converting") as work:
        tensors = plain_tensors(source, dtype, rounded, progress=progress, what="dequantizing")
        write_plain(work, source, tensors, dtype)
        name = checkpoint_format(source).name if quantized else "gguf"
        record = {
            "llmopt": version("llmopt"),
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
