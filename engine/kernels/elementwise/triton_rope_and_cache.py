# pyright: reportCallIssue=false, reportPossiblyUnboundVariable=false
"""Fused RoPE + KV-cache write in Triton, with QK-norm: stacked queries, keys and values in one pass."""

from __future__ import annotations

from typing import ClassVar

import torch
import triton
import triton.language as tl

from ..attention.paged_tensor import LARGEST_CODE, PagedTensor
from ..common.runtime import power_of_two
from .head_norms import HeadNorms

HEADS = 8
"""Heads per program."""


@triton.jit
def write_heads(codes_ptr, scales_ptr, at, scale_at, x, is_head, mask, LARGEST: tl.constexpr):
    """Write vectors [HEADS, BLOCK] of a token to its slot, quantized as `PagedTensor.write` does."""
    if LARGEST > 0.0:
        largest = tl.max(tl.where(mask, tl.abs(x), 0.0), 1)
        scale = tl.maximum(largest / LARGEST, 1.1754943508222875e-38)
        tl.store(scales_ptr + scale_at, scale, mask=is_head)
        x = x / scale[:, None]
        x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
        if LARGEST == 127.0:
            # Adding 1.5 * 2**23 leaves a float32 no fraction bits: rounds half to even, as torch does.
            x = (x + 12582912.0) - 12582912.0
    tl.store(codes_ptr + at, x.to(codes_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rope_and_cache(
    stacked_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    slot_ptr,
    query_weight_ptr,
    key_weight_ptr,
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    stacked_row,
    key_slot,
    key_head,
    value_slot,
    value_head,
    eps,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Grid: tokens, tiles of heads."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lanes = tl.arange(0, BLOCK)
    is_query = head < NUM_HEADS
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + KV_HEADS)
    is_value = (head >= NUM_HEADS + KV_HEADS) & (head < NUM_HEADS + 2 * KV_HEADS)
    is_lane = lanes < DIM
    inside = (is_query | is_key | is_value)[:, None] & is_lane[None, :]
    row = stacked_ptr + token * stacked_row + head[:, None] * DIM
    x = tl.load(row + lanes[None, :], mask=inside, other=0.0)

    # The other element of a lane's pair; lanes beyond the width (partial rotary) pass through.
    partner = tl.where(lanes < WIDTH, (lanes + WIDTH // 2) % WIDTH, lanes)
    swapped = tl.load(row + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    rotated = x.to(tl.float32)
    if HAS_NORMS:
        factor = tl.rsqrt(tl.sum(rotated * rotated, 1) / DIM + eps)[:, None]
        of_query = tl.load(query_weight_ptr + lanes, mask=is_lane, other=0.0).to(tl.float32)
        of_key = tl.load(key_weight_ptr + lanes, mask=is_lane, other=0.0).to(tl.float32)
        weight = tl.where(is_query[:, None], of_query[None, :], of_key[None, :])
        rotated = (rotated * factor * weight).to(x.dtype).to(tl.float32)
        of_query = tl.load(query_weight_ptr + partner, mask=is_lane, other=0.0).to(tl.float32)
        of_key = tl.load(key_weight_ptr + partner, mask=is_lane, other=0.0).to(tl.float32)
        weight = tl.where(is_query[:, None], of_query[None, :], of_key[None, :])
        swapped = (swapped * factor * weight).to(x.dtype).to(tl.float32)
    is_rotated = lanes < WIDTH
    cos = tl.load(cos_ptr + token * WIDTH + lanes, mask=is_rotated, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * WIDTH + lanes, mask=is_rotated, other=0.0).to(tl.float32)
    rotated = (rotated * cos[None, :] + swapped * sin[None, :]).to(x.dtype)

    place = out_ptr + (token * NUM_HEADS + head[:, None]) * DIM + lanes[None, :]
    tl.store(place, rotated, mask=is_query[:, None] & is_lane[None, :])
    slot = tl.load(slot_ptr + token)
    kv_head = head - NUM_HEADS
    at = slot * key_slot + kv_head[:, None] * key_head + lanes[None, :]
    mask = is_key[:, None] & is_lane[None, :]
    scale_at = slot * KV_HEADS + kv_head
    write_heads(key_ptr, key_scale_ptr, at, scale_at, rotated.to(tl.float32), is_key, mask, LARGEST)
    kv_head = kv_head - KV_HEADS
    at = slot * value_slot + kv_head[:, None] * value_head + lanes[None, :]
    mask = is_value[:, None] & is_lane[None, :]
    scale_at = slot * KV_HEADS + kv_head
    write_heads(value_ptr, value_scale_ptr, at, scale_at, x.to(tl.float32), is_value, mask, LARGEST)


class TritonRopeAndCache:
    """Returns the rotated queries in a new tensor [tokens, heads, dim]; `stacked` is not modified."""

    takes_wide_weights: ClassVar[bool] = True

    def __call__(
        self,
        stacked: torch.Tensor,
        num_heads: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        keys: PagedTensor,
        values: PagedTensor,
        slots: torch.Tensor,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        tokens, heads, dim = stacked.shape
        kv_heads = (heads - num_heads) // 2
        out = stacked.new_empty(tokens, num_heads, dim)
        if tokens:
            _rope_and_cache[(tokens, -(-heads // HEADS))](
                stacked,
                out,
                cos.contiguous(),
                sin.contiguous(),
                slots,
                out if norms is None else norms.query,
                out if norms is None else norms.key,
                keys.codes,
                values.codes,
                out if keys.scales is None else keys.scales,
                out if values.scales is None else values.scales,
                stacked.stride(0),
                *keys.codes.stride()[1:3],
                *values.codes.stride()[1:3],
                0.0 if norms is None else norms.eps,
                NUM_HEADS=num_heads,
                KV_HEADS=kv_heads,
                DIM=dim,
                WIDTH=cos.shape[-1],
                BLOCK=power_of_two(dim),
                HEADS=HEADS,
                HAS_NORMS=norms is not None,
                LARGEST=LARGEST_CODE.get(keys.codes.dtype, 0.0),
                num_warps=4,
            )
        return out
