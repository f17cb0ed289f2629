"""The quantization request: all options, before the model is read."""

from __future__ import annotations

import math
import re
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

from ...base.atomic_io import in_the_way
from ...base.errors import BadInput
from ...base.option import check_device, option, option_like, options_of, within
from ..base.scheme import INT8_CACHE, LARGEST, PER_CHANNEL, KvStrategy
from ..kinds.registry import format_names
from ..methods.options import MethodOptions, SchemeOptions, check_group_size
from ..methods.registry import AUTO, AUTO_METHOD, METHODS, check_method, formats_asked
from ..model.checkpoint import GGUF_SUFFIX, gguf_file_of, read_json
from ..stream.sources import check_source

DEFAULT_GROUP_SIZES = (128, 64, 32, 16)
# Headings on the help screen.
_GRID, _METHOD, _DATA, _RUN = "Grid", "Method", "Calibration data", "Run"


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for part in text.split(",") if (name := part.strip()) not in ("", "none"))


@dataclass(frozen=True, slots=True)
class QuantizeRequest:
    """All options of a quantization. None means automatic; the choice is reported in a note.

    Attributes:
        model: folder of the source checkpoint.
        output: folder to create; with several formats, the parent of one folder each.
        rotations: rotations that are folded into the model first; None: the best for the method, see
            `with_defaults`.
        model_name: the model's name in records; empty: the name of its folder.
    """

    model: Path
    output: Path
    method: str = option(
        "awq",
        "Quantization method, or a GGUF type; the list of methods says when to take which.",
        common=True,
    )
    format: str | None = option(
        None,
        "awq, gptq, compressed-tensors, modelopt, bitsandbytes, fp8, squeezellm, exl3, quip or "
        "gguf; several with commas. Default: the method's own if it supports the scheme, else "
        "compressed-tensors.",
        common=True,
    )
    bits: int | None = option_like(SchemeOptions, "bits")
    group_size: int | None = option_like(SchemeOptions, "group_size")
    symmetric: bool | None = option_like(SchemeOptions, "symmetric")
    granularity: str | None = option_like(SchemeOptions, "granularity")
    activations: str | None = option_like(SchemeOptions, "activations")
    double_quant: bool = option_like(SchemeOptions, "double_quant")
    outlier_threshold: float | None = option_like(SchemeOptions, "outlier_threshold")
    sparse_fraction: float | None = option_like(SchemeOptions, "sparse_fraction")
    gguf_type: str | None = option(
        None,
        "Block type or mix, such as Q4_K_M or Q8_0; the format is then gguf. Also as a method: "
        "--method Q4_K_M rounds as llama.cpp does.",
        panel=_GRID,
        common=True,
    )
    imatrix: Path | None = option(
        None,
        "GGUF: importance matrix to weigh errors by, in llama.cpp's formats (.gguf, .dat); "
        "measured and written where there is no such file.",
        writes="cache",
        panel=_GRID,
    )
    overrides: tuple[str, ...] = option(
        (),
        "Options for the linears that match a regular expression, such as "
        "'down_proj$=bits:8,group_size:64'. Repeatable.",
        flag="--override",
        panel=_GRID,
        word=list[str],
        parse=tuple,
        common=True,
    )
    ignore: tuple[str, ...] = option(
        (),
        "Regular expression: matching linears are not quantized. Repeatable.",
        panel=_GRID,
        word=list[str],
        parse=tuple,
        common=True,
    )
    lm_head: bool = option(
        False, "Quantize the output projection too.", flag="--quantize-lm-head", panel=_GRID
    )
    vision: bool = option(
        False,
        "Quantize the vision tower and the projector too.",
        flag="--quantize-vision",
        panel=_GRID,
    )
    options: MethodOptions = option(
        MISSING, "Hyperparameters of the method.", factory=MethodOptions, config=MethodOptions
    )
    target_bpw: float | None = option(
        None, "auto, trellis: maximum bits per quantized weight.", panel=_METHOD, common=True
    )
    target_bytes: int | None = option(
        None,
        "auto, trellis: maximum size of all tensors: 3.5GiB.",
        flag="--target-size",
        word=str,
        panel=_METHOD,
        common=True,
    )
    candidates: tuple[str, ...] = option(
        (),
        "auto, trellis: kinds that linears may have beside 16 bits: int2 to int8, int4-asym, fp8, nvfp4, "
        "mxfp4 (compressed-tensors), Q4_K and such (gguf), trellis1 to trellis8. Default: those that servers "
        "are fast with, and where the target is small all integers or types.",
        panel=_METHOD,
        word=str,
        parse=_names,
    )
    rotations: tuple[str, ...] | None = option(
        (),
        "R2: fold random Hadamard rotations of the heads' values into the weights first; the float model's "
        "logits stay. Default: R2 with awq; none: no rotation.",
        panel=_METHOD,
        flag="--rotate",
        word=str,
        parse=_names,
    )
    kv_cache: str | None = option(
        None,
        "fp8: calibrate and store the scales of an fp8 KV cache; int8: servers measure its scales.",
        panel=_METHOD,
    )
    kv_cache_strategy: KvStrategy = option(
        "tensor", "fp8 scales for a layer's keys and values, or for each KV head.", panel=_METHOD
    )
    revert_worse: bool = option(
        False,
        "Fall back to round-to-nearest where the method is worse than it.",
        panel=_METHOD,
    )
    allow_fallback: bool = option(
        False,
        "Round a layer to nearest where the method raises an error on it, which else ends the run.",
        panel=_METHOD,
    )
    calibration: str | None = option(
        None,
        "A .txt, .jsonl or .json file or a hub dataset id; conversations get the chat template; "
        "rows may have `images`, a list of paths. Default: bundled text (code, dialogue, prose, 40 "
        "languages), for models that read images bundled pictures before it.",
        panel=_DATA,
        common=True,
    )
    num_samples: int | None = option(
        None,
        "Calibration samples. Default: 64 on a CPU, on a GPU 512 for methods that are calibrated.",
        limit=within(ge=1),
        panel=_DATA,
        common=True,
    )
    seq_len: int | None = option(
        None,
        "Tokens in a sample. Default: 512 on a CPU, 2048 on a GPU and for models that read images, or "
        "the model's context if shorter.",
        limit=within(ge=1),
        panel=_DATA,
        common=True,
    )
    held_out: int | None = option(
        None, "Held-out samples, for measuring only. Default: an eighth.", panel=_DATA
    )
    errors: bool = option(
        True,
        "Measure output errors. Without, data-free methods (rtn, hqq, fp8, int8, nf4, fp4, nvfp4, "
        "mxfp4) read no calibration text and run no layer.",
        panel=_DATA,
        common=True,
    )
    evaluation: str | None = option(
        None,
        "A .txt or .jsonl file that calibration texts must not overlap with. "
        "Default: the bundled evaluation text.",
        panel=_DATA,
    )
    seed: int = option(0, "Random seed of the calibration texts' order.", panel=_DATA)
    device: str = option(
        "cpu",
        "Where layers are run and solved: cpu, cuda or cuda:N.",
        panel=_DATA,
        common=True,
    )
    compute: str = option(
        "auto",
        "GEMMs of the calibration passes: float32, bfloat16, or auto: bfloat16 for models "
        "stored in it where the CPU is faster at it.",
        panel=_DATA,
    )
    stats: Path | None = option(
        None,
        "Folder of cached statistics of the float model: measured once, reused by "
        "later runs with other bits, groups or methods.",
        writes="cache",
        panel=_DATA,
    )
    tensor_parallel: int = option(
        1,
        "vLLM tensor-parallel size, for the table of loaders.",
        flag="--tensor-parallel-size",
        span=(1, None),
        panel=_RUN,
    )
    trust_remote_code: bool = option(False, "Run code that the checkpoint brings.", panel=_RUN)
    restart: bool = option(False, "Discard the unfinished work of an earlier run.", panel=_RUN)
    mock: bool = option(
        False,
        "Write in seconds a checkpoint of the same layout with random codes, to try its loading.",
        panel=_RUN,
    )
    model_free: bool = option(
        False,
        "For a model type that nothing here knows: linears by name and shape, some rows in memory at a time. "
        "For methods without data, as with --no-errors.",
        panel=_RUN,
    )
    model_name: str = ""

    @classmethod
    def of(cls, model: str | Path, output: str | Path, **options: Any) -> QuantizeRequest:
        """The request for a folder, GGUF file, bundled name or hub id, with the defaults of `llmopt
        quantize`: the best for the method. BadInput for no such model, or options that no model could
        fulfil."""
        from ..source.models import resolve_model

        folder = resolve_model(str(model))
        name = Path(model).name.removesuffix(GGUF_SUFFIX) or folder.resolve().name
        usual = {"rotations": None, "options": MethodOptions.asked()}
        given = {"model_name": name, **usual, **options}
        request = cls(folder, Path(output), **given)
        check_groups(request)
        return request

    def __post_init__(self) -> None:
        for name, value in _by_gguf_type(self).items():
            object.__setattr__(self, name, value)
        if self.model_free:
            object.__setattr__(self, "errors", False)
        check_request(self)

    @property
    def measures(self) -> bool:
        return self.errors and not self.mock

    @property
    def scheme_options(self) -> SchemeOptions:
        shared = {name: getattr(self, name) for name in options_of(SchemeOptions)}
        return SchemeOptions(**shared, act_order=self.options.act_order)


