"""The methods by name: what each can do, the schemes that it makes, and the module that solves a layer.

Nothing here imports torch: a request is checked by it before a model is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from ...base.errors import BadInput
from ...base.extras import require
from ...base.option import flag_of, offer, options_of
from ..base.scheme import SUPPORTED_BITS, Scheme
from ..kinds.registry import format_names
from . import options
from .options import MethodOptions, SchemeOptions, refuse_options

if TYPE_CHECKING:
    from .base import LayerProblem, LayerResult

AUTO = "auto"
"""Not a method of its own: GPTQ under a target, see `pipeline.mixed_precision`."""
AUTO_METHOD = "gptq"
Solver = Literal["nearest", "gptq"]


@dataclass(frozen=True, slots=True)
class Method:
    """A quantization method.

    Attributes:
        default_format: format where `--format` is not given and the scheme fits.
        scheme_of: makes the scheme of options whose bits are decided.
        takes: scheme options that it reads; others are refused.
        bits, widths: width without `--bits`, and widths that `--bits` takes.
        module: module in this folder, imported when it is called; its `quantize_layer` solves a layer.
        codes: choice of the codes. "rounded": to nearest, so that GPTQ may choose them instead; "smoothed":
            scales are folded first, then either solver rounds; "own": by the method's own solver.
        best_solver: solver where `--solver` is auto. AWQ's scales and GPTQ's feedback add up: each lowers the
            error that the other leaves. Without calibration there is no feedback, so methods that need none
            stay with the nearest.
        grouped: True if its scheme has groups of input channels that must divide the width.
        sequential: True if it goes in execution order, unless `MethodOptions.true_sequential` is off.
        blockwise: True if it runs the layer itself, as `LayerProblem.block`.
        transformed: True if its codes lie between transforms: they have GPTQ's error feedback built in, and
            scales to be tuned.
        is_solver: True if records name it as the solver of the codes.
        searches_scales: True if it tries scales, and measures a layer again after its first linears.
        ranged: True if the ranges of its groups may be the plain minimum and maximum.
        to_blocks: True if it goes to any grid, ggml's blocks included.
        in_towers: True if it goes to vision towers, whose layers are no decoder layers.
        by_target: True if its widths may be searched under a target.
        knobs: fields of `MethodOptions` that it reads in addition to those of all methods.
        copies: float copies of the largest linear at its peak, besides the weights; measured.
    """

    name: str
    default_format: str
    scheme_of: Callable[[SchemeOptions], Scheme]
    takes: tuple[str, ...]
    bits: int = 4
    widths: tuple[int, ...] = ()
    module: str = "rounding"
    codes: Literal["rounded", "smoothed", "own"] = "rounded"
    best_solver: Solver = "nearest"
    num_samples: int = 128
    needs_statistics: bool = False
    grouped: bool = False
    sequential: bool = False
    blockwise: bool = False
    transformed: bool = False
    is_solver: bool = False
    searches_scales: bool = False
    ranged: bool = False
    fits_zeros: bool = False
    to_blocks: bool = False
    in_towers: bool = True
    by_target: bool = False
    knobs: tuple[str, ...] = ()
    copies: float = 4.25
    code_bytes: int = 1

    def choose_bits(self, requested: int | None) -> int:
        """The requested bit width, or the method's default; BadInput for a width that it does not support."""
        bits = self.bits if requested is None else requested
        if bits not in self.widths:
            known = ", ".join(str(width) for width in self.widths)
            raise BadInput(f"--bits {bits}: method {self.name} has {known}")
        return bits

    def scheme(self, options: SchemeOptions) -> Scheme:
        refuse_options(self.name, options, *self.takes)
        return self.scheme_of(replace(options, bits=self.choose_bits(options.bits)))

    def quantize_layer(self, problem: LayerProblem) -> LayerResult:
        return import_module(f".{self.module}", __package__).quantize_layer(problem)

    def solver(self, name: str) -> Solver:
        if name == "auto":
            return self.best_solver
        return "gptq" if name == "gptq" else "nearest"

    def solver_name(self, solver: str) -> str:
        return self.name if self.is_solver else solver

    def refuse_solver(self, solver: str) -> None:
        """Raises BadInput where the method chooses its codes itself, and not by `solver`."""
        if solver != "nearest" and self.codes == "own" and self.name != solver:
            others = [method for method in METHODS.values() if method.codes != "own"]
            known = [method.name for method in sorted(others, key=lambda method: method.codes)]
            raise BadInput(
                f"--solver {solver}: method {self.name} chooses its codes itself; use {', '.join(known)}"
            )

    def with_solver(self, solver: str) -> Method:
        """The method with its codes chosen by `solver`: `nearest` or `gptq`; raises as `refuse_solver`."""
        self.refuse_solver(solver)
        if solver == "nearest" or self.codes == "own":
            return self
        solved = replace(
            self,
            takes=(*self.takes, "act_order"),
            scheme_of=self._ordered_scheme,
            needs_statistics=True,
        )
        if self.codes == "smoothed":
            return solved
        gptq = METHODS["gptq"]
        samples = max(self.num_samples, gptq.num_samples)
        return replace(solved, module=gptq.module, sequential=gptq.sequential, num_samples=samples)

    def _ordered_scheme(self, options: SchemeOptions) -> Scheme:
        """The scheme where GPTQ chooses the codes: the order of its channels is not the scheme's."""
        if options.act_order == "dynamic":
            raise BadInput("--act-order dynamic: only method gptq permutes groups")
        return self.scheme(replace(options, act_order=SchemeOptions().act_order))

    def on_grid(self, scheme: Scheme) -> Method:
        """The method on the one grid of a format that holds no other (`WeightFormat.rounds_to`)."""
        return replace(self, scheme_of=lambda _: scheme, takes=(), grouped=False)

    def refuse_knobs(self, options: MethodOptions) -> None:
        """Raises BadInput naming a non-default hyperparameter of another method."""
        usual = MethodOptions()
        if options.ranges == "mse" and self.name != "gptq":
            raise BadInput(f"--ranges mse belongs to method gptq, not to {self.name}")
        readers = [self, METHODS.get(options.solver, self)]
        if options.ranges != usual.ranges and not any(method.ranged for method in readers):
            raise BadInput(f"--ranges {options.ranges}: method {self.name} has ranges of its own")
        for knob in dict.fromkeys(name for method in METHODS.values() for name in method.knobs):
            is_read = any(knob in method.knobs for method in readers)
            if not is_read and getattr(options, knob) not in (None, getattr(usual, knob)):
                owner = next(method.name for method in METHODS.values() if knob in method.knobs)
                raise BadInput(f"{_flag(knob)} belongs to method {owner}, not to {self.name}")
        if self.transformed and not options.finetune_steps:
            for knob in ("lr", "batch_size"):
                if getattr(options, knob) != getattr(usual, knob):
                    raise BadInput(
                        f"{_flag(knob)} is of the tuning of scales: give --finetune-steps too"
                    )


