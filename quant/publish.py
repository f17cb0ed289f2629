"""The files of a finished checkpoint that belong to no single layer."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save

from .calibration import Calibration
from .checkpoint import INDEX_NAME
from .durable import TEMPORARY_SUFFIX, write_durably
from .errors import BadInput
from .journal import Journal, sha256_of_file
from .manifest import (
    CARD_NAME,
    MANIFEST_NAME,
    build_manifest,
    describe_files,
    model_card,
    summarise,
    to_json,
)
from .plan import Plan, QuantizeRequest

OTHER_SHARD = "model-other.safetensors"
_COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_COPIED_PATTERNS = ("LICENSE*", "NOTICE*")


def write_final_files(
    journal: Journal,
    plan: Plan,
    calibration: Calibration,
    request: QuantizeRequest,
    source_hashes: dict[str, str],
) -> None:
    """Everything but the layer shards, into the checkpoint folder of the work folder.

    Writing it twice gives the same bytes, so a kill in here costs nothing.

    Raises:
        BadInput: a finished shard was changed since, or the disk is full.
    """
    folder = journal.checkpoint
    for leftover in folder.glob(f"*{TEMPORARY_SUFFIX}"):  # of a kill in the middle of a write
        leftover.unlink()
    for record in journal.layers:
        shard = folder / record["shard"]
        if not shard.is_file() or sha256_of_file(shard) != record["sha256"]:
            raise BadInput(f"{shard} was changed after it was written: begin again with --restart")
    weight_map, total_bytes = _write_other_tensors(folder, journal, plan)
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    write_durably(folder / INDEX_NAME, to_json(index))
    for path in _files_to_copy(plan.checkpoint.folder):
        write_durably(folder / path.name, path.read_bytes())
    config = dict(plan.checkpoint.config)
    config["quantization_config"] = plan.format.config(plan.schemes, ["lm_head", *plan.ignored])
    write_durably(folder / "config.json", to_json(config))

    modules = [module for record in journal.layers for module in record["modules"]]
    manifest = build_manifest(
        plan,
        calibration,
        model_name=request.model_name or request.model.resolve().name,
        signature=journal.signature,
        seed=request.seed,
        source_hashes=source_hashes,
        modules=modules,
        files=describe_files(folder),
        summary=summarise(
            plan,
            modules,
            checkpoint_bytes=sum(path.stat().st_size for path in folder.glob("*.safetensors")),
            quantized_bytes=sum(
                nbytes
                for record in journal.layers
                for name, nbytes in record["tensors"].items()
                if name.endswith(plan.format.suffixes)
            ),
        ),
    )
    write_durably(folder / MANIFEST_NAME, to_json(manifest))
    write_durably(folder / CARD_NAME, model_card(plan, manifest))


def _write_other_tensors(folder: Path, journal: Journal, plan: Plan) -> tuple[dict[str, str], int]:
    """Write embeddings, final norm and head as they are; the whole weight map, and the bytes of it all."""
    layer_prefixes = tuple(f"model.layers.{index}." for index in range(plan.num_layers))
    others = {
        name: plan.checkpoint.tensor(name).contiguous()
        for name in plan.checkpoint.names
        if not name.startswith(layer_prefixes)
    }
    write_durably(folder / OTHER_SHARD, save(others, {"format": "pt"}))
    weight_map = dict.fromkeys(others, OTHER_SHARD)
    total_bytes = sum(tensor.nbytes for tensor in others.values())
    for record in journal.layers:
        weight_map |= dict.fromkeys(record["tensors"], record["shard"])
        total_bytes += sum(record["tensors"].values())
    return weight_map, total_bytes


def _files_to_copy(source: Path) -> list[Path]:
    paths: list[Path] = [source / name for name in _COPIED]
    for pattern in _COPIED_PATTERNS:
        paths += sorted(source.glob(pattern))
    return [path for path in paths if path.is_file()]