def work_folder(output: Path) -> Path:
    return output.with_name(output.name + ".partial")


def check_free(output: Path) -> None:
    """Raises BadInput for an output that is there, unless its unfinished run is too."""
    if output.exists() and not work_folder(output).exists():
        raise in_the_way(output)


def _by_gguf_type(request: QuantizeRequest) -> dict[str, str]:
    """The fields that a GGUF type decides; BadInput for an unknown type, or two."""
    method, type_name = request.method, request.gguf_type
    is_method = method.lower() in (*METHODS, AUTO, *format_names())
    if is_method and type_name is None:
        return {}
    from ..gguf.mix import mix_name, names_mix  # numpy, which a plain request does not need

    if not is_method and names_mix(method):
        if type_name is not None:
            raise BadInput(f"--method {method} and --gguf-type {type_name}: give one of them")
        method, type_name = "rtn", method
    if type_name is None:
        return {}
    return {"method": method, "format": request.format or "gguf", "gguf_type": mix_name(type_name)}


def check_request(request: QuantizeRequest) -> None:
    """Raises BadInput for a request that no model could fulfil."""
    check_method(request.method)
    formats = formats_asked(request.format)
    check_device(request.device)
    if searches(request):
        _check_target(request)
    method = METHODS[AUTO_METHOD if request.method == AUTO else request.method]
    solver = method.solver(request.options.solver)
    method.choose_bits(request.bits)
    check_group_size(request.group_size)
    method.refuse_solver(solver)
    method.refuse_knobs(replace(request.options, solver=solver))
    known = (*LARGEST, INT8_CACHE)
    if request.kv_cache is not None and request.kv_cache not in known:
        raise BadInput(f"--kv-cache {request.kv_cache}: choose {' or '.join(known)}")
    if request.kv_cache_strategy != "tensor" and request.kv_cache not in LARGEST:
        raise BadInput(f"--kv-cache-strategy {request.kv_cache_strategy} belongs to --kv-cache fp8")
    if request.calibration is not None:
        check_source(request.calibration)
    if request.gguf_type is not None and "gguf" not in formats:
        raise BadInput(
            f"--gguf-type {request.gguf_type} belongs to --format gguf, not to {request.format}"
        )
    if request.mock and searches(request):
        raise BadInput(
            f"--mock: --method {request.method} measures the model before the layout is known: mock one of "
            "the methods that it chooses from"
        )
    if request.model_free and request.vision:
        raise BadInput("--model-free knows no vision tower: leave --quantize-vision out")
    if not request.errors and not request.mock:
        option = "--model-free" if request.model_free else "--no-errors"
        for reason in data_needs(request):
            raise BadInput(f"{option}: {reason}: leave one of them out")


