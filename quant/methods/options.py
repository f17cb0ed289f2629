"""Options of methods and schemes, checks that need no method, and the scheme that each method makes of them.

A scheme is made once its bits are decided; no tensor is needed for it. Its kind is imported then: a run pays
for its own kinds alone. Sources of the schemes: nf4 (arXiv:2305.14314), LLM.int8() (arXiv:2208.07339), fp8
(arXiv:2209.05433), in blocks of 128 × 128 as in DeepSeek-V3 (arXiv:2412.19437), MX (arXiv:2310.10537), NVFP4
(arXiv:2509.25149).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from ...base.errors import BadInput
from ...base.option import Limit, check_limits, flag_of, option, options_of
from ..base.scheme import PER_CHANNEL, Activations, Scheme
from ..kinds.integer.scheme import IntScheme


def _share(problem: str) -> Limit:
    return lambda value: None if 0 <= value <= 1 else problem


def _least(least: int, problem: str) -> Limit:
    return lambda value: None if value >= least else problem


def _step(value: float) -> str | None:
    return None if 0 < value <= 1 else "give more than 0 and at most 1 step of the grid"


def _whole_bits(text: str) -> int:
    """A width; a mean of several is said to be a target."""
    try:
        return int(text)
    except ValueError:
        raise BadInput(
            f"--bits: {text} is not a whole number of bits: a mean over linears of several widths is "
            "--target-bpw, of --method trellis and auto"
        ) from None


@dataclass(frozen=True, slots=True)
class MethodOptions:
    """Hyperparameters of single methods; a method reads its own. `asymmetric` None: its best."""

    PANEL: ClassVar = "Method"

    solver: Literal["auto", "nearest", "gptq"] = option(
        "auto",
        "How codes are chosen on the method's grid: the nearest, or by GPTQ's error feedback "
        "(awq, rtn, smoothquant, int8, fp8, nf4, fp4, squeezellm). auto: gptq for awq.",
    )
    act_order: Literal["group-aware", "static", "dynamic", "none"] = option(
        "group-aware", "gptq: activation order, the order in which channels are quantized."
    )
    asymmetric: bool | None = option(
        False,
        "gptq: aim at the outputs of the float model (GPTAQ); takes its states along. "
        "Default: with awq, trellis and quip.",
        flag="--asymmetric-calibration/--no-asymmetric-calibration",
        unset=True,
    )
    damp: float = option(
        0.01,
        "gptq: damping of the Hessian.",
        limit=_share("give a share of the mean diagonal, 0 to 1"),
    )
    ranges: Literal["weighted", "minmax", "mse"] = option(
        "weighted",
        "Range of each group: of least error weighted by the inputs' mean squares, minimum to "
        "maximum, or (gptq) of least unweighted error.",
    )
    true_sequential: bool = option(
        True, "gptq: measure later linears of a layer behind the quantized earlier ones."
    )
    judge: Literal["linear", "layer"] = option(
        "linear", "awq: choose scales by the error of each linear's output, or of the layer's."
    )
    alpha: float = option(
        0.5,
        "smoothquant: migration strength, from activations to weights.",
        limit=_share("give 0 (all in the inputs) to 1 (all in the weights)"),
    )
    iters: int = option(
        200,
        "autoround: steps of sign gradient descent for each layer.",
        limit=_least(1, "give at least 1; method rtn tunes nothing"),
    )
    finetune_steps: int = option(
        0,
        "trellis, quip: steps of Adam on the scales of each layer, towards the float model's output "
        "(QuIP#'s fine-tuning): such as 100.",
        limit=_least(0, "give 0 (none) or more steps for each layer"),
    )
    lr: float | None = option(
        None,
        "First step: autoround: in steps of the grid, default 1/iters; trellis, quip: in mean "
        "scales.",
        limit=_step,
    )
    batch_size: int = option(
        8,
        "autoround, trellis, quip: calibration samples in a step.",
        limit=_least(1, "give at least 1 sample"),
    )

    @classmethod
    def asked(cls, asymmetric: bool | None = None, **others: Any) -> MethodOptions:
        return cls(asymmetric=asymmetric, **others)

    def __post_init__(self) -> None:
        check_limits(self, by_flag=True)


@dataclass(frozen=True, slots=True)
class SchemeOptions:
    """Requested scheme options; None leaves the choice to the method. `act_order`: see `MethodOptions`."""

    PANEL: ClassVar = "Grid"

    bits: int | None = option(
        None,
        "Bits per weight. Default: the method's.",
        metavar="INTEGER",
        word=str,
        parse=_whole_bits,
        common=True,
    )
    group_size: int | None = option(
        None,
        "Input channels that share a scale; -1: one scale per output channel. "
        "Default: the largest of 128, 64, 32, 16 that divides every width.",
        common=True,
    )
    symmetric: bool | None = option(
        None,
        "Without or with zero points. Default: with for awq and hqq, without for the others.",
        flag="--symmetric/--asymmetric",
    )
    granularity: str | None = option(None, "fp8: scales per tensor, channel or block.")
    activations: str | None = option(None, "Activation quantization: dynamic, static or none.")
    double_quant: bool = option(False, "nf4, fp4: quantize the absmax values to 8 bits.")
    outlier_threshold: float | None = option(
        None, "int8: inputs beyond it are computed in 16 bits (LLM.int8())."
    )
    sparse_fraction: float | None = option(
        None, "squeezellm: fraction of weights kept as floats.", flag="--sparse"
    )
    act_order: str = "group-aware"

    @property
    def width(self) -> int:
        assert self.bits is not None
        return self.bits


def check_group_size(group_size: int | None) -> None:
    """Raises BadInput for a group size that no model could have."""
    if group_size is not None and group_size != PER_CHANNEL and group_size < 1:
        raise BadInput(
            f"--group-size {group_size}: give a positive number, or -1 for one scale per output channel"
        )


def refuse_options(method: str, options: SchemeOptions, *known: str) -> None:
    """Raises BadInput for an option that the method does not use; grids without zero points are symmetric."""
    blank = SchemeOptions()
    for field in fields(options):
        name, value = field.name, getattr(options, field.name)
        if name in known or value == getattr(blank, name):
            continue
        if name == "symmetric":
            if not value:
                raise BadInput(f"--asymmetric: method {method} has no zero points")
            continue
        flag = (
            flag_of(name, options_of(SchemeOptions)[name]) if name != "act_order" else "--act-order"
        )
        given = flag if value is True else f"{flag} {value}"
        raise BadInput(f"{given}: method {method} has no such choice")


DEFAULT_SPARSE_FRACTION = 0.0045  # of SqueezeLLM's paper
_ACTIVATIONS = ("dynamic", "static", "none")
# Inputs of each kind; NVFP4's have a calibrated global scale, MXFP4's are dynamic throughout.
_FP4_INPUTS = {
    "nvfp4": ("static", Activations("nvfp4", "group16", dynamic=False)),
    "mxfp4": ("dynamic", Activations("mxfp4", "group32")),
}


def integers(options: SchemeOptions, *, symmetric: bool = True, group_size: int = 128) -> Scheme:
    """Integers in groups, symmetric and of that size where the options do not say."""
    group_size = options.group_size or group_size
    return IntScheme(
        options.width,
        group_size,
        symmetric if options.symmetric is None else options.symmetric,
        permuted=options.act_order == "dynamic" and group_size != PER_CHANNEL,
    )


def int8(options: SchemeOptions) -> Scheme:
    """int8 weights with one scale per output channel; with a threshold, LLM.int8()."""
    threshold = options.outlier_threshold
    if threshold is None:
        return IntScheme(options.width, options.group_size or PER_CHANNEL, True)
    if threshold <= 0:
        raise BadInput(
            f"--outlier-threshold {threshold:g}: give a positive magnitude of inputs, usually 6"
        )
    from ..kinds.vectorwise.scheme import VectorwiseScheme

    if options.group_size not in (None, PER_CHANNEL):
        raise BadInput(
            f"--group-size {options.group_size}: rows of LLM.int8() have one magnitude each; "
            "leave out --group-size or --outlier-threshold"
        )
    return VectorwiseScheme(threshold)


def smoothquant(options: SchemeOptions) -> Scheme:
    """W8A8: a scale for each output channel, and for each token's inputs."""
    if options.group_size not in (None, PER_CHANNEL):
        raise BadInput(
            f"--group-size {options.group_size}: method smoothquant has one scale per output "
            "channel, -1"
        )
    if options.activations not in (None, "dynamic"):
        raise BadInput(
            f"--activations {options.activations}: method smoothquant gives each token its own "
            "scale, dynamic"
        )
    return IntScheme(options.width, PER_CHANNEL, True, Activations("int8"))


