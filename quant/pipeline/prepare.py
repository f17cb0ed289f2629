"""Preparing a session: plan, calibration data (text, or image-text pairs for a model that reads images), and
a signature of all inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...base.errors import BadInput
from ...base.progress import Progress, Silent
from ...base.version import VERSION
from ...recipes import DATA
from ..base import workers
from ..base.device import HOST
from ..base.lanes import LANES
from ..base.scheme import INT8_CACHE
from ..kinds.registry import scheme_record
from ..methods.registry import AUTO, AUTO_METHOD, METHODS
from ..plan.journal import digest_of, sha256_of_file, weight_digests
from ..plan.plan import QuantizePlan, make_plan
from ..plan.request import QuantizeRequest, require_target, searches
from ..source.load_processor import has_processor, load_processor, load_tokenizer
from ..stream.calibration import Calibration, Images, load_calibration, no_calibration
from ..stream.layer_stream import LayerStream
from ..stream.sources import (
    BUNDLED_SAMPLES,
    CPU_SAMPLES,
    MIXED,
    PICTURES,
    bundled_text,
    is_bundled,
    read_documents,
)
from .cached_calibration import Replaced, StatisticsFolder, is_measured
from .stages import Session, of_images

if TYPE_CHECKING:
    from .candidates import Search
    from .mixed_precision import Lane

BUNDLED_EVALUATION = DATA / "evaluation.txt"
SEARCH_TOKENS, SEARCH_TOKENS_PER_INPUT = 16384, 4
"""Calibration tokens that a search compares kinds by, at least and for each input of the widest linear. The
codes of the chosen kinds are solved with all samples."""


def prepare(request: QuantizeRequest, progress: Progress | None = None) -> Session:
    """Check a request and read its calibration data; BadInput where it cannot be done as asked. Nothing is
    written, except by method `auto`, which measures the model's sensitivity."""
    if searches(request):
        require_target(request)
    session = _begin(request)
    plan, statistics, imatrix = session.plan, session.statistics, request.imatrix
    if searches(request):
        plan = workers.one_by_one(lambda: _searched(session, progress or Silent()))
    if request.method == AUTO:
        # AWQ's scales are folded, and the codes aim at the float model's outputs after the quantized layers,
        # which are run: both lower every linear's error. The search, which compares kinds, does without, and
        # so do codes with --no-true-sequential, which are solved by the statistics of the search.
        options = replace(plan.options, solver=AUTO_METHOD)
        if request.options.asymmetric is None:
            options = replace(options, asymmetric=options.true_sequential and not request.vision)
        method = METHODS["awq"].with_solver(AUTO_METHOD)
        plan = replace(plan, method=method, options=options)
        statistics = None if options.true_sequential else statistics
    facts = session.facts | {
        "errors": request.errors,
        **{name: True for name in ("mock", "model_free") if getattr(request, name)},
        "model_name": request.model_name,
        "calibration_source": session.calibration.source,
        "seed": request.seed,
        "method": plan.method.name,
        "options": asdict(plan.options),
        "revert_worse": request.revert_worse,
        "stored_statistics": statistics is not None,
        "formats": [weight_format.name for weight_format in plan.formats],
        "gguf_type": plan.gguf_type,
        "gguf_tables": dict(plan.gguf_tables),
        "kv_cache": [plan.kv_cache, plan.kv_cache_strategy],
        "imatrix": sha256_of_file(imatrix) if imatrix is not None and imatrix.is_file() else None,
        "rotations": list(plan.rotations),
        "vision": request.vision,
        "schemes": {name: scheme_record(scheme) for name, scheme in plan.schemes.items()},
        "ignored": plan.ignored,
    }
    notes = (*plan.notes, *session.notes)
    return replace(session, plan=plan, notes=notes, facts=facts, statistics=statistics)


def outline(request: QuantizeRequest) -> Session:
    """The session of a request that searches nothing, from config and headers alone: its samples have their
    number and length, and no text and no weight is read. BadInput where it cannot be done as asked."""
    plan = _planned(request)
    calibration = no_calibration()
    if request.errors:
        samples, held_out = (
            torch.empty(count, plan.seq_len, dtype=torch.int64, device="meta")
            for count in _sample_counts(request, plan)
        )
        calibration = replace(calibration, token_ids=samples, held_out=held_out)
    notes = list(plan.notes)
    if request.errors and request.calibration is None and _may_use_pictures(plan):
        notes.append(
            "note: memory is without the images of calibration samples, which --time counts"
        )
    return _session(request, plan, calibration, notes)