def _flag(knob: str) -> str:
    flag = flag_of(knob, options_of(MethodOptions)[knob])
    return flag.replace("--", "--no-", 1) if getattr(MethodOptions(), knob) is True else flag


_GROUPS = ("bits", "group_size", "symmetric")
_FEEDBACK = ("damp", "asymmetric", "true_sequential")
_TABLES = (2, 3, 4, 8)
_integers = partial(Method, takes=_GROUPS, widths=SUPPORTED_BITS, grouped=True, to_blocks=True)
_calibrated: dict[str, Any] = {"num_samples": 512, "needs_statistics": True}
_codebook = partial(
    Method, default_format="bitsandbytes", takes=("bits", "group_size", "double_quant"), widths=(4,)
)
_block_float = partial(
    Method,
    default_format="compressed-tensors",
    takes=("bits", "group_size", "activations"),
    widths=(4,),
)
_transformed = partial(
    Method,
    takes=("bits",),
    module="transformed",
    codes="own",
    sequential=True,
    transformed=True,
    knobs=(*_FEEDBACK, "finetune_steps", "lr", "batch_size"),
    in_towers=False,
    **_calibrated,
)
METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        _integers(
            "awq",
            "awq",
            partial(options.integers, symmetric=False),
            module="awq",
            codes="smoothed",
            best_solver="gptq",
            searches_scales=True,
            ranged=True,
            knobs=("judge",),
            copies=11.0,
            code_bytes=2,
            **_calibrated,
        ),
        _integers("rtn", "compressed-tensors", options.integers, ranged=True),
        Method(
            "smoothquant",
            "compressed-tensors",
            options.smoothquant,
            ("bits", "group_size", "activations"),
            8,
            (8,),
            module="smoothquant",
            codes="smoothed",
            ranged=True,
            knobs=("alpha",),
            copies=5.5,
            code_bytes=2,
            in_towers=False,
            **_calibrated,
        ),
        _integers(
            "gptq",
            "gptq",
            options.integers,
            takes=(*_GROUPS, "act_order"),
            module="gptq",
            codes="own",
            sequential=True,
            is_solver=True,
            ranged=True,
            knobs=_FEEDBACK,
            copies=3.25,
            **_calibrated,
        ),
        _integers(
            "autoround",
            "compressed-tensors",
            options.integers,
            module="autoround",
            codes="own",
            needs_statistics=True,
            blockwise=True,
            is_solver=True,
            ranged=True,
            knobs=("iters", "lr", "batch_size"),
            in_towers=False,
        ),
        Method(
            "int8",
            "bitsandbytes",  # for LLM.int8(); it does not store plain int8
            options.int8,
            ("bits", "group_size", "outlier_threshold"),
            8,
            (8,),
            ranged=True,
        ),
        # The format holds blocks alone, not the other granularities.
        Method("fp8", "fp8", options.fp8, ("bits", "granularity", "activations"), 8, (8,)),
        _codebook("nf4", scheme_of=partial(options.codebook, kind="nf4"), copies=5.0),
        _codebook("fp4", scheme_of=partial(options.codebook, kind="fp4")),
        _block_float("nvfp4", scheme_of=partial(options.block_float, kind="nvfp4")),
        _block_float("mxfp4", scheme_of=partial(options.block_float, kind="mxfp4")),
        Method(
            "hqq",
            "compressed-tensors",
            partial(options.integers, symmetric=False, group_size=64),
            _GROUPS,
            widths=_TABLES,
            module="hqq",
            codes="own",
            grouped=True,
            fits_zeros=True,
            copies=5.0,
        ),
        Method(
            "squeezellm",
            "squeezellm",
            options.squeezellm,
            ("bits", "sparse_fraction"),
            widths=_TABLES,
            module="squeezellm",
            copies=5.0,
            in_towers=False,
            **_calibrated,
        ),
        _transformed(
            "trellis", "exl3", options.trellis, bits=3, widths=tuple(range(1, 9)), by_target=True
        ),
        _transformed("quip", "quip", options.quip, bits=2, widths=(2, 3, 4)),
    )
}


