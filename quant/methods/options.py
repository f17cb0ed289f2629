"""Checks of scheme options and hyperparameters, shared by the methods."""

from __future__ import annotations

from dataclasses import fields
from typing import Literal

from ..base.errors import BadInput
from ..base.scheme import PER_CHANNEL
from .settings import METHOD_FACTS, MethodOptions, SchemeOptions

_RANGED = ("rtn", "gptq", "awq", "autoround", "smoothquant", "int8")
TRANSFORMED = ("trellis", "quip")
"""Methods of codes between transforms: they have GPTQ's error feedback built in, and scales to be tuned."""
ROUNDING = ("rtn", "int8", "fp8", "nf4", "fp4", "nvfp4", "mxfp4", "squeezellm")
SMOOTHING = ("awq", "smoothquant")  # round what they smoothed by the solver themselves
_KNOBS = {  # field of `MethodOptions`: its flag, and the methods or the solver that read it
    "damp": ("--damp", "gptq", *TRANSFORMED),
    "asymmetric": ("--asymmetric-calibration", "gptq", *TRANSFORMED),
    "true_sequential": ("--no-true-sequential", "gptq", *TRANSFORMED),
    "judge": ("--judge", "awq"),
    "alpha": ("--alpha", "smoothquant"),
    "iters": ("--iters", "autoround"),
    "finetune_steps": ("--finetune-steps", *TRANSFORMED),
    "lr": ("--lr", "autoround", *TRANSFORMED),
    "batch_size": ("--batch-size", "autoround", *TRANSFORMED),
}
_COMMAND_LINE = {"sparse_fraction": "sparse"}  # where the flag's name differs from the field's


def choose_bits(method: str, asked: int | None) -> int:
    """The requested bit width, or the method's default.

    Raises:
        BadInput: a width that the method does not support.
    """
    facts = METHOD_FACTS[method]
    bits = facts.bits if asked is None else asked
    if bits not in facts.widths:
        known = ", ".join(str(width) for width in facts.widths)
        raise BadInput(f"--bits {bits}: method {method} has {known}")
    return bits


def check_group_size(asked: int | None) -> None:
    """Raises BadInput for a group size that no model could have."""
    if asked is not None and asked != PER_CHANNEL and asked < 1:
        raise BadInput(
            f"--group-size {asked}: give a positive number, or -1 for one scale per output channel"
        )


def solver_of(method: str, asked: str) -> Literal["nearest", "gptq"]:
    """The solver of a method: with `auto` the one that is best for it.

    AWQ's scales and GPTQ's feedback add up: each lowers the error that the other leaves. Without calibration
    there is no feedback, so methods that need none stay with the nearest.
    """
    if asked == "gptq":
        return "gptq"
    return "gptq" if asked == "auto" and method == "awq" else "nearest"


def refuse_solver(method: str, solver: str) -> None:
    """Raises BadInput where the method chooses its codes itself, and not by `solver`."""
    if solver != "nearest" and method not in ("gptq", *ROUNDING, *SMOOTHING):
        known = ", ".join((*ROUNDING, *SMOOTHING))
        raise BadInput(f"--solver {solver}: method {method} chooses its codes itself; use {known}")


def refuse_knobs(method: str, options: MethodOptions) -> None:
    """Raises BadInput naming a non-default hyperparameter of another method."""
    usual = MethodOptions()
    if options.ranges == "mse" and method != "gptq":
        raise BadInput(f"--ranges mse belongs to method gptq, not to {method}")
    if options.ranges != usual.ranges and not {method, options.solver} & {*_RANGED}:
        raise BadInput(f"--ranges {options.ranges}: method {method} has ranges of its own")
    for name, (option, *owners) in _KNOBS.items():
        owned = {method, options.solver} & {*owners}
        if not owned and getattr(options, name) not in (None, getattr(usual, name)):
            raise BadInput(f"{option} belongs to method {owners[0]}, not to {method}")
    if method in TRANSFORMED and not options.finetune_steps:
        for name in ("lr", "batch_size"):
            if getattr(options, name) != getattr(usual, name):
                raise BadInput(
                    f"{_KNOBS[name][0]} is of the tuning of scales: give --finetune-steps too"
                )


def refuse_options(method: str, options: SchemeOptions, *known: str) -> None:
    """Raises BadInput naming an option that the method does not use.

    `--symmetric` is accepted by grids without zero points; only `--asymmetric` is refused there.
    """
    blank = SchemeOptions()
    for field in fields(options):
        name, value = field.name, getattr(options, field.name)
        if name in known or value == getattr(blank, name):
            continue
        if name == "symmetric":
            if not value:
                raise BadInput(f"--asymmetric: method {method} has no zero points")
            continue
        option = _COMMAND_LINE.get(name, name).replace("_", "-")
        given = f"--{option}" if value is True else f"--{option} {value}"
        raise BadInput(f"{given}: method {method} has no such choice")