def _session(
    request: QuantizeRequest, plan: QuantizePlan, calibration: Calibration, notes: list[str]
) -> Session:
    """The session of a plan, still without facts and statistics; appends to its notes."""
    if request.kv_cache == INT8_CACHE:
        notes.append(
            "note: an int8 KV cache has its scales from the server, per token and head, and none are stored: "
            "serve with --kv-cache-dtype int8_per_token_head (vLLM) or int8 (llmopt)"
        )
    stream = LayerStream(plan.checkpoint, plan.architecture, plan.compute, plan.device)
    tower = plan.vision
    vision = tower and LayerStream(plan.checkpoint, tower, plan.compute, plan.device)
    return Session(request, plan, calibration, tuple(notes), stream, vision)


def _planned(request: QuantizeRequest) -> QuantizePlan:
    """The plan of a request, or of the base request that a search varies; BadInput as `make_plan`."""
    planned = request
    if request.method == AUTO:  # bits and groups of a base request are varied
        planned = replace(
            request,
            method=AUTO_METHOD,
            format=request.format or "compressed-tensors",
            target_bpw=None,
            target_bytes=None,
            candidates=(),
        )
    plan = make_plan(planned)
    workers.join(request.device)
    _check_calibration(request, plan)
    return plan


def _begin(request: QuantizeRequest) -> Session:
    """A checked request with its calibration data, still with the facts of model and data alone, by which
    statistics are told apart."""
    plan = _planned(request)
    notes: list[str] = []
    calibration = calibration_of(request, plan, notes) if request.measures else no_calibration()
    session = _session(request, plan, calibration, notes)
    if session.vision is not None and request.measures:
        of_images(calibration)
    ids = calibration.token_ids
    if ids.numel() and int(ids.max()) >= session.stream.vocab_size:
        raise BadInput(f"{request.model}: its tokenizer makes ids beyond the model's vocabulary")
    config = plan.checkpoint.folder / "config.json"  # a GGUF file need not have one
    source_hashes = {config.name: sha256_of_file(config)} if config.is_file() else {}
    if not request.mock:
        source_hashes |= weight_digests(plan.checkpoint)
    facts = {
        "source": source_hashes,
        "calibration": calibration.sha256,
        "compute": str(plan.compute),
        "device": plan.device.type,
        "rotated": [*plan.rotations, request.seed] if plan.rotations else [],
        "versions": [VERSION, version("torch"), version("transformers")],
    }
    if workers.together():
        facts["lanes"] = LANES
    stats = None if request.mock else request.stats
    if request.method == AUTO or stats is not None:
        few = len(_searched_samples(plan, calibration).token_ids)
        searched = facts | ({"searched_samples": few} if few < len(ids) else {})
        # A search measures fewer samples, which serve any method.
        if request.method == AUTO:
            facts = searched
        elif searched != facts and stats is not None and is_measured(stats, digest_of(searched)):
            facts = searched
            note = f"note: --stats are those of a search, of {few} of the {len(ids)} samples"
            session = replace(session, notes=(*session.notes, note))
    statistics = None if stats is None else StatisticsFolder(stats, digest_of(facts))
    return replace(session, facts=facts, statistics=statistics)


def _check_calibration(request: QuantizeRequest, plan: QuantizePlan) -> None:
    """Raises BadInput for options that need other calibration than was asked for."""
    activations = [scheme.activations for scheme in plan.schemes.values()]
    if not request.errors and any(a and not a.dynamic for a in activations):
        raise BadInput("--no-errors: static activation scales are measured: leave one of them out")
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
    if workers.is_worker() and request.vision:
        raise BadInput("--quantize-vision is for one process: leave --nproc out")


def _searched(begun: Session, progress: Progress) -> QuantizePlan:
    """The plan with the schemes that `auto` chooses, by `--stats` where they are given, or else by statistics
    after layers that are rounded already, which are kept next to the output until the run is done."""
    from .candidates import search_of
    from .mixed_precision import mixed_plan

    request = begun.request
    search = search_of(begun.plan, request.target_bpw, request.target_bytes, request.candidates)
    folder, replaced = begun.statistics, None
    if folder is None:
        path = statistics_path(request)
        assert path is not None
        uniform = {name: scheme_record(s) for name, s in search.schemes[search.uniform].items()}
        folder = StatisticsFolder(path, digest_of(begun.facts | {"behind": uniform}))
        replaced = search.round_uniform
    return mixed_plan(_lane(begun, search, folder, progress, replaced=replaced), progress)


