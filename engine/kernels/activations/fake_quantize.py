"""Rounding the input of a linear to eight bits, as schemes with quantized activations ask for.

A token's result depends on that token alone, so that a request's output never depends on what shares
its batch. Two schemes are read more finely than their authors wrote them for that reason: a dynamic
scale "for the tensor" is taken for every token, and an outlier column of LLM.int8() is one of the
token's own.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from ....quant.base.scheme import Activations, Scheme, VectorwiseScheme
from ....quant.tensors.fp8 import E4M3_MAX

RUN = 128
"""Input channels that share a scale with the granularity `group128`; the last run may be shorter."""


def fake_quantize_inputs(
    x: torch.Tensor, scheme: Scheme, input_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """What an 8-bit kernel for `scheme` would see of `x [tokens, in]`, back in `x`'s dtype.

    Args:
        input_scale: float32 `[1]`, for static activations.
    """
    if isinstance(scheme, VectorwiseScheme):
        codes, scale, outliers = split_outliers(x, scheme.threshold)
        return (codes * scale + outliers).to(x.dtype)
    if scheme.activations is None:
        return x
    return fake_quantize_activations(x, scheme.activations, input_scale)


def fake_quantize_activations(
    x: torch.Tensor, activations: Activations, input_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """`x` on the grid of `activations`, with compressed-tensors' ranges.

    They are `max|x| / 127.5` for int8, whose codes go from -128 to 127, and `max|x| / 448` for e4m3.
    """
    values = x.to(torch.float32)
    if activations.granularity == "group128":
        values = functional.pad(values, (0, -x.shape[-1] % RUN)).unflatten(-1, (-1, RUN))
    scale = _scale(values, activations, input_scale)
    if activations.kind == "int8":
        quantized = _int8_codes(values, scale)
    else:
        scaled = (values / scale).clamp(-E4M3_MAX, E4M3_MAX)
        quantized = scaled.to(torch.float8_e4m3fn).to(torch.float32)
    return (quantized * scale).view(*x.shape[:-1], -1)[..., : x.shape[-1]].to(x.dtype)


def int8_inputs(
    x: torch.Tensor, activations: Activations, input_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same int8 grid as codes for an integer kernel: int8 `[tokens, in]`, and their scale.

    Returns:
        The codes and float32 scales, `[tokens, 1]` or for static activations `[1]`. Runs of 128
        channels have no such form, since their products cannot be added as integers.
    """
    values = x.to(torch.float32)
    scale = _scale(values, activations, input_scale)
    return _int8_codes(values, scale).to(torch.int8), scale


def split_outliers(
    x: torch.Tensor, threshold: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """LLM.int8(): values from `threshold` up stay as they are, the rest of a token goes to int8.

    The int8 range is bitsandbytes', `max|x| / 127` of the values that are rounded. A threshold of 0
    rounds everything.

    Returns:
        Codes int8 `[tokens, in]`, 0 at outliers; float32 scales `[tokens, 1]`; float32 outliers
        `[tokens, in]`, 0 elsewhere.

    Source: Dettmers et al., "LLM.int8()", NeurIPS 2022 (arXiv:2208.07339).
    """
    values = x.to(torch.float32)
    small = values.abs() < threshold if threshold > 0 else torch.ones_like(values, dtype=torch.bool)
    rest = values.where(small, 0.0)
    scale = _nonzero(rest.abs().amax(dim=-1, keepdim=True) / 127)
    return torch.round(rest / scale).to(torch.int8), scale, values.where(~small, 0.0)


def _int8_codes(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Whole numbers in -128..127, still as floats."""
    return torch.round(values / scale).clamp_(-128, 127)


def _scale(
    values: torch.Tensor, activations: Activations, input_scale: torch.Tensor | None
) -> torch.Tensor:
    """One scale for every run along the last axis, or the one that calibration fixed."""
    if not activations.dynamic:
        assert input_scale is not None
        return input_scale.to(torch.float32)
    largest = values.abs().amax(dim=-1, keepdim=True)
    return _nonzero(largest / (127.5 if activations.kind == "int8" else E4M3_MAX))


def _nonzero(scale: torch.Tensor) -> torch.Tensor:
    """Scales to divide by: all-zero runs have 1."""
    return scale.where(scale > 0, 1.0)
