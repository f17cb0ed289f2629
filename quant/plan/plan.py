"""The quantization plan: a request checked against the checkpoint's headers, before any work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...base.errors import BadInput
from ..base.device import HOST, device_of
from ..base.scheme import INT8_CACHE, PER_CHANNEL, KvStrategy, Scheme
from ..base.workers import own_device
from ..check.loaders import CheckpointContents
from ..families.registry import type_of
from ..formats.registry import FORMATS
from ..kinds.base.format import WeightFormat
from ..methods.options import MethodOptions, SchemeOptions
from ..methods.registry import METHODS, Method, formats_asked
from ..model.architecture import Architecture, architecture_of, named_architecture
from ..model.auto import read_config
from ..model.checkpoint import Checkpoint
from ..model.experts import APART_FORMATS, with_experts_apart
from ..model.parameters import ModelParameters, by_kind, model_parameters, unquantized_modules
from ..smoothing.rotate import seen_rotated
from ..smoothing.smoothing_map import with_smoothing
from ..source.models import open_plain
from ..stream.layer_stream import compute_dtype
from ..stream.sources import BUNDLED_SEQ_LEN, CPU_SEQ_LEN, is_bundled
from .request import QuantizeRequest, parse_override, with_defaults
from .selection import (
    HEAD,
    TORCH_DTYPES,
    Shapes,
    check_widths,
    find_head,
    find_ignored,
    find_linears,
    options_by_module,
    refuse_vision,
    split_fusions,
    vision_layers,
    vision_linears,
    vision_misfits,
)

DEFAULT_SEQ_LEN = 2048


@dataclass(frozen=True, slots=True)
class QuantizePlan:
    """A request that was checked against the checkpoint.

    Attributes:
        architecture: decoder layers.
        modules: `(out_features, in_features)` of every linear to quantize, by full name.
        schemes: target scheme of each module.
        ignored: linears excluded by `--ignore`.
        unquantized: modules left plain and all others without codes, as format configs list them.
        parameters: parameters of transformers' model, or why transformers has none.
        rotations: rotations that the checkpoint is seen through.
        seq_len: tokens in a calibration sample.
        device: device on which layers are run and solved.
        compute: dtype of the GEMMs of the calibration passes.
        gguf_type: name of the mix in a GGUF file; empty where none is written.
        kv_cache: dtype of the KV cache that scales are stored for; None: none are.
        kv_cache_strategy: number of scales of a layer, see `QuantizeRequest`.
        notes: choices made for the user, one line each.
        search: comparison by method `auto`, for the manifest.
        importance: mean squares of the inputs of linears, from an importance matrix's file.
        gguf_tables: block types of embedding and output head by module, where they are no rule of the mix;
            empty: the table stays as it is.
        vision: layers of the vision tower and projector, where they are quantized too.
    """

    checkpoint: Checkpoint
    architecture: Architecture
    method: Method
    formats: tuple[WeightFormat, ...]
    modules: Shapes
    schemes: dict[str, Scheme]
    ignored: tuple[str, ...]
    unquantized: tuple[str, ...]
    parameters: ModelParameters | str
    options: MethodOptions
    rotations: tuple[str, ...]
    seq_len: int
    device: torch.device
    compute: torch.dtype
    gguf_type: str
    kv_cache: str | None
    kv_cache_strategy: KvStrategy
    notes: tuple[str, ...]
    search: dict[str, Any] | None = None
    importance: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)
    gguf_tables: Mapping[str, str] = field(default_factory=dict)
    vision: Architecture | None = None

    def table_types(self, format_name: str) -> dict[str, str]:
        """Block types that a GGUF file gives to embedding and output head, which no method quantizes."""
        if format_name != "gguf":
            return {}
        from ..gguf.assemble import table_types

        types = table_types(self.checkpoint, self.gguf_type, self.gguf_tables)
        return {module: block for module, block in types.items() if module not in self.modules}

    @property
    def blockwise(self) -> bool:
        return self.method.blockwise or bool(self.options.finetune_steps)

    @property
    def sequential(self) -> bool:
        return self.method.sequential and self.options.true_sequential

    @property
    def feeds_back(self) -> bool:
        return self.method.sequential or self.options.solver == "gptq"

    @property
    def num_layers(self) -> int:
        return len(self.architecture.layers)

    @property
    def lm_head(self) -> bool:
        return HEAD in self.modules

    @property
    def layer_starts(self) -> tuple[str, ...]:
        """Starts of the names of each layer's tensors, and of the output projection's if it is quantized."""
        stacks = filter(None, (self.architecture, self.vision))
        starts = (f"{s.layer_prefix(index)}." for s in stacks for index in range(len(s.layers)))
        return (*starts, *[f"{HEAD}."] * self.lm_head)

    @property
    def format(self) -> WeightFormat:
        return self.formats[0]

    @property
    def label(self) -> str:
        labels = [scheme.label for scheme in self.schemes.values()]
        return ", ".join(sorted(set(labels), key=lambda label: (-labels.count(label), label)))

    def config_in(self, weight_format: WeightFormat) -> dict[str, Any]:
        """The `quantization_config` of a format, with the KV cache if its scales are stored."""
        return weight_format.full_config(
            self.schemes, self.unquantized, self.kv_cache, self.kv_cache_strategy
        )

    def scale_dtype(self, module: str) -> torch.dtype:
        """The dtype of a module's scales: one that every target format stores exactly."""
        stored = TORCH_DTYPES[self.checkpoint.dtype_name(f"{module}.weight")]
        wanted = [fmt.scale_dtype(stored, self.schemes[module]) for fmt in self.formats]
        return min(wanted, key=lambda dtype: -torch.finfo(dtype).eps)


