"""Which integer weights the Triton kernel can lay out in its tiles."""

from __future__ import annotations

from ....quant.scheme import PER_CHANNEL, IntScheme, Scheme


def half_run(scheme: IntScheme, in_features: int) -> int | None:
    """Inputs in half a run, all of one group: as many as fit; None: too few do."""
    group = in_features if scheme.group_size == PER_CHANNEL else scheme.group_size
    halves = 8 // scheme.bits
    fitting = (
        half for half in (64, 32, 16) if not group % half and not in_features % (half * halves)
    )
    return next(fitting, None)


def refuses_layout(scheme: Scheme, in_features: int) -> str | None:
    """Why such a weight does not fit, or None."""
    if not isinstance(scheme, IntScheme) or scheme.permuted or scheme.bits not in (4, 8):
        return f"it is for integers of 4 or 8 bits in groups of neighbours, not {scheme.label}"
    if half_run(scheme, in_features) is None:
        return f"it wants groups of a multiple of 16 inputs that halves of a run fit, not {scheme.label}"
    return None
