"""The quantization request: all options, before the model is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from ..base.device_name import device_names
from ..base.errors import BadInput
from ..base.kv_cache import INT8_CACHE, LARGEST, KvStrategy
from ..calibration.sources import check_source
from ..methods.options import check_group_size, choose_bits, refuse_knobs, refuse_solver, solver_of
from ..methods.settings import METHOD_FACTS, MethodOptions, SchemeOptions
from .names import AUTO, check_method, format_names

AUTO_METHOD = "gptq"
TRELLIS = "trellis"  # whose widths are chosen under a target too


@dataclass(frozen=True, slots=True)
class QuantizeRequest:
    """All options of a quantization. None means automatic; the choice is reported in a note.

    Attributes:
        model: folder of the source checkpoint.
        output: folder to create; with several formats, the parent of one folder each.
        bits: of integer weights; None takes the method's default.
        group_size: None takes the largest usual size that divides every quantized width.
        symmetric: None takes what the format prefers.
        granularity, activations, double_quant, outlier_threshold, sparse_fraction: see `SchemeOptions`.
        gguf_type: block type or mix of a GGUF file; None takes `gguf.mix.DEFAULT_GGUF_TYPE`.
        imatrix: file of an importance matrix, measured on the float model where it does not exist; None:
            importance is that of each layer's calibration inputs, where there is calibration.
        options: hyperparameters of single methods.
        format: one name or several with commas; None takes the method's default format, if
            it can store the scheme.
        overrides: such as `down_proj$=bits:8,group_size:64`; of several that match, the last holds.
        calibration: see `calibration.load_calibration`; None is the bundled text, stories for the bundled
            models and a mixed one for all others.
        num_samples: None is what the method takes by default, for the bundled models 64.
        seq_len: tokens in a sample; None is 2048, for the bundled models 256, or the model's context if that
            is less.
        held_out: held-out samples, for measuring only; None is an eighth of `num_samples`.
        errors: whether output errors are measured; without, a data-free method reads no calibration text
            and runs no layer.
        evaluation: a file whose texts must not be among the calibration texts; None: the bundled one.
        ignore: regular expressions searched in module names; matching linears are not quantized.
        lm_head: whether the output projection is quantized too.
        vision: whether the vision tower and the projector are quantized too.
        revert_worse: whether linears or layers with a larger error than RTN fall back to RTN.
        device: where layers are run and solved: `cpu`, `cuda` or `cuda:N`.
        compute: dtype of the GEMMs of the calibration passes, see `layer_stream.compute_dtype`.
        stats: folder of statistics measured once, on the float model; made where it does not exist.
        target_bpw, target_bytes: budget of method `auto`: bits per quantized weight, or bytes of all
            tensors.
        rotations: `R1`, `R2`: rotations that are folded into the model before anything else; None: what is
            best for the method, see `plan.defaults`.
        kv_cache: `fp8`: measure and store scales for an fp8 KV cache; `int8`: servers measure them per token
            and head, nothing is stored.
        kv_cache_strategy: one fp8 scale for a layer's keys and one for its values, or one for each KV head.
        tensor_parallel: tensor-parallel ranks of vLLM; only for the table of loaders.
        restart: discard the unfinished work of an earlier run.
        model_name: the model's name in records; empty: the name of its folder.
        trust_remote_code: whether code that the checkpoint brings may be run.
    """

    model: Path
    output: Path
    method: str = "awq"
    bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    granularity: str | None = None
    activations: str | None = None
    double_quant: bool = False
    outlier_threshold: float | None = None
    sparse_fraction: float | None = None
    gguf_type: str | None = None
    imatrix: Path | None = None
    options: MethodOptions = field(default_factory=MethodOptions)
    format: str | None = None
    overrides: tuple[str, ...] = ()
    calibration: str | None = None
    num_samples: int | None = None
    seq_len: int | None = None
    held_out: int | None = None
    errors: bool = True
    evaluation: str | None = None
    ignore: tuple[str, ...] = ()
    lm_head: bool = False
    vision: bool = False
    revert_worse: bool = False
    device: str = "cpu"
    compute: str = "auto"
    stats: Path | None = None
    target_bpw: float | None = None
    target_bytes: int | None = None
    rotations: tuple[str, ...] | None = ()
    kv_cache: str | None = None
    kv_cache_strategy: KvStrategy = "tensor"
    tensor_parallel: int = 1
    seed: int = 0
    restart: bool = False
    model_name: str = ""
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check_request(self)

    @property
    def scheme_options(self) -> SchemeOptions:
        """The scheme options of the request."""
        return SchemeOptions(
            bits=self.bits,
            group_size=self.group_size,
            symmetric=self.symmetric,
            granularity=self.granularity,
            activations=self.activations,
            double_quant=self.double_quant,
            outlier_threshold=self.outlier_threshold,
            sparse_fraction=self.sparse_fraction,
            act_order=self.options.act_order,
        )


def check_request(request: QuantizeRequest) -> None:
    """Raises BadInput for a request that no model could fulfil."""
    check_method(request.method)
    formats = format_names(request.format)
    device_names(request.device)
    if searches(request):
        _check_target(request)
    _check_options(request)
    _check_kv_cache(request)
    if request.calibration is not None:
        check_source(request.calibration)
    if request.gguf_type is not None and "gguf" not in formats:
        raise BadInput("--gguf-type belongs to --format gguf")
    if not request.errors:
        _check_data_free(request)


def searches(request: QuantizeRequest) -> bool:
    """Whether the widths of the linears are searched, under a target."""
    return request.method == AUTO or (request.target_bpw, request.target_bytes) != (None, None)


def _check_target(request: QuantizeRequest) -> None:
    if request.method not in (AUTO, TRELLIS):
        raise BadInput("--target-bpw and --target-size belong to --method auto and trellis")
    if [request.target_bpw, request.target_bytes].count(None) != 1:
        raise BadInput(f"--method {request.method} needs one of --target-bpw and --target-size")
    if request.bits is not None or request.overrides:
        raise BadInput(
            f"--method {request.method} chooses the bits of every linear under a target: leave --bits and "
            "--override out"
        )


def _check_options(request: QuantizeRequest) -> None:
    method = AUTO_METHOD if request.method == AUTO else request.method
    solver = solver_of(method, request.options.solver)
    choose_bits(method, request.bits)
    check_group_size(request.group_size)
    refuse_solver(method, solver)
    refuse_knobs(method, replace(request.options, solver=solver))


def _check_kv_cache(request: QuantizeRequest) -> None:
    known = (*LARGEST, INT8_CACHE)
    if request.kv_cache is not None and request.kv_cache not in known:
        raise BadInput(f"--kv-cache {request.kv_cache}: choose {' or '.join(known)}")
    if request.kv_cache_strategy != "tensor" and request.kv_cache not in LARGEST:
        raise BadInput(f"--kv-cache-strategy {request.kv_cache_strategy} belongs to --kv-cache fp8")


def _check_data_free(request: QuantizeRequest) -> None:
    """Raises BadInput for `--no-errors` where an option needs the calibration data."""
    facts = METHOD_FACTS.get(request.method)
    needs = {
        f"method {request.method} is calibrated": searches(request)
        or (facts is not None and facts.needs_statistics)
        or solver_of(request.method, request.options.solver) == "gptq",
        "--kv-cache scales are measured": request.kv_cache in LARGEST,
        "--stats are measured": request.stats is not None,
        "--revert-worse compares errors": request.revert_worse,
        f"{request.imatrix} is measured": request.imatrix is not None
        and not request.imatrix.exists(),
    }
    for reason, holds in needs.items():
        if holds:
            raise BadInput(f"--no-errors: {reason}: leave one of them out")


@dataclass(frozen=True, slots=True)
class Override:
    """Scheme options for the modules whose names match a regular expression."""

    pattern: re.Pattern[str]
    changes: Mapping[str, Any]

    def apply(self, options: SchemeOptions) -> SchemeOptions:
        """The options with the override applied."""
        return replace(options, **self.changes)


_Kind = Literal["int", "float", "bool", "word"]
_KEYS: Mapping[str, _Kind] = MappingProxyType(
    {
        "bits": "int",
        "group_size": "int",
        "symmetric": "bool",
        "granularity": "word",
        "activations": "word",
        "double_quant": "bool",
        "outlier_threshold": "float",
        "sparse_fraction": "float",
    }
)
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def parse_override(text: str) -> Override:
    """Read `REGEX=key:value,key:value`.

    Raises:
        BadInput: no regular expression, an unknown key, or a value that the key cannot have.
    """
    pattern, divider, rest = text.rpartition("=")
    if not divider or not pattern or not rest:
        raise BadInput(f"--override {text!r}: write REGEX=key:value, such as 'down_proj$=bits:8'")
    changes: dict[str, Any] = {}
    for item in rest.split(","):
        key, _, value = (part.strip() for part in item.partition(":"))
        key = key.replace("-", "_")
        if key not in _KEYS:
            raise BadInput(
                f"--override {text!r}: unknown key {key!r}, choose of {', '.join(_KEYS)}"
            )
        changes[key] = _value(text, key, value)
    return Override(compiled("--override", pattern), MappingProxyType(changes))


def compiled(option: str, pattern: str) -> re.Pattern[str]:
    """A regular expression, or BadInput naming the option."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise BadInput(f"{option} {pattern!r} is no regular expression: {error}") from error


def _value(text: str, key: str, value: str) -> int | float | bool | str:
    kind = _KEYS[key]
    try:
        if kind == "int":
            return int(value)
        if kind == "float":
            return float(value)
        if kind == "bool":
            return _BOOLEANS[value.lower()]
    except (ValueError, KeyError) as error:
        raise BadInput(f"--override {text!r}: {value!r} is no value for {key}") from error
    if not value:
        raise BadInput(f"--override {text!r}: {key} has no value")
    return value