def check_method(name: str) -> None:
    """Raises BadInput for an unknown method; a format is answered with a method that writes it."""
    if name in METHODS or name == AUTO:
        return
    if name in format_names():
        writes = [known for known, method in METHODS.items() if method.default_format == name]
        method = f"--method {writes[0]} " if writes else ""
        raise BadInput(f"unknown method {name!r}: {name} is a format: {method}--format {name}")
    raise BadInput(f"unknown method {name!r}: {offer(name, sorted((*METHODS, AUTO)))}")


def check_format(name: str, others: Sequence[str] = ()) -> None:
    """Raises BadInput for a name of no format, nor of `others`, and for a format without its package."""
    if name in (known := [*format_names(), *others]):
        if name == "gguf":
            require("the format gguf", "gguf", "gguf")
        return
    if name in METHODS:
        raise BadInput(f"unknown format {name!r}: {name} is a method: --method {name}")
    raise BadInput(f"unknown format {name!r}: {offer(name, known)}")


def formats_asked(requested: str | None) -> tuple[str, ...]:
    """The formats that `--format` names with commas; BadInput for an unknown or repeated one."""
    if requested is None:
        return ()
    names = tuple(name.strip() for name in requested.split(","))
    if len(set(names)) != len(names):
        raise BadInput(f"--format {requested}: a format is named twice")
    for name in names:
        check_format(name)
    return names