def check_groups(request: QuantizeRequest) -> None:
    """Raises BadInput for a group size that does not divide the hidden size, which most linears have as
    inputs: from the config, before torch is imported. The plan checks every linear."""
    method, size = METHODS.get(request.method), request.group_size or PER_CHANNEL
    is_open = bool(request.overrides or request.ignore) or searches(request)
    if size == PER_CHANNEL or method is None or not method.grouped or is_open:
        return
    if gguf_file_of(request.model) is not None:
        return
    config = read_json(request.model / "config.json")
    text = config.get("text_config")
    width = (text if isinstance(text, dict) else config).get("hidden_size")
    if isinstance(width, int) and width % size:
        raise BadInput(
            f"group size {size} does not divide the model's hidden size of {width}: choose one that does, or "
            "leave --group-size out"
        )


def searches(request: QuantizeRequest) -> bool:
    targets = request.target_bpw, request.target_bytes
    return request.method == AUTO or bool(request.candidates) or targets != (None, None)


def require_target(request: QuantizeRequest) -> None:
    """Raises BadInput for a search without one target; that for a front has none."""
    if [request.target_bpw, request.target_bytes].count(None) != 1:
        raise BadInput(f"--method {request.method} needs one of --target-bpw and --target-size")


def _check_target(request: QuantizeRequest) -> None:
    known = [AUTO, *(method.name for method in METHODS.values() if method.by_target)]
    if request.method not in known:
        flags = "--candidates" if request.candidates else "--target-bpw and --target-size"
        raise BadInput(f"{flags} belong to --method {' and '.join(known)}")
    if request.target_bpw is not None and not math.isfinite(request.target_bpw):
        raise BadInput(f"--target-bpw {request.target_bpw}: give bits per weight, such as 4.5")
    if request.bits is not None or request.overrides:
        raise BadInput(
            f"--method {request.method} chooses the bits of every linear under a target: leave --bits and "
            "--override out"
        )


