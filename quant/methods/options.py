"""Checks of what was asked of a grid, shared by the methods that have no choice of their own in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from ..base.errors import BadInput
from .base import MethodOptions, SchemeOptions

_KNOBS = {  # of `MethodOptions`: the one method that reads it, and how it is given
    "damp": ("gptq", "--damp"),
    "mse": ("gptq", "--mse"),
    "true_sequential": ("gptq", "--no-true-sequential"),
    "alpha": ("smoothquant", "--alpha"),
}
_COMMAND_LINE = {"sparse_fraction": "sparse"}  # where the option has another name than the field


def choose_bits(method: str, asked: int | None, widths: Sequence[int], default: int) -> int:
    """The width that was asked for, or the default.

    Raises:
        BadInput: a width that the method does not have.
    """
    bits = default if asked is None else asked
    if bits not in widths:
        known = ", ".join(str(width) for width in widths)
        raise BadInput(f"--bits {bits}: method {method} has {known}")
    return bits


def refuse_knobs(method: str, options: MethodOptions) -> None:
    """Raises BadInput naming a knob of another method that was turned."""
    usual = MethodOptions()
    for name, (owner, option) in _KNOBS.items():
        if method != owner and getattr(options, name) != getattr(usual, name):
            raise BadInput(f"{option} belongs to method {owner}, not to {method}")


def refuse_options(method: str, options: SchemeOptions, *known: str) -> None:
    """Raises BadInput naming an option that was given although the method has no use for it.

    `--symmetric` agrees with every grid that has no zero code; only `--asymmetric` is refused there.
    """
    blank = SchemeOptions()
    for field in fields(options):
        name, value = field.name, getattr(options, field.name)
        if name in known or value == getattr(blank, name):
            continue
        if name == "symmetric":
            if not value:
                raise BadInput(f"--asymmetric: method {method} has no zero codes")
            continue
        option = _COMMAND_LINE.get(name, name).replace("_", "-")
        given = f"--{option}" if value is True else f"--{option} {value}"
        raise BadInput(f"{given}: method {method} has no such choice")
