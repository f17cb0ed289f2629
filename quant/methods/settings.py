"""The options of methods, and facts of each method by name: what is checked before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..base.errors import BadInput
from ..base.scheme import SUPPORTED_BITS


@dataclass(frozen=True, slots=True)
class MethodOptions:
    """Hyperparameters of single methods; each method reads only its own; see `options.refuse_knobs`.

    Attributes:
        solver: how codes are chosen: the nearest, or with GPTQ's error feedback; `auto` is what is best for
            the method, which `options.solver_of` says.
        act_order: GPTQ: columns by decreasing Hessian diagonal: whole groups, and within each
            (`group-aware`), all of them with sequential groups (`static`) or permuted groups (`dynamic`), or
            in natural order (`none`).
        asymmetric: GPTQ: whether the targets are the float model's outputs (GPTAQ); None: what is best for
            the method, see `plan.defaults`.
        damp: GPTQ: damping, as a fraction of the Hessian's mean diagonal.
        true_sequential: GPTQ: measure a layer's later linears behind its quantized earlier ones.
        ranges: of groups: searched for the least squared error weighted by the inputs' second moments
            (`weighted`), the plain minimum and maximum (`minmax`), or GPTQ: searched for the least
            `sum |w - w'|^2.4` (`mse`).
        judge: AWQ: whether scales are chosen by the error of each linear's output, or of the layer's.
        alpha: SmoothQuant: migration strength, from activations into weights.
        iters: AutoRound: steps of sign gradient descent for each layer.
        finetune_steps: trellis and quip: steps of Adam on the scales of each layer; 0: none.
        lr: AutoRound, trellis and quip: length of the first step, in steps of the grid or in mean scales;
            None is `1 / iters` or what the method takes.
        batch_size: AutoRound, trellis and quip: samples in a step.
    """

    solver: Literal["auto", "nearest", "gptq"] = "auto"
    act_order: Literal["group-aware", "static", "dynamic", "none"] = "group-aware"
    asymmetric: bool | None = False
    damp: float = 0.01
    true_sequential: bool = True
    ranges: Literal["weighted", "minmax", "mse"] = "weighted"
    judge: Literal["linear", "layer"] = "linear"
    alpha: float = 0.5
    iters: int = 200
    finetune_steps: int = 0
    lr: float | None = None
    batch_size: int = 8

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise BadInput(
                f"--alpha {self.alpha:g}: give 0 (all in the inputs) to 1 (all in the weights)"
            )
        if not 0 <= self.damp <= 1:
            raise BadInput(f"--damp {self.damp:g}: give a share of the mean diagonal, 0 to 1")
        if self.iters < 1:
            raise BadInput(f"--iters {self.iters}: give at least 1; method rtn tunes nothing")
        if self.finetune_steps < 0:
            raise BadInput(
                f"--finetune-steps {self.finetune_steps}: give 0 (none) or more steps for each layer"
            )
        if self.lr is not None and not 0 < self.lr <= 1:
            raise BadInput(f"--lr {self.lr:g}: give more than 0 and at most 1 step of the grid")
        if self.batch_size < 1:
            raise BadInput(f"--batch-size {self.batch_size}: give at least 1 sample")


@dataclass(frozen=True, slots=True)
class SchemeOptions:
    """Requested scheme options; None leaves the choice to the method.

    Attributes:
        bits, group_size, symmetric: of integer grids; the group size already divides the width.
        granularity: of fp8 weights: tensor, channel or block.
        activations: `dynamic`, `static` or `none`.
        double_quant: nf4 and fp4: magnitudes in 8 bits.
        outlier_threshold: int8: inputs beyond it are computed in 16 bits (LLM.int8()).
        sparse_fraction: squeezellm: fraction of weights that stay floats.
        act_order: see `MethodOptions`.
    """

    bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    granularity: str | None = None
    activations: str | None = None
    double_quant: bool = False
    outlier_threshold: float | None = None
    sparse_fraction: float | None = None
    act_order: str = "group-aware"


@dataclass(frozen=True, slots=True)
class MethodFacts:
    """Facts of a `Method` of the registry: its attributes of the same names, and its bits.

    Attributes:
        bits: width without `--bits`.
        widths: what `--bits` takes.
    """

    default_format: str
    bits: int
    needs_statistics: bool
    widths: tuple[int, ...]


_TABLES = (2, 3, 4, 8)
METHOD_FACTS = {
    "awq": MethodFacts("awq", 4, True, SUPPORTED_BITS),
    "rtn": MethodFacts("compressed-tensors", 4, False, SUPPORTED_BITS),
    "smoothquant": MethodFacts("compressed-tensors", 8, True, (8,)),
    "gptq": MethodFacts("gptq", 4, True, SUPPORTED_BITS),
    "autoround": MethodFacts("compressed-tensors", 4, True, SUPPORTED_BITS),
    "int8": MethodFacts("bitsandbytes", 8, False, (8,)),
    "fp8": MethodFacts("fp8", 8, False, (8,)),
    "nf4": MethodFacts("bitsandbytes", 4, False, (4,)),
    "fp4": MethodFacts("bitsandbytes", 4, False, (4,)),
    "nvfp4": MethodFacts("compressed-tensors", 4, False, (4,)),
    "mxfp4": MethodFacts("compressed-tensors", 4, False, (4,)),
    "hqq": MethodFacts("compressed-tensors", 4, False, _TABLES),
    "squeezellm": MethodFacts("squeezellm", 4, True, _TABLES),
    "trellis": MethodFacts("exl3", 3, True, tuple(range(1, 9))),
    "quip": MethodFacts("quip", 2, True, (2, 3, 4)),
}
FORMAT_NAMES = (
    "awq",
    "bitsandbytes",
    "compressed-tensors",
    "exl3",
    "fp8",
    "gguf",
    "gptq",
    "modelopt",
)
FORMAT_NAMES += ("quip", "squeezellm")