def with_defaults(request: QuantizeRequest) -> QuantizeRequest:
    """The request with `options.asymmetric` decided where it is None, and `rotations` where none are tried.

    `awq`, `trellis` and `quip` aim at the float model's outputs (GPTAQ) where there is error feedback on
    decoder layers that are run as they are quantized. `awq` also tries R2 when the model is read: `rotations`
    stay None (docs/rotations.md). A loader sees nothing of it."""
    options, method = request.options, METHODS.get(request.method)
    feeds_back = method is not None and method.best_solver == "gptq" == method.solver(
        options.solver
    )
    transformed = method is not None and method.transformed
    runs = request.errors and request.stats is None and options.true_sequential
    runs = runs and not request.vision
    to_gguf = request.gguf_type is not None or "gguf" in (request.format or "")
    rotations = request.rotations
    if rotations is None and not (feeds_back and runs and not to_gguf):
        rotations = ()
    if options.asymmetric is None:
        options = replace(options, asymmetric=(feeds_back or transformed) and runs)
    return replace(request, rotations=rotations, options=options)


def data_needs(request: QuantizeRequest) -> list[str]:
    """Reasons for which a request needs calibration data, also with `--no-errors`; empty: none."""
    method = METHODS.get(request.method)
    needs = {
        f"method {request.method} is calibrated": searches(request)
        or (method is not None and method.needs_statistics)
        or (method is not None and method.solver(request.options.solver) == "gptq"),
        "--kv-cache scales are measured": request.kv_cache in LARGEST,
        "--stats are measured": request.stats is not None,
        "--revert-worse compares errors": request.revert_worse,
        f"{request.imatrix} is measured": request.imatrix is not None
        and not request.imatrix.exists(),
    }
    return [reason for reason, holds in needs.items() if holds]


class Override(NamedTuple):
    """Scheme options for the modules whose names match a regular expression."""

    pattern: re.Pattern[str]
    changes: dict[str, Any]


_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def parse_override(text: str) -> Override:
    """Read `REGEX=key:value,key:value`; BadInput for what cannot be read, or an unknown key."""
    pattern, divider, rest = text.rpartition("=")
    if not divider or not pattern or not rest:
        raise BadInput(f"--override {text!r}: write REGEX=key:value, such as 'down_proj$=bits:8'")
    changes: dict[str, Any] = {}
    for item in rest.split(","):
        key, _, value = (part.strip() for part in item.partition(":"))
        key = key.replace("-", "_")
        if key not in options_of(SchemeOptions):
            known = ", ".join(options_of(SchemeOptions))
            raise BadInput(f"--override {text!r}: unknown key {key!r}, choose of {known}")
        kind = get_args(get_type_hints(SchemeOptions)[key])[0] if key != "double_quant" else bool
        if not value:
            raise BadInput(f"--override {text!r}: {key} has no value")
        try:
            changes[key] = _BOOLEANS[value.lower()] if kind is bool else kind(value)
        except (ValueError, KeyError) as error:
            raise BadInput(f"--override {text!r}: {value!r} is no value for {key}") from error
    return Override(compiled("--override", pattern), changes)


def compiled(option: str, pattern: str) -> re.Pattern[str]:
    """A regular expression, or BadInput naming the option."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise BadInput(f"{option} {pattern!r} is no regular expression: {error}") from error
