"""ggml's blocks of every type: quantization, dequantization, and codes as bytes (in C where it compiles)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial

import torch

from ...base.build import beside, fields
from ...base.errors import BadInput
from ..base.tensor import require_finite
from .k_blocks import (
    affine_fields,
    dequantize_affine,
    dequantize_q2,
    dequantize_q3,
    dequantize_signed,
    q2_fields,
    q3_fields,
    quantize_k,
    signed_fields,
)
from .lattice import LATTICES, dequantize_lattice, quantize_lattice
from .scheme import GGUF_BLOCKS
from .small_blocks import (
    dequantize_iq4_nl,
    dequantize_iq4_xs,
    dequantize_mxfp4,
    dequantize_simple,
    quantize_simple,
    quantize_table,
    simple_codes,
    table_codes,
)

# Weights per chunk: the search's temporaries stay in the processor's cache.
_CHUNK_WEIGHTS = 2**17
_LARGEST = torch.finfo(torch.float16).max


def quantize_blocks(
    weight: torch.Tensor,
    type_name: str,
    importance: torch.Tensor | None = None,
    *,
    name: str = "weight",
) -> torch.Tensor:
    """Quantize a weight to blocks along its rows.

    Args:
        weight: float `[out, in]`; the block width divides `in`.
        importance: importance matrix, `[in]`, such as mean squares of the inputs; weights K-quants' errors.
        name: the weight's name in error messages.

    Returns:
        uint8 `[out, row bytes]`.

    Raises:
        BadInput: NaN, infinite or too large weights, or rows that are no whole blocks.
    """
    out_features, in_features = weight.shape
    width, block_bytes = GGUF_BLOCKS[type_name]
    if in_features % width:
        raise BadInput(f"{name}: {type_name} has blocks of {width}, which {in_features} is not in")
    rows_at_once = max(1, _CHUNK_WEIGHTS // in_features)
    per_row = None if importance is None else _usable_importance(importance)
    packed = torch.empty(
        out_features, in_features // width * block_bytes, dtype=torch.uint8, device=weight.device
    )
    for begin in range(0, out_features, rows_at_once):
        rows = weight[begin : begin + rows_at_once].to(torch.float32).contiguous()
        check_values(rows, type_name, name)
        spread = None if per_row is None else per_row.expand_as(rows).reshape(-1, width)
        blocks = _quantize(rows.view(-1, width), type_name, spread)
        packed[begin : begin + rows_at_once] = blocks.view(rows.shape[0], -1)
    return packed


def check_values(weight: torch.Tensor, type_name: str, name: str) -> None:
    """Raises BadInput naming a weight with NaN, infinite or too large values."""
    require_finite(weight, name)
    if bool((weight.abs() > _LARGEST).any()):
        raise BadInput(f"{name} holds values too large for the float16 scales of {type_name}")


def dequantize_blocks(data: torch.Tensor, type_name: str) -> torch.Tensor:
    """Dequantize uint8 `[out, row bytes]` to float32 `[out, in]`."""
    _, block_bytes = GGUF_BLOCKS[type_name]
    blocks = data.reshape(-1, block_bytes)
    return _DEQUANTIZE[type_name](blocks).view(data.shape[0], -1)


_DEQUANTIZE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{
        name: partial(dequantize_simple, type_name=name)
        for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
    },
    "Q2_K": dequantize_q2,
    "Q3_K": dequantize_q3,
    "Q4_K": partial(dequantize_affine, bits=4),
    "Q5_K": partial(dequantize_affine, bits=5),
    "Q6_K": dequantize_signed,
    "IQ4_NL": dequantize_iq4_nl,
    "IQ4_XS": dequantize_iq4_xs,
    "MXFP4": dequantize_mxfp4,
    **{name: partial(dequantize_lattice, type_name=name) for name in LATTICES},
}


def _quantize(
    blocks: torch.Tensor, type_name: str, importance: torch.Tensor | None
) -> torch.Tensor:
    if type_name.endswith("_K"):
        return quantize_k(blocks, type_name, importance)
    if type_name in LATTICES:
        return quantize_lattice(blocks, type_name, importance)
    if type_name.startswith(("IQ4", "MXFP4")):
        return quantize_table(blocks, type_name, importance)
    return quantize_simple(blocks, type_name, importance)


def _usable_importance(importance: torch.Tensor) -> torch.Tensor | None:
    """Normalized to mean 1 and bounded away from 0, so that never-activated channels keep good codes."""
    importance = importance.to(torch.float32)
    mean = float(importance.mean())
    return (importance / mean).clamp(min=1e-4) if mean > 0 else None


RUN = 32
LAYOUTS: dict[str, tuple[int, int]] = {
    "Q4_0": (0, 2),
    "Q4_1": (0, 4),
    "IQ4_NL": (0, 2),
    "IQ4_XS": (0, 8),
    "MXFP4": (0, 1),
    "Q5_0": (1, 6),
    "Q5_1": (1, 8),
    "Q8_0": (2, 2),
    "Q4_K": (3, 16),
    "Q5_K": (4, 48),
    "Q6_K": (5, 0),
    "Q2_K": (6, 16),
    "Q3_K": (7, 32),
}
"""The layout in `codes.h`, and the byte of a block where the low bits of its codes begin."""


class Blocks(ctypes.Structure):
    """`Blocks` of `codes.h`."""

    _fields_ = [(name, ctypes.c_int64) for name in ("size", "runs", "layout", "at")]


class _CodesCall(ctypes.Structure):
    """`CodesCall` of `codes.c`."""

    _fields_ = [
        *fields(pointers="data codes"),
        ("blocks", Blocks),
        *fields(numbers="count threads"),
        ("next", ctypes.c_long),
    ]


def blocks_of(kind: str) -> Blocks:
    """How the C kernels read the codes of a type's blocks."""
    width, size = GGUF_BLOCKS[kind]
    return Blocks(size, width // RUN, *LAYOUTS[kind])


native_codes = beside(__file__, "codes.c")
"""The compiled unpacking, or the reason why there is none."""


def block_codes(data: torch.Tensor, kind: str) -> torch.Tensor:
    """The codes of blocks `[n, bytes]` of a type, uint8 `[n, width]`; signed ones (Q8_0) plus 128."""
    library = native_codes().library if data.device.type == "cpu" else None
    if library is None:
        return block_codes_torch(data, kind)
    data = data.contiguous()
    blocks, count = blocks_of(kind), len(data)
    codes = torch.empty(count, blocks.runs * RUN, dtype=torch.uint8)
    pointers = data.data_ptr(), codes.data_ptr()
    call = _CodesCall(*pointers, blocks, count, torch.get_num_threads())
    library.llmopt_codes(ctypes.byref(call))
    return codes


def block_codes_torch(data: torch.Tensor, kind: str) -> torch.Tensor:
    """The same in torch, on any device."""
    if kind == "Q8_0":
        return data[:, 2:] ^ 128
    if kind in ("IQ4_NL", "IQ4_XS", "MXFP4"):
        return table_codes(data, LAYOUTS[kind][1])
    if not kind.endswith("_K"):
        return simple_codes(data, kind)
    fields = {"Q2_K": q2_fields, "Q3_K": q3_fields, "Q6_K": signed_fields}
    codes = fields[kind](data)[0] if kind in fields else affine_fields(data, int(kind[1]))[0]
    return codes.flatten(1)
