"""Layer-by-layer quantization of a checkpoint: one decoder layer in memory, resumable after each.

For each layer: measure its inputs, quantize, write its shard, and append to the journal; see
`online_calibration` for the inputs of the next layer.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...base.atomic_io import in_the_way, write_tensors
from ...base.errors import BadInput
from ...base.progress import Progress, ProgressUpdate, Silent, as_progress
from ..base import workers
from ..base.device import PeakMemory, give_back
from ..model.checkpoint import expert_of, read_json
from ..plan.journal import Journal, digest_of, remove_work
from ..plan.manifest import MANIFEST_NAME
from ..plan.plan import QuantizePlan
from ..plan.request import QuantizeRequest, check_free, searches, work_folder
from ..plan.selection import HEAD
from ..stream.calibration import Calibration
from ..stream.calls import KvRanges
from ..stream.layer_stream import LayerStream
from .estimate import LayerTime, time_layer
from .model_free import free_module, hollow_names, mock_layer
from .online_calibration import NoCalibration
from .preflight import Preflight, preflight
from .prepare import outline, prepare, statistics_path
from .publish import write_final_files
from .quantized_layer import (
    HEAD_FAMILY,
    QuantizedLayer,
    direct_layer,
    quantize_tensors,
)
from .stages import LayerProgress, Session, Stage, layer_folder, shard_folder, source_of, stages_of

if TYPE_CHECKING:
    from ..gguf.imatrix import ImportanceMatrix

__all__ = ["QuantizeResult", "Session", "prepare", "quantize"]

_SLACK_BYTES = 16 * 2**20  # headers, tokenizer, manifest


@dataclass(frozen=True, slots=True)
class QuantizeResult:
    """A finished checkpoint.

    Attributes:
        output: folder of the checkpoint; with several formats, the parent of one folder each.
        manifest: content of the manifest (of the first format).
        notes: choices that were made for the user.
        resumed_layers: number of layers that an earlier run had finished.
        layer_seconds: quantization time of each layer.
        peak_bytes: peak memory of the run, beyond the start of the process.
    """

    output: Path
    manifest: dict[str, Any]
    loads_in: str
    notes: tuple[str, ...]
    resumed_layers: int
    layer_seconds: tuple[float, ...]
    preflight: Preflight
    peak_bytes: int


def quantize(
    request: QuantizeRequest, progress: Progress | Callable[[ProgressUpdate], None] | None = None
) -> QuantizeResult:
    """Quantize a checkpoint, resuming an interrupted run of the same request.

    Raises:
        BadInput: the request cannot be done as asked, or the disk is full. Finished layers
            stay in the work folder; without any, it is removed.
    """
    with workers.one_of_many():
        return _quantize(request, as_progress(progress) if workers.is_first() else Silent())


def predict(
    request: QuantizeRequest, progress: Progress, number: int | None = None, *, timed: bool = False
) -> Preflight:
    """Predict the run of a request, by so many workers, from config and headers; a search is carried out.
    With `timed` its data are read and a layer is quantized. BadInput where the run cannot be done. Writes
    nothing."""
    with workers.one_of_many():
        progress = progress if workers.is_first() else Silent()
        is_read = timed or searches(request)
        session = prepare(request, progress) if is_read else outline(request)
        for note in session.notes:
            progress.note(note)
        layer = workers.first_alone(lambda: time_layer(session, progress)) if timed else None
        return _predicted(session, number, layer)


def _predicted(
    session: Session, number: int | None = None, layer: LayerTime | None = None
) -> Preflight:
    number = workers.count() if workers.together() else number
    return workers.first_alone(lambda: preflight(session, number, layer))


def _quantize(request: QuantizeRequest, progress: Progress) -> QuantizeResult:
    output = request.output
    check_free(output)
    session = prepare(request, progress)
    if request.imatrix is not None and not request.imatrix.exists() and not request.mock:
        from ..gguf.imatrix import write_imatrix

        path, stream, calibration = request.imatrix, session.stream, session.calibration
        matrix = workers.first_alone(lambda: measure_importance(stream, calibration, progress))
        if workers.is_first():
            write_imatrix(path, matrix)
        workers.meet()
        progress.note(f"note: importance of {len(matrix.means)} tensors is in {path}")
        session = prepare(request, progress)
    for note in session.notes:
        progress.note(note)
    expected = _predicted(session)
    if not request.mock:
        progress.note(expected.line())
    give_back()
    memory = PeakMemory()
    resumed, seconds = 0, ()
    if output.exists():  # a kill came between the final rename and the cleanup
        path = shard_folder(output, session.plan, 0) / MANIFEST_NAME
        if not path.is_file() or read_json(path).get("signature") != session.signature:
            raise in_the_way(output)
        if workers.is_first():
            remove_work(work_folder(output))
    else:
        resumed, seconds = _carried_out(session, expected, progress, memory)
    workers.meet()
    plan = session.plan
    return QuantizeResult(
        output=output,
        manifest=read_json(shard_folder(output, plan, 0) / MANIFEST_NAME),
        loads_in=expected.loads_in,
        notes=session.notes,
        resumed_layers=resumed,
        layer_seconds=seconds,
        preflight=expected,
        peak_bytes=memory.bytes,
    )


def _carried_out(
    session: Session, expected: Preflight, progress: Progress, memory: PeakMemory
) -> tuple[int, tuple[float, ...]]:
    """Quantize and publish; the number of layers that were finished before, and seconds of each layer."""
    request, journal = session.request, _journal(session)
    resumed, threads = len(journal.layers), torch.get_num_threads()
    try:
        if workers.is_first() and not request.mock:
            _check_space(session, journal, expected)
        # Sums depend on the thread count in the last bit: a resumed run uses that of the first run.
        torch.set_num_threads(journal.threads)
        _quantize_layers(session, journal, progress, memory)
        seconds = tuple(record["seconds"] for record in journal.layers)
        if workers.is_first():
            for number in range(len(session.plan.formats)):
                write_final_files(journal, session, number)
            journal.publish(request.output)
            if request.stats is None and (left := statistics_path(request)) is not None:
                shutil.rmtree(left, ignore_errors=True)
    except BadInput:
        if not journal.layers and workers.is_first():
            journal.discard()
        raise
    finally:
        torch.set_num_threads(threads)
        journal.close()
    return resumed, seconds


def _journal(session: Session) -> Journal:
    """The journal, which the first worker opens and the others follow."""
    folder, journal = work_folder(session.request.output), None
    if workers.is_first():
        if session.request.restart:
            remove_work(folder)
        parts = {name: digest_of({name: fact})[:8] for name, fact in session.facts.items()}
        journal = Journal(folder, session.signature, torch.get_num_threads(), parts)
    followed = workers.given(journal and journal.followed(), 0)
    assert followed is not None
    return journal or followed


def _check_space(session: Session, journal: Journal, expected: Preflight) -> None:
    """Raises BadInput when the disk cannot hold the results and the hidden states of two layers. A GGUF file
    is written next to its layers."""
    layers = sum(kind.bytes for kind in expected.quantized)
    needed = 2 * 4 * session.calibration.num_tokens * session.stream.hidden_size
    for name, size in expected.file_bytes.items():
        needed += size + _SLACK_BYTES + (layers if name == "gguf" else 0)
    for record in journal.layers:
        needed -= sum(shard["bytes"] for shard in record["shards"].values())
    free = shutil.disk_usage(journal.folder).free
    if free < needed:
        raise BadInput(
            f"no space for the result: about {needed / 2**30:.2f} GiB are needed next to "
            f"{journal.folder}, {free / 2**30:.2f} GiB are free"
        )


def _quantize_layers(
    session: Session, journal: Journal, progress: Progress, memory: PeakMemory
) -> None:
    plan, stages = session.plan, stages_of(session)
    last = stages[-1].end
    first, total = len(journal.layers), last + plan.lm_head
    if first:
        progress.note(f"going on after layer {min(first, last)} of {last}")
    if first == total:
        return
    within = LayerProgress(progress)
    for stage in stages:
        stage.stream.step = within.step
    solve = partial(
        quantize_tensors,
        plan,
        step=within.step,
        revert_worse=session.request.revert_worse,
        allow_fallback=session.request.allow_fallback,
    )
    for index in range(len(plan.formats)):
        shard_folder(journal.checkpoint, plan, index).mkdir(parents=True, exist_ok=True)
        layer_folder(journal, plan, index).mkdir(exist_ok=True)
    # The output projection belongs to the last stage.
    stage = next((stage for stage in stages if first < stage.end), stages[-1])
    saved = journal.hidden_path(first) if first > stage.start else None
    source = source_of(session, stage, journal, saved, progress)
    progress.start("quantizing", total, "layers")
    progress.advance(first)
    for index in range(first, total):
        within.begin()
        if index == stage.end and stage is not stages[-1]:
            stage = stages[1]
            source = source_of(session, stage, journal, None, progress)
        if session.request.mock:
            work = mock_layer(plan, stage, index - stage.start)
        elif session.request.model_free:
            pack = partial(free_module, journal.folder)
            work = direct_layer(plan, stage.stream, index, pack, hollow=False)
        elif index < stage.end:
            work = _quantize_layer(plan, stage, source, index - stage.start, solve)
        else:
            tensors = {
                name: plan.checkpoint.tensor(name)
                for name in (f"{HEAD}.weight", f"{HEAD}.bias")
                if name in plan.checkpoint
            }
            work = solve(HEAD_FAMILY, "", tensors, None, source.measure_head())
        write = partial(_write_layer, plan, journal, index, work)
        record = workers.done_by(index % workers.count(), write)  # they take turns
        if index + 1 < total and (index + 1 != stage.end or stage is stages[-1]):
            source.save(journal.hidden_path(index + 1))
        workers.meet()  # with all states after the layer on disk
        journal.append(record)
        journal.forget_hidden(index)
        del work, write  # their references would keep the layer's pages mapped
        plan.checkpoint.release()
        give_back()
        shards = (next(iter(record["shards"].values())) for record in journal.layers)
        errors = [module["error"] for shard in shards for module in shard["modules"]]
        known = None not in errors
        error = f"error {sum(errors) / max(1, len(errors)):.2e}, " if known else ""
        progress.status(f"{error}{memory.bytes / 2**20:.0f} MiB")
        within.end()
    progress.finish()


def _quantize_layer(
    plan: QuantizePlan,
    stage: Stage,
    source: NoCalibration,
    index: int,
    solve: Callable[..., QuantizedLayer],
) -> QuantizedLayer:
    """Quantize a layer of a stage, by its number there."""
    stream = stage.stream
    family, prefix = stream.family(index), stream.prefix(index)
    tensors = stream.tensors(index)
    measured = source.measure(index, tensors)
    work = solve(family, prefix, tensors, source.weights(index, family.linears), measured)
    ranges = source.finish(index, work.result)
    if plan.kv_cache is not None and not stage.vision:
        ranges = (ranges or measured.kv_ranges or KvRanges()).checked(prefix)
        work.others.update(ranges.scales(plan.kv_cache, plan.kv_cache_strategy))
    return work


def _write_layer(
    plan: QuantizePlan, journal: Journal, index: int, work: QuantizedLayer
) -> dict[str, Any]:
    """Write the shards of a layer, one for each format; the record for the journal."""
    towers = 0 if plan.vision is None else len(plan.vision.layers)
    kind, number = ("vision", index) if index < towers else ("layer", index - towers)
    name = f"model-{kind}-{number:05d}.safetensors" if work.prefix else "model-head.safetensors"
    began = time.perf_counter()
    shards = {}
    for number, weight_format in enumerate(plan.formats):
        stored, modules = work.packed(plan, weight_format)
        path = layer_folder(journal, plan, number) / name
        hollow = hollow_names(stored, plan.modules) if work.hollow else ()
        digest = write_tensors(path, stored, hollow)
        shards[weight_format.name] = {
            "shard": name,
            "sha256": digest,
            "bytes": path.stat().st_size,
            "tensors": {name: tensor.nbytes for name, tensor in sorted(stored.items())},
            "modules": modules,
        }
    return {"layer": index, "seconds": work.seconds + time.perf_counter() - began, "shards": shards}


def measure_importance(
    stream: LayerStream, calibration: Calibration, progress: Progress
) -> ImportanceMatrix:
    """Run the calibration texts through the model, one layer in memory at a time."""
    from ..gguf.architecture import gguf_architecture, to_gguf
    from ..gguf.imatrix import ImportanceMatrix as Matrix

    ids = calibration.token_ids
    stream.prepare(ids)
    states = stream.embed(ids)
    # Mean squares and tokens of each tensor's matrices, by the number of the expert.
    seen: dict[str, dict[int, tuple[torch.Tensor, int]]] = {}
    architecture = gguf_architecture(stream.checkpoint.config)
    progress.start("importance", stream.num_layers, "layers")
    for index in stream.loaded(range(stream.num_layers), progress):
        for name, statistics in stream.measure(index, states).items():
            module = f"{stream.prefix(index)}.{name}"
            if (tensor := to_gguf(module, architecture)) is not None:
                count = statistics.num_tokens
                mean = statistics.gram.diagonal() / max(count, 1)
                # An expert without tokens: equal importance, as in llama.cpp.
                mean = mean.clone() if count else torch.ones_like(mean)
                experts = seen.setdefault(f"{tensor}.weight", {})
                experts[expert_of(module) or 0] = (mean, count)
        states = stream.run(index, states, in_place=True)
    progress.finish()
    ordered = {name: [by[number] for number in sorted(by)] for name, by in seen.items()}
    return Matrix(
        means={name: torch.stack([mean for mean, _ in rows]) for name, rows in ordered.items()},
        counts={
            name: torch.tensor([float(count) for _, count in rows])
            for name, rows in ordered.items()
        },
        dataset=calibration.source,
        chunk_size=ids.shape[1],
        chunks=ids.shape[0],
    )
