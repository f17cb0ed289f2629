"""Preparing a session: plan, calibration data, and a signature of all inputs."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..base.errors import BadInput
from ..base.option import INT8_CACHE
from ..base.progress import Progress, Silent
from ..kinds.registry import scheme_record
from ..methods.registry import AUTO, AUTO_METHOD
from ..model.checkpoint import Checkpoint
from ..plan.journal import sha256_of, sha256_of_file, weight_digests
from ..plan.plan import QuantizePlan, make_plan
from ..plan.request import QuantizeRequest, searches
from ..stream.calibration import Calibration, no_calibration
from ..stream.layer_stream import LayerStream
from .cached_calibration import StatisticsFolder
from .calibrate import calibration_of
from .candidates import search_of
from .mixed_precision import mixed_plan
from .sensitivity import Sensitivities
from .stages import Session, of_images


def prepare(request: QuantizeRequest, progress: Progress | None = None) -> Session:
    """Check a request and read its calibration data. Nothing is written, except by method `auto`, which
    measures the model's sensitivity.

    Raises:
        BadInput: the request cannot be done as asked.
    """
    progress = progress or Silent()
    plan = make_plan(_planned(request))
    if not request.errors:
        _check_data_free(plan)
    staged = plan.feeds_back and plan.options.true_sequential
    if plan.options.asymmetric and (request.stats is not None or not staged):
        raise BadInput(
            "--asymmetric-calibration compares the layers before with the float model's: leave out --stats "
            "and --no-true-sequential"
        )
    if plan.options.judge == "layer" and request.stats is not None:
        raise BadInput("--judge layer runs the layers themselves: leave --stats out")
    if plan.blockwise and request.stats is not None:
        raise BadInput(
            f"--stats: {plan.method.name} runs the layers themselves: leave the option out"
        )
    notes: list[str] = []
    if request.kv_cache == INT8_CACHE:
        notes.append(
            "note: an int8 KV cache has its scales from the server, per token and head, and none are stored: "
            "serve with --kv-cache-dtype int8_per_token_head (vLLM) or int8 (llmopt)"
        )
    calibration = calibration_of(request, plan, notes) if request.errors else no_calibration()
    stream = LayerStream(plan.checkpoint, plan.architecture, plan.compute, plan.device)
    tower = plan.vision
    vision = tower and LayerStream(plan.checkpoint, tower, plan.compute, plan.device)
    if vision is not None and request.errors:
        of_images(calibration)
    ids = calibration.token_ids
    if ids.numel() and int(ids.max()) >= stream.vocab_size:
        raise BadInput(f"{request.model}: its tokenizer makes ids beyond the model's vocabulary")
    source_hashes = _source_hashes(plan.checkpoint)
    measured = {
        "source": source_hashes,
        "calibration": calibration.sha256,
        "compute": str(plan.compute),
        "device": plan.device.type,
        "rotated": [*plan.rotations, request.seed] if plan.rotations else [],
        "versions": [version(name) for name in ("llmopt", "torch", "transformers")],
    }
    statistics = None
    if request.stats is not None:
        statistics = StatisticsFolder(request.stats, _digest(measured))
    if searches(request):
        plan = _searched(request, plan, stream, calibration, statistics, measured, progress)
    imatrix = request.imatrix
    facts = measured | {
        "errors": request.errors,
        "model_name": request.model_name,
        "calibration_source": calibration.source,
        "seed": request.seed,
        "method": plan.method.name,
        "options": asdict(plan.options),
        "revert_worse": request.revert_worse,
        "stored_statistics": statistics is not None,
        "formats": [weight_format.name for weight_format in plan.formats],
        "gguf_type": plan.gguf_type,
        "kv_cache": [plan.kv_cache, plan.kv_cache_strategy],
        "imatrix": sha256_of_file(imatrix) if imatrix is not None and imatrix.is_file() else None,
        "rotations": list(plan.rotations),
        "vision": request.vision,
        "schemes": {name: scheme_record(scheme) for name, scheme in plan.schemes.items()},
        "ignored": plan.ignored,
    }
    return Session(
        request=request,
        plan=plan,
        calibration=calibration,
        stream=stream,
        source_hashes=source_hashes,
        signature=_digest(facts),
        statistics=statistics,
        notes=(*plan.notes, *notes),
        vision=vision,
    )


def _searched(
    request: QuantizeRequest,
    plan: QuantizePlan,
    stream: LayerStream,
    calibration: Calibration,
    stored: StatisticsFolder | None,
    measured: dict[str, Any],
    progress: Progress,
) -> QuantizePlan:
    """The plan with the schemes that `auto` chooses, by `--stats` where they are given, or else by statistics
    behind layers that are rounded already, which are kept beside the output until the run is done."""
    search = search_of(plan, request.target_bpw, request.target_bytes)
    folder, replaced = stored, None
    if folder is None:
        path = statistics_path(request)
        assert path is not None
        uniform = {name: scheme_record(s) for name, s in search.schemes[search.uniform].items()}
        folder = StatisticsFolder(path, _digest(measured | {"behind": uniform}))
        replaced = search.round_uniform
    if not folder.complete:
        kv = plan.kv_cache is not None
        folder.measure(stream, calibration, progress, head=plan.lm_head, kv=kv, replaced=replaced)
    sensitivities = Sensitivities(folder.folder)
    if not sensitivities.complete:
        sensitivities.measure(stream, *calibration.samples, progress)
    held_out = bool(len(calibration.held_out))
    checked = calibration.held_out_samples if held_out else calibration.samples
    return mixed_plan(search, sensitivities, folder, stream, *checked, progress)


def _check_data_free(plan: QuantizePlan) -> None:
    """Raises BadInput for `--no-errors` where a scheme needs the calibration data; see `request.request`."""
    activations = [scheme.activations for scheme in plan.schemes.values()]
    if any(a and not a.dynamic for a in activations):
        raise BadInput("--no-errors: static activation scales are measured: leave one of them out")


def statistics_path(request: QuantizeRequest) -> Path | None:
    """The statistics folder: `request.stats`, or beside the output where widths are searched."""
    if request.stats is None and searches(request):
        return request.output.with_name(request.output.name + ".statistics")
    return request.stats


def _planned(request: QuantizeRequest) -> QuantizeRequest:
    """The request itself; for `auto`, the base request whose bits and groups are varied."""
    if request.method != AUTO:
        return request
    return replace(
        request,
        method=AUTO_METHOD,
        format=request.format or "compressed-tensors",
        target_bpw=None,
        target_bytes=None,
    )


def _digest(facts: dict[str, Any]) -> str:
    return sha256_of(json.dumps(facts, sort_keys=True).encode())


def _source_hashes(checkpoint: Checkpoint) -> dict[str, str]:
    """Digests of the config, which a GGUF file need not have beside it, and of every weight file."""
    config = "config.json"
    path = checkpoint.folder / config
    digests = {config: sha256_of_file(path)} if path.is_file() else {}
    return digests | weight_digests(checkpoint)
