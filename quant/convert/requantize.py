"""Moving a quantized weight to another format's grid: exactly where possible, else requantized."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from operator import itemgetter

import torch

from ..base.errors import BadInput
from ..base.scheme import Scheme
from ..kinds.base.format import WeightFormat
from ..kinds.base.kind import kind_of
from ..kinds.base.tensor import QuantizedTensor
from ..kinds.registry import SCHEMES


@dataclass(frozen=True, slots=True)
class Requantized:
    """A weight on the target format's grid.

    Attributes:
        tensor: on a grid that the format holds.
        error: `|W - W'|² / |W|²`; 0 where the conversion is exact.
        reason: why it was requantized; empty if it was not.
    """

    tensor: QuantizedTensor
    error: float = 0.0
    reason: str = ""


def requantize(module: str, tensor: QuantizedTensor, target: WeightFormat) -> Requantized:
    """An equivalent of `tensor` that `target` can store, or its requantization.

    Raises:
        BadInput: the format has no grid for such a weight at all.
    """
    found, reason = _exact(module, tensor, target)
    if found is not None:
        return Requantized(found)
    plain = tensor.without_activations()
    if plain is not tensor and (found := _exact(module, plain, target)[0]) is not None:
        return Requantized(found, reason=reason)
    weight = tensor.dequantize()
    if not bool(torch.isfinite(weight).all()):
        raise BadInput(f"{module} holds NaN or infinite values: the checkpoint is damaged")
    scheme = _nearest_scheme(module, tensor, target)
    dtype = target.scale_dtype(_scale_dtype(tensor), scheme)
    rounded = kind_of(scheme).round(weight, dtype, name=module)
    energy = float(weight.double().square().sum())
    lost = float((weight.double() - rounded.dequantize().double()).square().sum())
    return Requantized(rounded, lost / energy if energy else 0.0, reason)


def _exact(
    module: str, tensor: QuantizedTensor, target: WeightFormat
) -> tuple[QuantizedTensor | None, str]:
    """An exact equivalent on a grid of `target`, or the first reason why there is none."""
    reason = ""
    for form in tensor.forms():
        try:
            _check(module, form.scheme, form, target)
            stored = form.stored_as(
                None
                if target.keeps_scale_dtypes
                else partial(target.scale_dtype, scheme=form.scheme),
                target.inverts_global_scales,
            )
        except BadInput as error:
            reason = reason or str(error)
        else:
            return target.held(module, stored), ""
    return None, reason


def _check(module: str, scheme: Scheme, tensor: QuantizedTensor, target: WeightFormat) -> None:
    target.check_scheme(scheme)
    target.check(module, *tensor.shape, scheme)


def _scale_dtype(tensor: QuantizedTensor) -> torch.dtype:
    """The 16-bit dtype that the model most likely uses."""
    scales = tensor.parts().get("scales")
    return torch.float16 if scales is not None and scales.dtype == torch.float16 else torch.bfloat16


def _nearest_scheme(module: str, tensor: QuantizedTensor, target: WeightFormat) -> Scheme:
    """The scheme of `target` that is closest to that of `tensor`."""
    source = tensor.scheme
    ranked = [pair for kind in SCHEMES for pair in kind.nearest_to(source)]
    for _, scheme in sorted(ranked, key=itemgetter(0)):
        try:
            _check(module, scheme, tensor, target)
            return scheme
        except BadInput:
            continue
    raise BadInput(
        f"{module}: format {target.name} has no grid for {source.label} weights of "
        f"{tensor.out_features} × {tensor.in_features}"
    )