def fp8(options: SchemeOptions) -> Scheme:
    """e4m3 weights by channel, tensor or block; activations by token, 128 channels, or tensor (static)."""
    from ..kinds.fp8.scheme import FloatScheme

    granularity = options.granularity or "channel"
    if granularity not in ("tensor", "channel", "block"):
        raise BadInput(f"--granularity {granularity}: choose tensor, channel or block")
    choice = options.activations or "dynamic"
    if choice not in _ACTIVATIONS:
        raise BadInput(f"--activations {choice}: choose {', '.join(_ACTIVATIONS)}")
    if choice == "none":
        return FloatScheme(granularity)
    if choice == "dynamic":
        granule = "group128" if granularity == "block" else "token"
        return FloatScheme(granularity, Activations("fp8", granule))
    if granularity == "block":
        raise BadInput(
            "--activations static: blocks go with dynamic activations; "
            "use --granularity channel or tensor"
        )
    return FloatScheme(granularity, Activations("fp8", "tensor", dynamic=False))


def codebook(options: SchemeOptions, *, kind: Literal["nf4", "fp4"]) -> Scheme:
    """Blocks of 64 weights, each weight the nearest of 16 values times the block's absmax (bitsandbytes)."""
    from ..kinds.codebook.scheme import CODEBOOK_BLOCKS, CodebookScheme

    size = 64 if options.group_size is None else options.group_size
    if size not in CODEBOOK_BLOCKS:
        sizes = ", ".join(str(block) for block in CODEBOOK_BLOCKS)
        raise BadInput(f"--group-size {size}: blocks of method {kind} have {sizes}")
    return CodebookScheme(kind, size, options.double_quant)