def make_plan(request: QuantizeRequest) -> QuantizePlan:
    """Check a request against the checkpoint's headers; BadInput for anything that would fail later."""
    request = with_defaults(request)
    method = METHODS[request.method]
    solver = method.solver(request.options.solver)
    request = replace(request, options=replace(request.options, solver=solver))
    method = method.with_solver(solver)
    formats = _formats(request, method)
    if method.name == "rtn" and formats[0].rounds_to is not None:
        method = METHODS["rtn"].on_grid(formats[0].rounds_to)
    if request.vision:
        refuse_vision(request, formats)
    # ggml's block types, and not an integer grid that converts to them. The order of rounding is no grid's.
    usual = SchemeOptions()
    no_grid = replace(request.scheme_options, act_order=usual.act_order) == usual
    alone = [weight_format.name for weight_format in formats] == ["gguf"]
    to_blocks = alone and method.to_blocks and (request.gguf_type is not None or no_grid)
    base = usual
    if not to_blocks:
        base = _check_grid(request, method, formats)
    elif request.overrides or not no_grid:
        raise BadInput("--gguf-type decides the bits of every weight: leave the other options out")
    elif request.options.act_order == "dynamic":
        raise BadInput("--act-order dynamic: ggml's blocks hold channels in their order")
    source = _source(request, formats)
    parameters = model_parameters(source.checkpoint)
    schemes, gguf_type, notes, importance = (
        _block_schemes(request, source)
        if to_blocks
        else _grid_schemes(request, method, formats, base, source)
    )
    modules = {name: source.modules[name] for name in schemes}
    left = tuple(name for name in source.modules if name not in schemes)
    dtypes = [source.checkpoint.dtype_name(f"{module}.weight") for module in modules]
    common = TORCH_DTYPES[max(dtypes, key=dtypes.count)]
    plan = QuantizePlan(
        checkpoint=source.checkpoint,
        architecture=source.architecture,
        method=method,
        formats=formats,
        modules=modules,
        schemes=schemes,
        ignored=(*source.ignored, *left),
        unquantized=unquantized_modules(source.checkpoint, modules, parameters),
        parameters=parameters,
        options=request.options,
        rotations=source.rotations,
        seq_len=_seq_len(request, source.checkpoint),
        device=device_of(own_device(request.device)),
        compute=compute_dtype(request.compute, common, device_of(request.device)),
        gguf_type=gguf_type,
        # Those of int8 are measured by the server.
        kv_cache=None if request.kv_cache == INT8_CACHE else request.kv_cache,
        kv_cache_strategy=request.kv_cache_strategy,
        notes=(),
        importance=importance,
        vision=source.tower,
    )
    check_plan(plan)
    more = source.architecture.notes if to_blocks else plan_notes(plan)
    return replace(plan, notes=(*notes, *more))


@dataclass(frozen=True, slots=True)
class _Source:
    """The checkpoint that is quantized, with `tower`, the layers of its vision side, if these are too."""

    checkpoint: Checkpoint
    architecture: Architecture
    modules: Shapes
    ignored: tuple[str, ...]
    tower: Architecture | None
    rotations: tuple[str, ...]


_Schemes = tuple[dict[str, Scheme], str, list[str], dict[str, torch.Tensor]]
"""Schemes of the linears that have any, the name of the mix in a GGUF file, notes, and importance."""


