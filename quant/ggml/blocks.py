"""Quantization to ggml blocks and dequantization, for every block type."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..base.errors import BadInput
from ..kinds.ggml.scheme import GGUF_BLOCKS
from .k_blocks import dequantize_affine, dequantize_signed
from .k_quants import quantize_k
from .k_small_blocks import dequantize_q2, dequantize_q3
from .lattice_blocks import dequantize_lattice, quantize_lattice
from .lattice_tables import LATTICES
from .simple_blocks import dequantize_simple, quantize_simple
from .table_blocks import (
    dequantize_iq4_nl,
    dequantize_iq4_xs,
    dequantize_mxfp4,
    quantize_table,
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
    if not bool(torch.isfinite(weight).all()):
        raise BadInput(f"{name} holds NaN or infinite values: the checkpoint is damaged")
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
