"""Moving a quantized weight to another format's grid: exactly where possible, else requantized."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ..base.errors import BadInput
from ..base.scheme import PER_CHANNEL, Activations, Scheme
from ..formats.base import WeightFormat
from ..formats.gguf import as_blocks
from ..formats.gguf_fp4 import gguf_to_fp4
from ..formats.gguf_integer import gguf_to_int
from ..ggml.blocks import quantize_blocks
from ..grids.codebook_grid import round_to_codebook
from ..grids.e8p_grid import round_to_e8p
from ..grids.float_grid import round_to_fp8
from ..grids.fp4_grid import invertible, round_to_fp4
from ..grids.int_grid import round_to_nearest
from ..grids.lookup_grid import round_to_uniform_tables
from ..grids.trellis_grid import round_to_trellis
from ..grids.vectorwise_grid import round_to_rows
from ..kinds.codebook.scheme import CodebookScheme
from ..kinds.e8p.scheme import E8pScheme
from ..kinds.fp4.scheme import Fp4Scheme
from ..kinds.fp8.scheme import FloatScheme
from ..kinds.ggml.scheme import GgufScheme
from ..kinds.integer.scheme import IntScheme
from ..kinds.lookup.scheme import LookupScheme
from ..kinds.trellis.scheme import TrellisScheme
from ..kinds.vectorwise.scheme import VectorwiseScheme
from ..tensors.base import QuantizedTensor
from ..tensors.fp4 import Fp4Tensor
from ..tensors.fp8 import Fp8Tensor
from ..tensors.gguf import GgufTensor
from ..tensors.integer import IntTensor
from .fp4_forms import fp4_forms

_GROUPS = (128, 64, 32, PER_CHANNEL)
# Its reader accepts scales of any dtype, so they are not cast.
_KEEPS_SCALES = ("compressed-tensors",)
# It stores the reciprocals of FP4's global scales.
_INVERTS = ("modelopt",)


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
    plain = _without_activations(tensor)
    if plain is not tensor and (found := _exact(module, plain, target)[0]) is not None:
        return Requantized(found, reason=reason)
    weight = tensor.dequantize()
    if not bool(torch.isfinite(weight).all()):
        raise BadInput(f"{module} holds NaN or infinite values: the checkpoint is damaged")
    scheme = _nearest_scheme(module, tensor, target)
    rounded = round_weight(module, weight, scheme, target.scale_dtype(_scale_dtype(tensor), scheme))
    energy = float(weight.double().square().sum())
    lost = float((weight.double() - rounded.dequantize().double()).square().sum())
    return Requantized(rounded, lost / energy if energy else 0.0, reason)


def _exact(
    module: str, tensor: QuantizedTensor, target: WeightFormat
) -> tuple[QuantizedTensor | None, str]:
    """An exact equivalent on a grid of `target`, or the first reason why there is none."""
    reason = ""
    for form in _forms(tensor):
        try:
            _check(module, form.scheme, form, target)
            stored = _stored_as(form, target)
        except BadInput as error:
            reason = reason or str(error)
        else:
            return as_blocks(module, stored) if target.name == "gguf" else stored, ""
    return None, reason


def _check(module: str, scheme: Scheme, tensor: QuantizedTensor, target: WeightFormat) -> None:
    target.check_scheme(scheme)
    target.check(module, *tensor.shape, scheme)


def _forms(tensor: QuantizedTensor) -> Iterator[QuantizedTensor]:
    """`tensor` and its exact equivalents, the simplest first."""
    yield tensor
    if isinstance(tensor, GgufTensor) and tensor.scheme.type in ("Q4_0", "Q8_0"):
        yield from _integer_forms(_without_zero_scales(gguf_to_int(tensor)))
    elif isinstance(tensor, IntTensor):
        yield from _integer_forms(tensor)
    elif isinstance(tensor, GgufTensor) and tensor.scheme.type == "MXFP4":
        yield from fp4_forms(gguf_to_fp4(tensor))
    elif isinstance(tensor, Fp4Tensor):
        yield from fp4_forms(tensor)
    elif isinstance(tensor, Fp8Tensor) and tensor.scheme.granularity == "tensor":
        for granularity in ("channel", "block"):
            scheme = replace(tensor.scheme, granularity=granularity)
            scales = tensor.scales.expand(scheme.scale_shape(*tensor.shape)).contiguous()
            yield replace(tensor, scales=scales, scheme=scheme)


def _integer_forms(tensor: IntTensor) -> Iterator[IntTensor]:
    tensor = _in_order(tensor)
    yield tensor
    scheme = tensor.scheme
    if scheme.symmetric:
        yield replace(tensor, scheme=replace(scheme, symmetric=False))
    elif bool((tensor.zeros == scheme.middle).all()):
        yield replace(tensor, scheme=replace(scheme, symmetric=True))


def _in_order(tensor: IntTensor) -> IntTensor:
    """Drop a group index that equals the sequential one."""
    if tensor.group_index is None:
        return tensor
    order = torch.arange(tensor.in_features) // (tensor.in_features // tensor.num_groups)
    if not torch.equal(tensor.group_index, order.to(torch.int32)):
        return tensor
    return replace(tensor, group_index=None, scheme=replace(tensor.scheme, permuted=False))


def _without_zero_scales(tensor: IntTensor) -> IntTensor:
    """All-zero groups as zero codes: ggml writes a scale of 0, which other readers reject."""
    dead = tensor.scales == 0
    members = dead.repeat_interleave(tensor.in_features // tensor.num_groups, dim=1)
    return replace(
        tensor,
        codes=tensor.codes.masked_fill(members, tensor.scheme.middle),
        scales=tensor.scales.masked_fill(dead, 1),
    )


def _without_activations(tensor: QuantizedTensor) -> QuantizedTensor:
    """The same weight with 16-bit activations."""
    kinds = IntTensor | Fp8Tensor | Fp4Tensor
    if not isinstance(tensor, kinds) or tensor.scheme.activations is None:
        return tensor
    scheme = replace(tensor.scheme, activations=None)
    return replace(tensor, scheme=scheme, input_scale=None)  # pyright: ignore[reportArgumentType]


def _stored_as(tensor: QuantizedTensor, target: WeightFormat) -> QuantizedTensor:
    """`tensor` with its scales in the dtype of the format; BadInput where that changes one.

    A global scale whose reciprocal does not lead back to it changes by the last bit of its float32, as in
    compressed-tensors' own converter.
    """
    if isinstance(tensor, Fp4Tensor) and target.name in _INVERTS:
        wholes = {"global_scale": tensor.global_scale, "input_scale": tensor.input_scale}
        stored = {name: invertible(scale) for name, scale in wholes.items() if scale is not None}
        return replace(tensor, **stored)
    if not isinstance(tensor, IntTensor | Fp8Tensor) or target.name in _KEEPS_SCALES:
        return tensor
    dtype = target.scale_dtype(tensor.scales.dtype, tensor.scheme)
    scales = tensor.scales.to(dtype)
    if not torch.equal(scales.to(torch.float32), tensor.scales.to(torch.float32)):
        theirs, ours = (str(kind).removeprefix("torch.") for kind in (tensor.scales.dtype, dtype))
        raise BadInput(f"its {theirs} scales are not exact in the format's {ours}")
    return replace(tensor, scales=scales)


def _scale_dtype(tensor: QuantizedTensor) -> torch.dtype:
    """The 16-bit dtype that the model most likely uses."""
    scales = tensor.parts().get("scales")
    return torch.float16 if scales is not None and scales.dtype == torch.float16 else torch.bfloat16


def _nearest_scheme(module: str, tensor: QuantizedTensor, target: WeightFormat) -> Scheme:
    """The scheme of `target` that is closest to that of `tensor`."""
    source = tensor.scheme
    wanted: list[Scheme] = []
    group = source.group_size if isinstance(source, IntScheme) else PER_CHANNEL
    first = getattr(source, "symmetric", True)
    for bits in dict.fromkeys((source.bits, 4 if source.bits <= 4 else 8, 4)):
        wanted += [
            IntScheme(bits, size, symmetric)
            for size in dict.fromkeys(
                (group, *_GROUPS) if isinstance(source, IntScheme) else _GROUPS
            )
            for symmetric in (first, not first)
        ]
    by_width: list[Scheme] = [
        CodebookScheme("nf4"),
        GgufScheme("Q4_0"),
        VectorwiseScheme(),
        GgufScheme("Q8_0"),
        FloatScheme("block", Activations("fp8", "group128")),
        FloatScheme("block"),
    ]
    wanted += by_width if source.bits <= 4 else [*by_width[2:], *by_width[:2]]
    if isinstance(source, Fp4Scheme):
        wanted.insert(0, GgufScheme("IQ4_NL"))  # of ggml's types of as many bits it errs least
    wanted += [TrellisScheme(source.bits), E8pScheme(min(max(2, source.bits), 4))]
    for scheme in wanted:
        try:
            _check(module, scheme, tensor, target)
            return scheme
        except BadInput:
            continue
    raise BadInput(
        f"{module}: format {target.name} has no grid for {source.label} weights of "
        f"{tensor.out_features} × {tensor.in_features}"
    )


def round_weight(
    module: str, weight: torch.Tensor, scheme: Scheme, dtype: torch.dtype
) -> QuantizedTensor:
    """Data-free quantization (RTN) of a weight `[out, in]`; `dtype` is that of the scales, if free.

    Raises:
        BadInput: the weight does not fit into the scheme; `module` is named.
    """
    if isinstance(scheme, IntScheme):
        return round_to_nearest(weight, scheme, dtype, name=module)
    if isinstance(scheme, FloatScheme):
        return round_to_fp8(weight, scheme, dtype, name=module)
    if isinstance(scheme, CodebookScheme):
        return round_to_codebook(weight, scheme)
    if isinstance(scheme, Fp4Scheme):
        return round_to_fp4(weight, scheme, name=module)
    if isinstance(scheme, VectorwiseScheme):
        return round_to_rows(weight, scheme, name=module)
    if isinstance(scheme, LookupScheme):
        return round_to_uniform_tables(weight, scheme, name=module)
    if isinstance(scheme, E8pScheme):
        return round_to_e8p(weight, scheme, name=module)
    if isinstance(scheme, TrellisScheme):
        return round_to_trellis(weight, scheme, name=module)
    return GgufTensor(quantize_blocks(weight, scheme.type, name=module), scheme)