def _check_grid(
    request: QuantizeRequest, method: Method, formats: Sequence[WeightFormat]
) -> SchemeOptions:
    """The scheme options of all modules, which every format can hold, symmetric as the formats prefer."""
    if request.imatrix is not None:
        raise BadInput(
            "--imatrix weighs the errors of ggml's blocks: give --format gguf and --gguf-type"
        )
    base = request.scheme_options
    names = {weight_format.name for weight_format in formats}
    if base.symmetric is None and not method.fits_zeros:
        if "awq" in names:
            base = replace(base, symmetric=False)
        elif names & {"compressed-tensors", "gptq"}:
            base = replace(base, symmetric=True)
    for weight_format in formats:
        weight_format.check_scheme(_probe(method, base))
    return base


def _probe(method: Method, base: SchemeOptions) -> Scheme:
    return method.scheme(replace(base, group_size=PER_CHANNEL) if method.grouped else base)


def _grid_schemes(
    request: QuantizeRequest,
    method: Method,
    formats: Sequence[WeightFormat],
    base: SchemeOptions,
    source: _Source,
) -> _Schemes:
    modules, vision = source.modules, vision_linears(source.checkpoint, source.tower).keys()
    if not request.overrides:
        text = {name: shape for name, shape in modules.items() if name not in vision}
        check_widths(formats, text, dict.fromkeys(text, _probe(method, base)))
    overrides = [parse_override(text) for text in request.overrides]
    options, notes = options_by_module(
        modules, base, overrides, grouped=method.grouped, follows=vision
    )
    schemes = {name: method.scheme(option) for name, option in options.items()}
    misfits = vision_misfits(formats, modules, schemes, vision)
    schemes = {name: scheme for name, scheme in schemes.items() if name not in misfits}
    check_widths(formats, {name: modules[name] for name in schemes}, schemes)
    if misfits:
        notes.append(
            f"note: {len(misfits)} linears of the vision side stay as they are, for the format does not hold "
            f"their widths: {', '.join(by_kind(misfits))}"
        )
    gguf_type = ""
    if any(weight_format.name == "gguf" for weight_format in formats):
        gguf_type = max((scheme.ggml_type or "" for scheme in schemes.values()), default="")
    return schemes, gguf_type, notes, {}


def _block_schemes(request: QuantizeRequest, source: _Source) -> _Schemes:
    """The types of one of llama.cpp's mixes in a GGUF file."""
    from ..gguf.architecture import gguf_architecture
    from ..gguf.imatrix import read_imatrix
    from ..gguf.mix import DEFAULT_GGUF_TYPE, mix, mix_name, mix_notes, shape_of

    type_name = mix_name(request.gguf_type or DEFAULT_GGUF_TYPE)
    config = source.checkpoint.config
    has_importance = request.errors or request.imatrix is not None
    shape = shape_of(config, gguf_architecture(config), has_importance=has_importance)
    schemes: dict[str, Scheme] = dict(mix(type_name, source.modules, shape))
    if not schemes:
        raise BadInput(f"no linear of {request.model} has inputs in whole blocks of 32")
    importance: dict[str, torch.Tensor] = {}
    notes = mix_notes(type_name, source.modules, shape)
    if request.imatrix is not None and request.imatrix.exists():
        importance = read_imatrix(request.imatrix).for_modules(source.modules, shape.architecture)
        if (left := len(schemes) - len(importance)) > 0:
            notes.append(f"note: {request.imatrix} has no importance for {left} linears")
    return schemes, type_name, notes, importance


def _source(request: QuantizeRequest, formats: Sequence[WeightFormat]) -> _Source:
    checkpoint = open_plain(request.model, trust_remote_code=request.trust_remote_code)
    if checkpoint.quantization_config is not None:
        raise BadInput(f"{request.model} is quantized already: start from the original checkpoint")
    if not request.model_free:
        trusted = checkpoint.trust_remote_code
        read_config(checkpoint.config, checkpoint.folder, trust_remote_code=trusted)
    checkpoint, rotations = seen_rotated(checkpoint, request.rotations, request.seed)
    if not rotations and all(weight_format.name in APART_FORMATS for weight_format in formats):
        checkpoint = with_experts_apart(checkpoint)
    architecture = _architecture(request, checkpoint)
    linears = find_linears(checkpoint, architecture)
    if request.lm_head:
        linears[HEAD] = find_head(checkpoint)
    tower = vision_layers(checkpoint, architecture.family) if request.vision else None
    linears |= vision_linears(checkpoint, tower)
    ignored = find_ignored(request.ignore, list(linears))
    modules = {name: shape for name, shape in linears.items() if name not in ignored}
    if not modules:
        raise BadInput("--ignore matches every linear of the model: nothing is left to quantize")
    return _Source(checkpoint, architecture, modules, ignored, tower, rotations)


