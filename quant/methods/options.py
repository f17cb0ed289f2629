"""Checks of scheme options and hyperparameters, shared by the methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from ..base.errors import BadInput
from .base import MethodOptions, SchemeOptions

_RANGED = ("rtn", "gptq", "awq", "autoround", "smoothquant", "int8")
_FEEDBACK = ("trellis", "quip")  # methods that have GPTQ's error feedback built in
_KNOBS = {  # field of `MethodOptions`: the method that reads it, and its flag
    "damp": ("gptq", "--damp"),
    "asymmetric": ("gptq", "--asymmetric-calibration"),
    "true_sequential": ("gptq", "--no-true-sequential"),
    "judge": ("awq", "--judge"),
    "alpha": ("smoothquant", "--alpha"),
    "iters": ("autoround", "--iters"),
    "lr": ("autoround", "--lr"),
    "batch_size": ("autoround", "--batch-size"),
}
_COMMAND_LINE = {"sparse_fraction": "sparse"}  # where the flag's name differs from the field's


def choose_bits(method: str, asked: int | None, widths: Sequence[int], default: int) -> int:
    """The requested bit width, or the default.

    Raises:
        BadInput: a width that the method does not support.
    """
    bits = default if asked is None else asked
    if bits not in widths:
        known = ", ".join(str(width) for width in widths)
        raise BadInput(f"--bits {bits}: method {method} has {known}")
    return bits


def refuse_knobs(method: str, options: MethodOptions) -> None:
    """Raises BadInput naming a non-default hyperparameter of another method."""
    usual = MethodOptions()
    if options.ranges == "mse" and method != "gptq":
        raise BadInput(f"--ranges mse belongs to method gptq, not to {method}")
    if options.ranges != usual.ranges and not {method, options.solver} & {*_RANGED}:
        raise BadInput(f"--ranges {options.ranges}: method {method} has ranges of its own")
    for name, (owner, option) in _KNOBS.items():
        owned = owner in (method, options.solver) or (owner == "gptq" and method in _FEEDBACK)
        if not owned and getattr(options, name) != getattr(usual, name):
            raise BadInput(f"{option} belongs to method {owner}, not to {method}")


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
