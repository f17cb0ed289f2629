"""Final files of a checkpoint: config, index, non-layer tensors, manifest, model card."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ...base.atomic_io import (
    HOLLOW_BYTES,
    TEMPORARY_SUFFIX,
    entry_bytes,
    stream_tensors,
    write_atomically,
)
from ...base.errors import BadInput
from ...base.version import VERSION
from ..methods.options import MethodOptions
from ..methods.registry import AUTO
from ..model.checkpoint import INDEX_NAME
from ..plan.journal import Journal, sha256_of_file
from ..plan.manifest import (
    CARD_NAME,
    MANIFEST_NAME,
    describe_files,
    model_card,
    part_reports,
    summarise,
    to_json,
    with_parts,
)
from ..plan.plan import QuantizePlan
from ..plan.request import QuantizeRequest
from .stages import Session, layer_folder, shard_folder

OTHER_SHARD = "model-other.safetensors"
_ERROR_FORMULA = "|X(W - W')^T|^2 / |XW^T|^2 over all calibration tokens"


def write_final_files(journal: Journal, session: Session, number: int) -> None:
    """Write what belongs to no layer, in the format of that number."""
    plan, request = session.plan, session.request
    weight_format = plan.formats[number]
    folder = shard_folder(journal.checkpoint, plan, number)
    layers = layer_folder(journal, plan, number)
    for leftover in folder.glob(f"*{TEMPORARY_SUFFIX}"):  # of a write that was killed
        leftover.unlink()
    shards = [record["shards"][weight_format.name] for record in journal.layers]
    for written in shards:
        shard = layers / written["shard"]
        intact = shard.is_file() and (request.mock or sha256_of_file(shard) == written["sha256"])
        if not intact:
            raise BadInput(f"{shard} was changed after it was written: begin again with --restart")
    name = request.model_name or request.model.resolve().name
    if weight_format.name == "gguf":
        from ..gguf.assemble import assemble, gguf_name

        assemble(
            plan.checkpoint,
            [layers / written["shard"] for written in shards],
            folder / gguf_name(name, plan.gguf_type),
            plan.schemes,
            plan.gguf_type,
            plan.gguf_tables,
            hollow=request.mock,
        )
    else:
        _write_index(folder, plan, shards, hollow=request.mock)
    for file_name, content in plan.checkpoint.companions().items():
        write_atomically(folder / file_name, content)
    config = dict(plan.checkpoint.config)
    config["quantization_config"] = weight_format.completed_config(
        plan.config_in(weight_format), folder
    )
    write_atomically(folder / "config.json", to_json(config))
    for file_name, facts in weight_format.config_files(config["quantization_config"]).items():
        write_atomically(folder / file_name, to_json(facts))

    modules = with_parts(plan, [module for written in shards for module in written["modules"]])
    stored = {name: size for shard in shards for name, size in shard["tensors"].items()}
    parts = part_reports(plan, modules, stored)
    summary = summarise(
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
    )
    manifest = _run_facts(session, number) | {
        "summary": summary,
        **({"parts": parts} if parts else {}),
        "modules": modules,
        "files": describe_files(folder, digests=not request.mock),
    }
    write_atomically(folder / MANIFEST_NAME, to_json(manifest))
    write_atomically(folder / CARD_NAME, model_card(plan, number, manifest))


def _run_facts(session: Session, number: int) -> dict[str, Any]:
    """The head of the manifest of format `number`. It has no time and no path, so that equal runs write
    identical bytes."""
    plan, calibration, request = session.plan, session.calibration, session.request
    samples, length = calibration.token_ids.shape
    # X is what the method was calibrated on.
    error = f"{_ERROR_FORMULA}, X from the float layer behind the quantized layers before it"
    if not request.measures:
        error = "not measured"
    elif request.stats is not None:
        error = f"{_ERROR_FORMULA}, X from the float model"
    elif plan.sequential:
        error = (
            f"{_ERROR_FORMULA}, X from the layer behind the quantized linears and layers before it; "
            "on held-out tokens from the float layer behind the quantized layers before it"
        )
    source_type = plan.checkpoint.source_type
    return {
        **({"mock": True} if request.mock else {}),
        "llmopt": VERSION,
        "torch": version("torch"),
        "transformers": version("transformers"),
        "model": request.model_name or request.model.resolve().name,
        "signature": session.signature,
        "source_sha256": session.facts["source"],
        **({"dequantized_from": f"GGUF {source_type}"} if source_type else {}),
        "method": plan.method.name,
        "solver": plan.method.solver_name(plan.options.solver),
        "format": plan.formats[number].name,
        "scheme": plan.label,
        "options": _options(plan, request),
        "ignored": list(plan.ignored),
        **({} if plan.search is None else {"search": plan.search}),
        "calibration": {
            "source": calibration.source,
            "samples": samples,
            "tokens_per_sample": length,
            "held_out_samples": calibration.held_out.shape[0],
            "chat_template": calibration.conversations > 0,
            "conversations": calibration.conversations,
            "conversations_refused": calibration.refused,
            "documents": calibration.documents,
            "documents_with_bos": calibration.with_bos,
            "duplicates_dropped": calibration.duplicates,
            "tokens_by_document": calibration.lengths,
            **({"images": calibration.num_images} if calibration.num_images else {}),
            "seed": request.seed,
            "sha256": calibration.sha256,
            "compute": str(plan.compute).removeprefix("torch."),
            "device": plan.device.type,
        },
        "error": error,
    }


def _options(plan: QuantizePlan, request: QuantizeRequest) -> dict[str, Any]:
    """Options beyond method and scheme that differ from their defaults."""
    options = asdict(request.options) | {
        "asymmetric": plan.options.asymmetric,
        "overrides": list(request.overrides),
        "revert_worse": request.revert_worse,
        "allow_fallback": request.allow_fallback,
        "stored_statistics": request.stats is not None
        and request.method != AUTO,  # which runs layers
        "target_bpw": request.target_bpw,
        "target_bytes": request.target_bytes,
        "candidates": list(request.candidates),
        "kv_cache": request.kv_cache,
        "kv_cache_strategy": request.kv_cache_strategy,
        "vision": request.vision,
        "rotations": list(plan.rotations),
    }
    usual = {"kv_cache_strategy": "tensor", **asdict(MethodOptions())}
    return {
        name: value
        for name, value in options.items()
        if (value != usual[name] if name in usual else value not in (None, False, []))
    }


def _write_index(
    folder: Path, plan: QuantizePlan, shards: list[dict[str, Any]], *, hollow: bool
) -> None:
    """Write the tensors of no layer, `hollow` if the large ones are to be holes, and the weight map."""
    names = plan.checkpoint.names
    layout = {n: plan.checkpoint.entry(n) for n in names if not n.startswith(plan.layer_starts)}
    large = [name for name, entry in layout.items() if hollow and entry_bytes(entry) > HOLLOW_BYTES]

    def read_alone(name: str) -> torch.Tensor:
        plan.checkpoint.release()  # unmap the one before
        return plan.checkpoint.tensor(name)

    stream_tensors(folder / OTHER_SHARD, layout, read_alone, large)
    plan.checkpoint.release()
    weight_map = dict.fromkeys(layout, OTHER_SHARD)
    total_bytes = sum(map(entry_bytes, layout.values()))
    for written in shards:
        weight_map |= dict.fromkeys(written["tensors"], written["shard"])
        total_bytes += sum(written["tensors"].values())
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    write_atomically(folder / INDEX_NAME, to_json(index))
