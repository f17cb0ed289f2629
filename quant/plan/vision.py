"""Vision towers and projectors in a plan: their linears, and those that the formats cannot hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ..base.errors import BadInput
from ..base.scheme import Scheme
from ..kinds.base.format import WeightFormat, config_of
from ..model.architecture import Architecture
from ..model.checkpoint import Checkpoint
from ..model.parameters import by_kind
from ..model.vision_units import vision_architecture
from ..request.request import QuantizeRequest
from ..request.selection import Shapes, matrix_shape

_METHODS = ("rtn", "gptq", "awq", "fp8", "int8", "hqq", "nf4", "fp4", "nvfp4", "mxfp4")
_OPTION = "--quantize-vision"


def refuse_vision(request: QuantizeRequest, formats: Sequence[WeightFormat]) -> None:
    """Raises BadInput where the vision tower cannot be quantized with the other options."""
    reasons = {
        f"method {request.method} takes decoder layers alone; choose {', '.join(_METHODS)}": (
            request.method not in _METHODS
        ),
        "a GGUF file holds the language model, and llama.cpp wants the tower in another": any(
            weight_format.name == "gguf" for weight_format in formats
        ),
        "--stats keeps statistics of decoder layers: leave one of them out": request.stats
        is not None,
        "--asymmetric-calibration is of decoder layers: leave one of them out": (
            request.options.asymmetric
        ),
        "--rotate turns the language model alone: leave one of them out": bool(request.rotations),
    }
    for reason, holds in reasons.items():
        if holds:
            raise BadInput(f"{_OPTION}: {reason}")


def vision_layers(checkpoint: Checkpoint, family: str) -> Architecture:
    """The layers of the vision side.

    Raises:
        BadInput: there is none.
    """
    layers = vision_architecture(checkpoint, family)
    if layers is None:
        raise BadInput(f"{_OPTION}: {checkpoint.folder} ({family}) has no vision tower")
    return layers


def vision_linears(checkpoint: Checkpoint, layers: Architecture | None) -> Shapes:
    """Shapes `(out, in)` of the linears of the vision tower and projector."""
    return (
        {}
        if layers is None
        else {
            name: matrix_shape(checkpoint, name)
            for index, family in enumerate(layers.layers)
            for linear in family.linears
            for name in [f"{layers.layer_prefix(index)}.{linear}"]
        }
    )


def vision_misfits(
    formats: Sequence[WeightFormat],
    modules: Shapes,
    schemes: Mapping[str, Scheme],
    vision: Collection[str],
) -> tuple[str, ...]:
    """The vision linears that a format cannot hold, for their widths or beside the schemes of the text."""
    misfits = [
        name
        for name in modules
        if name in vision and not all(_fits(f, name, modules, schemes[name]) for f in formats)
    ]
    text = {name: scheme for name, scheme in schemes.items() if name not in vision}
    for weight_format in formats:
        for scheme in dict.fromkeys(schemes[name] for name in vision if name in schemes):
            try:
                config_of(weight_format, {**text, "vision": scheme}, (), None, "tensor")
            except BadInput:
                misfits += [
                    name
                    for name in modules
                    if name in vision and schemes[name] == scheme and name not in misfits
                ]
    return tuple(misfits)


def _fits(weight_format: WeightFormat, name: str, modules: Shapes, scheme: Scheme) -> bool:
    try:
        weight_format.check_scheme(scheme)
        weight_format.check(name, *modules[name], scheme)
    except BadInput:
        return False
    return True


def misfit_notes(misfits: Sequence[str]) -> list[str]:
    """A note about the vision linears that stay."""
    if not misfits:
        return []
    return [
        f"note: {len(misfits)} linears of the vision side stay as they are, for the format does not hold "
        f"their widths: {', '.join(by_kind(misfits))}"
    ]
