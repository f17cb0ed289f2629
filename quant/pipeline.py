"""Quantize a checkpoint, one decoder layer in memory at a time, so that a kill costs one layer at most.

For each layer: learn what its linears read, choose codes, and write the finished layer to its own shard
and into the journal; see `propagation` for what the next layer then sees.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..recipes import DATA
from .calibration import Calibration, load_calibration
from .checkpoint import Checkpoint, read_json
from .durable import layout_of, write_tensors
from .errors import BadInput
from .journal import Journal, remove_work, sha256_of, sha256_of_file, work_folder
from .layer_stream import LayerStream
from .layer_work import HEAD_FAMILY, Work, quantize_tensors
from .manifest import MANIFEST_NAME
from .memory import PeakMemory
from .plan import Plan, QuantizeRequest, make_plan
from .preflight import Preflight, preflight
from .progress import Progress, Silent
from .propagation import Live, Source
from .publish import layer_folder, shard_folder, write_final_files
from .scheme import scheme_record
from .selection import HEAD

__all__ = ["QuantizeResult", "Session", "prepare", "quantize"]

_SLACK_BYTES = 16 * 2**20  # headers, tokenizer, manifest
_BUNDLED_EVALUATION = DATA / "evaluation.txt"


@dataclass(frozen=True, slots=True)
class QuantizeResult:
    """A finished checkpoint.

    Attributes:
        output: its folder; with several formats, the folder of one folder for each.
        manifest: the content of its manifest (of the first format).
        loads_in: who can read it.
        notes: choices that were made for the user.
        resumed_layers: how many layers an earlier run had finished.
        layer_seconds: what choosing the codes took, for each layer.
        preflight: what was predicted.
        peak_bytes: the most memory that the run had, beyond the process as it began.
    """

    output: Path
    manifest: dict[str, Any]
    loads_in: str
    notes: tuple[str, ...]
    resumed_layers: int
    layer_seconds: tuple[float, ...]
    preflight: Preflight
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Session:
    """A request with everything read that the work needs.

    Attributes:
        signature: digest of all that the bytes of the result depend on.
    """

    request: QuantizeRequest
    plan: Plan
    calibration: Calibration
    stream: LayerStream
    source_hashes: dict[str, str]
    signature: str
    notes: tuple[str, ...]


def prepare(request: QuantizeRequest) -> Session:
    """Check a request and read its calibration data, without writing anything.

    Raises:
        BadInput: the request cannot be done as asked.
    """
    plan = make_plan(request)
    notes = list(plan.notes)
    asked = request.num_samples // 8 if request.held_out is None else request.held_out
    calibration = load_calibration(
        request.calibration,
        _tokenizer(plan.checkpoint),
        num_samples=request.num_samples,
        seq_len=plan.seq_len,
        seed=request.seed,
        held_out=asked,
        evaluation=Path(request.evaluation) if request.evaluation else _BUNDLED_EVALUATION,
    )
    samples, length = calibration.token_ids.shape
    if (samples, length) != (request.num_samples, plan.seq_len):
        notes.append(f"note: the calibration text gives {samples} samples of {length} tokens")
    if len(calibration.held_out) < asked:
        notes.append(
            f"note: the text left gives {len(calibration.held_out)} held-out samples, not {asked}"
        )
    if calibration.duplicates:
        notes.append(f"note: {calibration.duplicates} repeated calibration texts were dropped")
    stream = LayerStream(plan.checkpoint, plan.architecture)
    if int(calibration.token_ids.max()) >= stream.vocab_size:
        raise BadInput(f"{request.model}: its tokenizer makes ids beyond the model's vocabulary")
    source_hashes = _source_hashes(plan.checkpoint)
    signature = _signature(request, plan, calibration, source_hashes)
    return Session(request, plan, calibration, stream, source_hashes, signature, tuple(notes))


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
    session = prepare(request)
    for note in session.notes:
        progress.note(note)
    expected = preflight(session)
    progress.note(expected.line())
    memory = PeakMemory()
    resumed, seconds = 0, ()
    if output.exists():
        _require_same_work(session)
        remove_work(work_folder(output))
    else:
        if request.restart:
            remove_work(work_folder(output))
        journal = Journal(work_folder(output), session.signature, torch.get_num_threads())
        resumed = len(journal.layers)
        try:
            _check_space(session, journal)
            with _threads(journal.threads):
                _quantize_layers(session, journal, progress)
            write_final_files(
                journal, session.plan, session.calibration, request, session.source_hashes
            )
            seconds = tuple(record["seconds"] for record in journal.layers)
            journal.publish(output)
        except BadInput:
            if not journal.layers:
                journal.discard()
            raise
        finally:
            journal.close()
    plan = session.plan
    return QuantizeResult(
        output=output,
        manifest=read_json(shard_folder(output, plan, 0) / MANIFEST_NAME),
        loads_in=plan.loads_in(plan.format),
        notes=session.notes,
        resumed_layers=resumed,
        layer_seconds=seconds,
        preflight=expected,
        peak_bytes=memory.bytes,
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
        "options": asdict(plan.options),
        "revert_worse": request.revert_worse,
        "formats": [weight_format.name for weight_format in plan.formats],
        "gguf_type": plan.gguf_type,
        "schemes": {name: scheme_record(scheme) for name, scheme in plan.schemes.items()},
        "ignored": plan.ignored,
        "versions": [version(name) for name in ("llmopt", "torch", "transformers")],
    }
    return sha256_of(json.dumps(facts, sort_keys=True).encode())


def _check_space(session: Session, journal: Journal) -> None:
    """Raises BadInput when the disk cannot hold the results and the hidden states of two layers."""
    plan, calibration = session.plan, session.calibration
    tokens = calibration.token_ids.numel() + calibration.held_out.numel()
    hidden_bytes = 2 * 4 * tokens * session.stream.hidden_size
    rest = plan.checkpoint.weight_bytes - plan.plain_bytes
    needed = len(plan.formats) * (plan.quantized_bytes + rest + _SLACK_BYTES) + hidden_bytes
    needed -= sum(
        shard["bytes"] for record in journal.layers for shard in record["shards"].values()
    )
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


def _require_same_work(session: Session) -> None:
    """An output beside a work folder: fine where a kill came between the last rename and the tidying up."""
    output = session.request.output
    path = shard_folder(output, session.plan, 0) / MANIFEST_NAME
    if not path.is_file() or read_json(path).get("signature") != session.signature:
        raise BadInput(f"{output} exists: remove it, or choose another folder with --output")


def _quantize_layers(session: Session, journal: Journal, progress: Progress) -> None:
    plan, stream = session.plan, session.stream
    first, total = len(journal.layers), stream.num_layers + plan.lm_head
    if first == total:
        return
    for index in range(len(plan.formats)):
        shard_folder(journal.checkpoint, plan, index).mkdir(parents=True, exist_ok=True)
        layer_folder(journal, plan, index).mkdir(exist_ok=True)
    if first:
        progress.note(f"going on after layer {first} of {stream.num_layers}")
    source = Live(stream, session.calibration, journal.hidden_path(first) if first else None)
    progress.start("quantizing", total, "layers")
    progress.advance(first)
    for index in range(first, total):
        if index < stream.num_layers:
            work = _quantize_layer(session, source, index)
        else:
            work = _quantize_head(session, source)
        record = _write_layer(plan, journal, index, work)
        if index + 1 < total:
            source.save(journal.hidden_path(index + 1))
        journal.append(record)
        journal.hidden_path(index).unlink(missing_ok=True)
        plan.checkpoint.release()
        progress.advance()
    progress.finish()


def _quantize_layer(session: Session, source: Source, index: int) -> Work:
    plan, stream = session.plan, session.stream
    family, prefix = stream.family(index), stream.prefix(index)
    tensors = stream.tensors(index)
    measured = source.measure(index, tensors)
    work = quantize_tensors(
        plan,
        family,
        prefix,
        tensors,
        source.weights(index, family.linears),
        measured,
        revert_worse=session.request.revert_worse,
    )
    source.finish(index, work)
    return work


def _quantize_head(session: Session, source: Source) -> Work:
    checkpoint = session.plan.checkpoint
    tensors = {
        f"{HEAD}.{part}": checkpoint.tensor(f"{HEAD}.{part}")
        for part in ("weight", "bias")
        if f"{HEAD}.{part}" in checkpoint
    }
    measured = source.measure_head()
    revert = session.request.revert_worse
    return quantize_tensors(
        session.plan, HEAD_FAMILY, "", tensors, None, measured, revert_worse=revert
    )


def _write_layer(plan: Plan, journal: Journal, index: int, work: Work) -> dict[str, Any]:
    """Write the shards of a layer, one for each format; the record for the journal."""
    name = f"model-layer-{index:05d}.safetensors" if work.prefix else "model-head.safetensors"
    began = time.perf_counter()
    shards = {}
    for number, weight_format in enumerate(plan.formats):
        stored, modules = work.packed(plan, weight_format)
        path = layer_folder(journal, plan, number) / name
        digest = write_tensors(path, stored, layout_of(stored))
        shards[weight_format.name] = {
            "shard": name,
            "sha256": digest,
            "bytes": path.stat().st_size,
            "tensors": {name: tensor.nbytes for name, tensor in sorted(stored.items())},
            "modules": modules,
        }
    return {
        "layer": index,
        "seconds": work.seconds + time.perf_counter() - began,
        "shards": shards,
    }