def search_fronts(
    requests: Sequence[QuantizeRequest], progress: Progress | None = None
) -> list[Lane]:
    """The candidates of several file formats with their costs, measured once for all requests, which have one
    `stats` folder and no target. `quantize` with `Lane.target_bytes` of a mixture writes that mixture."""
    from .candidates import search_of

    progress = progress or Silent()
    all_begun = [_begin(request) for request in requests]
    kv = any(begun.plan.kv_cache is not None for begun in all_begun)
    head = any(begun.plan.lm_head for begun in all_begun)
    lanes = []
    for begun in all_begun:
        if begun.statistics is None:
            raise BadInput(
                "a search over several bounds needs --stats, a folder for what it measures"
            )
        search = search_of(begun.plan, None, None, begun.request.candidates)
        lanes.append(_lane(begun, search, begun.statistics, progress, kv=kv, head=head))
    return lanes


def rounding_losses(
    requests: Sequence[QuantizeRequest], num_tokens: int, progress: Progress
) -> Iterator[tuple[int, torch.Tensor]]:
    """KL divergence from the float model at held-out tokens, float64 `[samples, length]`, of each request's
    schemes with weights rounded to nearest, with the request's number: neither a solver nor rounded
    activations take part."""
    from ..gguf.assemble import mix_tables, table_names
    from ..kinds.ggml.scheme import GgufScheme
    from .candidates import is_gguf
    from .divergence import divergences

    plans = [make_plan(request) for request in requests]
    samples, images = _checked(calibration_of(requests[0], plans[0], []))
    samples = samples[: max(1, num_tokens // samples.shape[1])]
    # Block types of GGUF files are alike to a plan; others have scales of its own dtype.
    together = [number for number, plan in enumerate(plans) if is_gguf(plan)]
    alone = [[number] for number in range(len(plans)) if number not in together]
    for numbers in filter(None, [together, *alone]):
        kinds, plan = [dict(plans[number].schemes) for number in numbers], plans[numbers[0]]
        if numbers is together:
            names = table_names(plan.checkpoint)
            columns = {name: plan.checkpoint.shape(f"{name}.weight")[1] for name in names}
            for number, kind in zip(numbers, kinds, strict=True):
                tables = mix_tables(plan.checkpoint.config, columns, plans[number].gguf_type)
                kind |= {name: GgufScheme(block) for name, block in tables.items()}
            plan = replace(plan, gguf_tables=dict.fromkeys(columns, ""))
        stream = LayerStream(plan.checkpoint, plan.architecture, plan.compute, plan.device)
        few = images[: len(samples)]
        for number, loss in zip(
            numbers, divergences(plan, stream, samples, kinds, progress, few), strict=True
        ):
            yield number, loss.view(samples.shape)


def _lane(
    begun: Session,
    search: Search,
    folder: StatisticsFolder,
    progress: Progress,
    *,
    kv: bool = False,
    head: bool = False,
    replaced: Replaced | None = None,
) -> Lane:
    """The candidates with their costs, scaled by layer; what the folder lacks is measured."""
    from .candidates import measure_choices
    from .mixed_precision import Lane
    from .sensitivity import Sensitivities

    plan, calibration = begun.plan, begun.calibration
    if begun.request.method == AUTO:
        calibration = _searched_samples(plan, calibration)
    if not folder.complete:
        kv, head = kv or plan.kv_cache is not None, head or plan.lm_head
        folder.measure(begun.stream, calibration, progress, head=head, kv=kv, replaced=replaced)
    sensitivities = Sensitivities(folder.folder)
    if not sensitivities.complete:
        sensitivities.measure(begun.stream, *_checked(calibration), progress)
    choices = measure_choices(search, sensitivities, folder, progress)
    samples = _checked(begun.calibration)
    return Lane(search, choices, folder, begun.stream, samples).scaled(progress)


def _searched_samples(plan: QuantizePlan, calibration: Calibration) -> Calibration:
    """The calibration with the first samples alone, as many as a search needs."""
    samples, length = calibration.token_ids.shape
    widest = max((columns for _, columns in plan.modules.values()), default=0)
    tokens = max(SEARCH_TOKENS, SEARCH_TOKENS_PER_INPUT * widest)
    count = max(1, -(-tokens // max(1, length)))
    if count >= samples:
        return calibration
    few = calibration.token_ids[:count], calibration.images[:count]
    return replace(calibration, token_ids=few[0], images=few[1])


def _checked(calibration: Calibration) -> tuple[torch.Tensor, Images]:
    return calibration.held_out_samples if len(calibration.held_out) else calibration.samples


def statistics_path(request: QuantizeRequest) -> Path | None:
    """The statistics folder: `request.stats`, or next to the output where widths are searched."""
    if request.stats is None and searches(request):
        return request.output.with_name(request.output.name + ".statistics")
    return request.stats


def _sample_counts(request: QuantizeRequest, plan: QuantizePlan) -> tuple[int, int]:
    """Calibration samples and held-out ones, as asked for."""
    usual = plan.method.num_samples
    if is_bundled(request.model):
        usual = BUNDLED_SAMPLES
    elif plan.device == HOST:
        usual = CPU_SAMPLES
    wanted = usual if request.num_samples is None else request.num_samples
    return wanted, wanted // 8 if request.held_out is None else request.held_out


def calibration_of(request: QuantizeRequest, plan: QuantizePlan, notes: list[str]) -> Calibration:
    """The calibration and held-out samples; appends notes where the text gives fewer."""
    wanted, num_held_out = _sample_counts(request, plan)
    tokenizer = load_tokenizer(plan.checkpoint.path, trust_remote_code=request.trust_remote_code)
    cut: dict[str, Any] = {
        "num_samples": wanted,
        "seq_len": plan.seq_len,
        "seed": request.seed,
        "held_out": num_held_out,
        "evaluation": Path(request.evaluation) if request.evaluation else BUNDLED_EVALUATION,
    }
    calibration = _with_images(request, plan, tokenizer, cut, notes)
    if calibration is None:
        source = request.calibration or bundled_text(request.model)
        calibration = load_calibration(source, tokenizer, **cut)
    samples, length = calibration.token_ids.shape
    if (samples, length) != (wanted, plan.seq_len):
        notes.append(f"note: the calibration text gives {samples} samples of {length} tokens")
    if len(calibration.held_out) < num_held_out:
        notes.append(
            f"note: the text left gives {len(calibration.held_out)} held-out samples, not {num_held_out}"
        )
    if calibration.duplicates:
        notes.append(f"note: {calibration.duplicates} repeated calibration texts were dropped")
    if calibration.refused:
        notes.append(
            f"note: {calibration.refused} conversations that the chat template refuses were dropped"
        )
    num_tokens = calibration.token_ids.numel()
    short = {name: shape[1] for name, shape in plan.modules.items() if shape[1] > num_tokens}
    if short and plan.method.needs_statistics:  # Gram matrices of the inputs are singular
        widest = max(short, key=lambda name: short[name])
        notes.append(
            f"warning: {len(short)} linears such as {widest} ({short[widest]} inputs) have more inputs than "
            f"there are calibration tokens ({num_tokens}): take more with --num-samples or another "
            "--calibration"
        )
    return calibration


def _reads_images(plan: QuantizePlan) -> bool:
    modules = plan.architecture.meta_model.model.modules()
    return any(callable(getattr(module, "get_image_features", None)) for module in modules)


def _may_use_pictures(plan: QuantizePlan) -> bool:
    return _reads_images(plan) and has_processor(plan.checkpoint.folder)


def _with_images(
    request: QuantizeRequest,
    plan: QuantizePlan,
    tokenizer: Any,
    cut: dict[str, Any],
    notes: list[str],
) -> Calibration | None:
    """Samples with the images of the source, by default the bundled pictures for a model that reads images;
    BadInput for images that cannot be used. None where the data has no images, or the model cannot use the
    bundled pictures."""
    source, folder = request.calibration, plan.checkpoint.folder
    if source is None and not _may_use_pictures(plan):
        return None
    from ..stream.image_samples import image_calibration, read_pairs

    try:
        if (read := read_pairs(source or PICTURES)) is None:
            return None
        if not _reads_images(plan):
            raise BadInput(
                f"calibration data {source} has images, and {folder} ({plan.architecture.family}) "
                "reads text alone"
            )
        pairs, texts = read
        if source is None:
            texts = read_documents(MIXED)[1]
        processor = load_processor(folder, tokenizer, trust_remote_code=request.trust_remote_code)
        name = "bundled pictures" if source is None else Path(source).name
        calibration = image_calibration(name, pairs, texts, processor, tokenizer, **cut)
    except BadInput as error:
        if source is not None or request.vision:
            raise
        notes.append(f"warning: calibrated on text without images: {error}")
        return None
    notes.append(f"note: calibration samples hold {calibration.num_images} images")
    return calibration