def _architecture(request: QuantizeRequest, checkpoint: Checkpoint) -> Architecture:
    """The layers of a checkpoint, their linears by shared input and with their pairs where these are told."""
    if request.model_free:
        return named_architecture(checkpoint)
    architecture, folds = architecture_of(checkpoint), METHODS[request.method].codes == "smoothed"
    try:
        mapped = with_smoothing(checkpoint, architecture)
    except BadInput:  # no small model tells the linears by shared input and their pairs
        if folds:
            raise
        return architecture
    needs_pairs = folds or request.stats is not None
    return mapped if needs_pairs else replace(mapped, notes=architecture.notes)


def check_plan(plan: QuantizePlan) -> None:
    """Raises BadInput where the formats cannot hold the schemes of a plan together."""
    holds_kv = all(weight_format.holds_kv_scales for weight_format in plan.formats)
    if plan.kv_cache is not None and not holds_kv:
        raise BadInput(
            "--kv-cache: only --format compressed-tensors and modelopt can store its scales"
        )
    for weight_format in plan.formats:
        plan.config_in(weight_format)
        if weight_format.name == "gguf":
            from ..gguf.assemble import check_source

            check_source(plan.checkpoint)


def plan_notes(plan: QuantizePlan) -> list[str]:
    notes = [*plan.checkpoint.notes, *plan.architecture.notes]
    asymmetric = any(scheme.asymmetric for scheme in plan.schemes.values())
    if asymmetric and any(f.name == "compressed-tensors" for f in plan.formats):
        notes.append(
            "note: transformers loads asymmetric compressed-tensors checkpoints only with "
            "CompressedTensorsConfig(dequantize=True); --symmetric needs nothing"
        )
    if plan.kv_cache_strategy == "attn_head":
        notes.append(
            "note: vLLM reads scales of the KV cache per head with its FlashAttention backend on a GPU; "
            "elsewhere leave --kv-cache-strategy at tensor"
        )
    split = split_fusions(plan.architecture, plan.schemes)
    if split:
        more = f" (and {len(split) - 1} more such groups)" if len(split) > 1 else ""
        notes.append(
            f"warning: {', '.join(split[0])} do not share one scheme: vLLM refuses that{more}"
        )
    return notes


def _formats(request: QuantizeRequest, method: Method) -> tuple[WeightFormat, ...]:
    """The requested formats; else the method's default, if it can store the scheme."""
    if request.format is not None:
        return tuple(FORMATS[name] for name in formats_asked(request.format))
    own = FORMATS[method.default_format]
    options = request.scheme_options
    if method.grouped and options.group_size is None:
        options = replace(options, group_size=PER_CHANNEL)
    try:
        own.check_scheme(method.scheme(options))
    except BadInput:
        return (FORMATS["compressed-tensors"],)
    return (own,)


def _seq_len(request: QuantizeRequest, checkpoint: Checkpoint) -> int:
    default = DEFAULT_SEQ_LEN
    if is_bundled(checkpoint.folder):
        default = BUNDLED_SEQ_LEN
    elif device_of(request.device) == HOST and checkpoint.text_config is checkpoint.config:
        default = CPU_SEQ_LEN  # of text alone: an image may take as many tokens
    context = checkpoint.text_config.get("max_position_embeddings", default)
    if not isinstance(context, int) or context < 1:
        raise BadInput(f"{checkpoint.path}: the config has no usable max_position_embeddings")
    if request.seq_len is None:
        return min(default, context)
    if request.seq_len > context:
        raise BadInput(
            f"--seq-len {request.seq_len} is longer than the model's context of {context} tokens"
        )
    return request.seq_len


def stored(plan: QuantizePlan) -> CheckpointContents:
    checkpoint = plan.checkpoint
    wrapped = checkpoint.text_config is not checkpoint.config
    return CheckpointContents(
        plan.architecture.family,
        plan.modules,
        plan.schemes,
        plan.unquantized,
        plan.checkpoint.names,
        plan.parameters,
        type_of(checkpoint.text_config) if wrapped else "",
        str(next(iter(checkpoint.config.get("architectures") or ()), "")),
    )
