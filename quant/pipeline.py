"""Quantize a checkpoint, one decoder layer in memory at a time, so that a kill costs one layer at most.

For each layer: run it in float on the inputs that the layers before it produce, choose codes, run it
again with the codes in place of the weights, and pass those outputs on. Later layers are thus calibrated
on what they will really see. The finished layer goes to its own shard and into the journal.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from .calibration import Calibration, load_calibration
from .checkpoint import Checkpoint, read_json
from .durable import write_durably
from .errors import BadInput
from .journal import Journal, remove_work, sha256_of, sha256_of_file, work_folder
from .layer_stream import LayerStream
from .manifest import MANIFEST_NAME, module_record
from .methods.base import LayerProblem
from .plan import Plan, QuantizeRequest, make_plan
from .progress import Progress, Silent
from .publish import write_final_files
from .scheme import scheme_record

_SLACK_BYTES = 16 * 2**20  # headers, tokenizer, manifest


@dataclass(frozen=True, slots=True)
class QuantizeResult:
    """A finished checkpoint.

    Attributes:
        output: its folder.
        manifest: the content of its manifest.
        loads_in: who can read it.
        notes: choices that were made for the user.
        resumed_layers: how many layers an earlier run had finished.
    """

    output: Path
    manifest: dict[str, Any]
    loads_in: str
    notes: tuple[str, ...]
    resumed_layers: int


def quantize(request: QuantizeRequest, progress: Progress | None = None) -> QuantizeResult:
    """Do what `request` asks, going on where an interrupted run of the same request stopped.

    Raises:
        BadInput: the request cannot be done as asked, or the disk is full. Layers that were finished
            stay in the work folder; without any, nothing stays.
    """
    progress = progress or Silent()
    output = request.output
    if output.exists() and not work_folder(output).exists():
        raise BadInput(f"{output} exists: remove it, or choose another folder with --output")
    plan = make_plan(request)
    for note in plan.notes:
        progress.note(note)
    calibration = load_calibration(
        request.calibration,
        _tokenizer(plan.checkpoint),
        num_samples=request.num_samples,
        seq_len=plan.seq_len,
        seed=request.seed,
    )
    samples, length = calibration.token_ids.shape
    if (samples, length) != (request.num_samples, plan.seq_len):
        progress.note(f"note: the calibration text gives {samples} samples of {length} tokens")
    stream = LayerStream(plan.checkpoint, plan.family)
    if int(calibration.token_ids.max()) >= stream.vocab_size:
        raise BadInput(f"{request.model}: its tokenizer makes ids beyond the model's vocabulary")
    source_hashes = _source_hashes(plan.checkpoint)
    signature = _signature(request, plan, calibration, source_hashes)
    resumed = 0
    if output.exists():
        _require_same_work(output, signature)
        remove_work(work_folder(output))
    else:
        if request.restart:
            remove_work(work_folder(output))
        journal = Journal(work_folder(output), signature, torch.get_num_threads())
        resumed = len(journal.layers)
        try:
            _check_space(plan, calibration.token_ids.numel() * stream.hidden_size, journal)
            with _threads(journal.threads):
                _quantize_layers(stream, plan, calibration, journal, progress)
            write_final_files(journal, plan, calibration, request, source_hashes)
            journal.publish(output)
        except BadInput:
            if not journal.layers:
                journal.discard()
            raise
        finally:
            journal.close()
    return QuantizeResult(
        output=output,
        manifest=read_json(output / MANIFEST_NAME),
        loads_in=plan.loads_in,
        notes=plan.notes,
        resumed_layers=resumed,
    )


def _tokenizer(checkpoint: Checkpoint) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(checkpoint.folder)
    except Exception as error:  # a missing or broken file fails in many ways in there
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadInput(f"{checkpoint.folder} has no usable tokenizer: {reason}") from error


def _source_hashes(checkpoint: Checkpoint) -> dict[str, str]:
    """Digests of the config and of every weight file."""
    hashes = {"config.json": sha256_of((checkpoint.folder / "config.json").read_bytes())}
    for shard in sorted(set(checkpoint.shard_of.values())):
        hashes[shard] = sha256_of_file(checkpoint.folder / shard)
    return hashes


def _signature(
    request: QuantizeRequest, plan: Plan, calibration: Calibration, source_hashes: dict[str, str]
) -> str:
    """One digest of everything that the bytes of the result depend on."""
    facts = {
        "source": source_hashes,
        "model_name": request.model_name,
        "calibration": calibration.sha256,
        "calibration_source": calibration.source,
        "seed": request.seed,
        "method": plan.method.name,
        "format": plan.format.name,
        "schemes": {name: scheme_record(scheme) for name, scheme in plan.schemes.items()},
        "ignored": plan.ignored,
        "versions": [version(name) for name in ("llmopt", "torch", "transformers")],
    }
    return sha256_of(json.dumps(facts, sort_keys=True).encode())


def _check_space(plan: Plan, num_hidden_values: int, journal: Journal) -> None:
    """Raises BadInput when the disk cannot hold the result and the hidden states of two layers."""
    hidden_bytes = 2 * 4 * num_hidden_values
    rest = plan.checkpoint.weight_bytes - plan.plain_bytes
    needed = plan.quantized_bytes + rest + hidden_bytes + _SLACK_BYTES
    needed -= sum(record["bytes"] for record in journal.layers)
    free = shutil.disk_usage(journal.folder).free
    if free < needed:
        raise BadInput(
            f"no space for the result: about {needed / 2**30:.2f} GiB are needed beside "
            f"{journal.folder}, {free / 2**30:.2f} GiB are free"
        )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Sums depend on the thread count in their last bit, so a resumed run takes that of the first."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _require_same_work(output: Path, signature: str) -> None:
    """An output beside a work folder: fine where a kill came between the last rename and the tidying up."""
    path = output / MANIFEST_NAME
    if not path.is_file() or read_json(path).get("signature") != signature:
        raise BadInput(f"{output} exists: remove it, or choose another folder with --output")


def _quantize_layers(
    stream: LayerStream,
    plan: Plan,
    calibration: Calibration,
    journal: Journal,
    progress: Progress,
) -> None:
    first = len(journal.layers)
    if first == stream.num_layers:
        return
    journal.checkpoint.mkdir(exist_ok=True)
    stream.prepare(calibration.token_ids)
    if first == 0:
        hidden = stream.embed(calibration.token_ids)
    else:
        progress.note(f"going on after layer {first} of {stream.num_layers}")
        hidden = load_file(journal.hidden_path(first))["hidden"]
    progress.start("quantizing", stream.num_layers, "layers")
    progress.advance(first)
    for index in range(first, stream.num_layers):
        record, hidden = _quantize_layer(stream, plan, journal, index, hidden)
        if index + 1 < stream.num_layers:
            write_durably(journal.hidden_path(index + 1), save({"hidden": hidden}))
        journal.append(record)
        journal.hidden_path(index).unlink(missing_ok=True)
        progress.advance()
    progress.finish()


def _quantize_layer(
    stream: LayerStream, plan: Plan, journal: Journal, index: int, hidden: torch.Tensor
) -> tuple[dict[str, Any], torch.Tensor]:
    """Quantize one layer and write its shard; its record, and the inputs of the next layer."""
    prefix = stream.prefix(index)
    tensors = stream.tensors(index)
    stream.load(index, tensors)
    statistics = stream.measure(index, hidden)
    linears = [name for name in plan.family.linears if f"{prefix}.{name}" in plan.modules]
    schemes = {name: plan.schemes[f"{prefix}.{name}"] for name in linears}
    dtype = tensors[f"{plan.family.linears[0]}.weight"].dtype
    with torch.no_grad():
        result = plan.method.quantize_layer(
            LayerProblem(
                prefix=prefix,
                family=plan.family,
                schemes=schemes,
                scale_dtypes={
                    name: plan.format.scale_dtype(dtype, scheme) for name, scheme in schemes.items()
                },
                weights={name: tensors[f"{name}.weight"].to(torch.float32) for name in linears},
                statistics={name: statistics[name] for name in linears},
                norms={
                    name: tensors[f"{name}.weight"]
                    for name in {fold.source for fold in plan.family.folds}
                    - set(plan.family.linears)
                },
                with_bias=frozenset(name for name in linears if f"{name}.bias" in tensors),
            )
        )
    for name, norm in result.norms.items():
        tensors[f"{name}.weight"] = norm
    stored = {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}
    for name, quantized in result.weights.items():
        del stored[f"{prefix}.{name}.weight"]
        stored |= plan.format.pack(f"{prefix}.{name}", quantized)
        tensors[f"{name}.weight"] = quantized.dequantize()
    stream.load(index, tensors)
    outputs = stream.run(index, hidden)
    stream.unload(index)
    if not bool(torch.isfinite(outputs).all()):
        raise BadInput(f"{prefix} gives NaN or infinite outputs: the checkpoint is damaged")

    shard = f"model-layer-{index:05d}.safetensors"
    data = save({name: stored[name].contiguous() for name in sorted(stored)}, {"format": "pt"})
    write_durably(journal.checkpoint / shard, data)
    record = {
        "layer": index,
        "shard": shard,
        "sha256": sha256_of(data),
        "bytes": len(data),
        "tensors": {name: tensor.nbytes for name, tensor in sorted(stored.items())},
        "modules": [
            module_record(report, tensor)
            for report, tensor in zip(result.reports, result.weights.values(), strict=True)
        ],
    }
    return record, outputs