def block_float(options: SchemeOptions, *, kind: Literal["nvfp4", "mxfp4"]) -> Scheme:
    """e2m1 weights in blocks of 16 (`nvfp4`) or 32 (`mxfp4`); W4A16, or W4A4 with `--activations`."""
    from ..kinds.fp4.scheme import Fp4Scheme

    choice, activations = _FP4_INPUTS[kind]
    if options.activations not in (None, "none", choice):
        raise BadInput(f"--activations {options.activations}: method {kind} has {choice} and none")
    scheme = Fp4Scheme(kind, activations if options.activations == choice else None)
    if options.group_size not in (None, scheme.block_size):
        raise BadInput(
            f"--group-size {options.group_size}: blocks of method {kind} have {scheme.block_size}"
        )
    return scheme


def squeezellm(options: SchemeOptions) -> Scheme:
    from ..kinds.lookup.scheme import LookupScheme

    fraction = options.sparse_fraction
    return LookupScheme(options.width, DEFAULT_SPARSE_FRACTION if fraction is None else fraction)


def trellis(options: SchemeOptions) -> Scheme:
    from ..kinds.trellis.scheme import TrellisScheme

    return TrellisScheme(options.width)


def quip(options: SchemeOptions) -> Scheme:
    from ..kinds.e8p.scheme import E8pScheme

    return E8pScheme(options.width)
