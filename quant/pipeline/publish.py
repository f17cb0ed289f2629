"""Final files of a checkpoint: config, index, non-layer tensors, manifest, model card."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..base.atomic_io import TEMPORARY_SUFFIX, Entry, entry_bytes, write_atomically, write_tensors
from ..base.errors import BadInput
from ..formats.registry import completed_config, config_files
from ..gguf.assemble import assemble, gguf_name
from ..model.checkpoint import INDEX_NAME, Checkpoint
from ..plan.journal import Journal, sha256_of_file
from ..plan.manifest import (
    CARD_NAME,
    MANIFEST_NAME,
    build_manifest,
    describe_files,
    model_card,
    summarise,
    to_json,
)
from ..plan.parts import part_reports, with_parts
from ..plan.plan import QuantizePlan
from ..plan.request import QuantizeRequest
from ..plan.selection import HEAD
from ..stream.calibration import Calibration

OTHER_SHARD = "model-other.safetensors"


def shard_folder(checkpoint: Path, plan: QuantizePlan, number: int) -> Path:
    """The folder of format `number`: a subfolder where there are several formats."""
    return checkpoint / plan.formats[number].name if len(plan.formats) > 1 else checkpoint


def layer_folder(journal: Journal, plan: QuantizePlan, number: int) -> Path:
    """The folder of a format's layer shards; for GGUF a temporary one, merged into one file at the end."""
    if plan.formats[number].name == "gguf":
        return journal.folder / "layers-gguf"
    return shard_folder(journal.checkpoint, plan, number)


def write_final_files(
    journal: Journal,
    plan: QuantizePlan,
    calibration: Calibration,
    request: QuantizeRequest,
    source_hashes: dict[str, str],
) -> None:
    """Write everything but the layer shards into the work folder's checkpoint.

    Idempotent: a second run after a kill writes the same bytes.

    Raises:
        BadInput: a finished shard was changed since, or the disk is full.
    """
    for number in range(len(plan.formats)):
        _write_format(journal, plan, number, calibration, request, source_hashes)


def _write_format(
    journal: Journal,
    plan: QuantizePlan,
    number: int,
    calibration: Calibration,
    request: QuantizeRequest,
    source_hashes: dict[str, str],
) -> None:
    weight_format = plan.formats[number]
    folder = shard_folder(journal.checkpoint, plan, number)
    layers = layer_folder(journal, plan, number)
    for leftover in folder.glob(f"*{TEMPORARY_SUFFIX}"):  # of a write that was killed
        leftover.unlink()
    shards = [record["shards"][weight_format.name] for record in journal.layers]
    for written in shards:
        shard = layers / written["shard"]
        if not shard.is_file() or sha256_of_file(shard) != written["sha256"]:
            raise BadInput(f"{shard} was changed after it was written: begin again with --restart")
    name = request.model_name or request.model.resolve().name
    if weight_format.name == "gguf":
        assemble(
            plan.checkpoint,
            [layers / written["shard"] for written in shards],
            folder / gguf_name(name, plan.gguf_type),
            plan.schemes,
            plan.gguf_type,
        )
    else:
        _write_index(folder, plan, shards)
    for file_name, content in plan.checkpoint.companions().items():
        write_atomically(folder / file_name, content)
    config = dict(plan.checkpoint.config)
    config["quantization_config"] = completed_config(plan.config_in(weight_format), folder)
    write_atomically(folder / "config.json", to_json(config))
    for file_name, facts in config_files(config["quantization_config"]).items():
        write_atomically(folder / file_name, to_json(facts))

    modules = with_parts(plan, [module for written in shards for module in written["modules"]])
    stored = {name: size for shard in shards for name, size in shard["tensors"].items()}
    parts = part_reports(plan, modules, stored)
    manifest = build_manifest(
        plan,
        number,
        calibration,
        request=request,
        signature=journal.signature,
        source_hashes=source_hashes,
        modules=modules,
        parts=[asdict(part) for part in parts],
        files=describe_files(folder),
        summary=summarise(
            plan,
            modules,
            checkpoint_bytes=sum(
                path.stat().st_size
                for path in folder.iterdir()
                if path.suffix in (".safetensors", ".gguf")
            ),
            quantized_bytes=sum(
                stored[module + suffix]
                for module in plan.modules
                for suffix in weight_format.suffixes
                if module + suffix in stored
            ),
        ),
    )
    write_atomically(folder / MANIFEST_NAME, to_json(manifest))
    write_atomically(folder / CARD_NAME, model_card(plan, number, manifest))


def _write_index(folder: Path, plan: QuantizePlan, shards: list[dict[str, Any]]) -> None:
    """Write the non-layer tensors and the weight map."""
    weight_map, total_bytes = _write_other_tensors(folder, plan)
    for written in shards:
        weight_map |= dict.fromkeys(written["tensors"], written["shard"])
        total_bytes += sum(written["tensors"].values())
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    write_atomically(folder / INDEX_NAME, to_json(index))


def other_tensors(plan: QuantizePlan) -> dict[str, Entry]:
    """The non-layer tensors: embeddings, final norm, and the head unless quantized."""
    layers = range(plan.num_layers)
    prefixes = tuple(f"{plan.architecture.layer_prefix(index)}." for index in layers)
    if plan.vision is not None:
        units = range(len(plan.vision.layers))
        prefixes += tuple(f"{plan.vision.layer_prefix(index)}." for index in units)
    if plan.lm_head:
        prefixes += (f"{HEAD}.",)
    checkpoint = plan.checkpoint
    return {
        name: (checkpoint.dtype_name(name), checkpoint.shape(name))
        for name in checkpoint.names
        if not name.startswith(prefixes)
    }


class _OneByOne:
    """Lazy tensors of a checkpoint, each unmapped when the next is read."""

    def __init__(self, checkpoint: Checkpoint):
        self._checkpoint = checkpoint

    def __getitem__(self, name: str, /) -> torch.Tensor:
        self._checkpoint.release()
        return self._checkpoint.tensor(name)


def _write_other_tensors(folder: Path, plan: QuantizePlan) -> tuple[dict[str, str], int]:
    """Write the unquantized tensors; returns their weight map and bytes."""
    layout = other_tensors(plan)
    write_tensors(folder / OTHER_SHARD, _OneByOne(plan.checkpoint), layout)
    plan.checkpoint.release()
    return dict.fromkeys(layout, OTHER_SHARD), sum(map(entry_bytes, layout.values()))
