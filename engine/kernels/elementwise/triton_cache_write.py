# pyright: reportCallIssue=false, reportPossiblyUnboundVariable=false
"""KV-cache writes in Triton, with norms and RoPE: of stacked queries, keys and values, or of latents."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import triton
import triton.language as tl

from ..attention.paged_tensor import LARGEST_CODE, PagedTensor
from ..common.devices import dependent_launch, or_unread, power_of_two
from ..common.triton_language import await_predecessor
from .reference import RopeCall

HEADS = tl.constexpr(8)
"""Heads per program."""


def _largest(paged: PagedTensor) -> float:
    """The code of a vector's largest element; 0 where vectors have no scales."""
    return 0.0 if paged.scales is None else LARGEST_CODE[paged.codes.dtype]


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
    elif codes_ptr.dtype.element_ty == tl.float8e5:
        x = tl.minimum(tl.maximum(x, -57344.0), 57344.0)
    elif codes_ptr.dtype.element_ty == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x, -448.0), 448.0)
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
    LARGEST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: tokens, tiles of heads."""
    await_predecessor(PDL)
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
    if query_weight_ptr is not None:
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

    pointers = out_ptr + (token * NUM_HEADS + head[:, None]) * DIM + lanes[None, :]
    tl.store(pointers, rotated, mask=is_query[:, None] & is_lane[None, :])
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

    def __call__(self, call: RopeCall) -> torch.Tensor:
        stacked, num_heads, cos, sin, keys, values, slots, norms = call
        tokens, heads, dim = stacked.shape
        kv_heads = (heads - num_heads) // 2
        out = stacked.new_empty(tokens, num_heads, dim)
        if tokens:
            weights = (None, None) if norms is None else (norms.query, norms.key)
            _rope_and_cache[(tokens, -(-heads // HEADS.value))](
                *(stacked, out, cos.contiguous(), sin.contiguous(), slots),
                *(*weights, keys.codes, values.codes, keys.scales, values.scales),
                stacked.stride(0),
                *(*keys.codes.stride()[1:3], *values.codes.stride()[1:3]),
                0.0 if norms is None else norms.eps,
                NUM_HEADS=num_heads,
                KV_HEADS=kv_heads,
                DIM=dim,
                WIDTH=cos.shape[-1],
                BLOCK=power_of_two(dim),
                LARGEST=_largest(keys),
                **dependent_launch(stacked),
                num_warps=4,
            )
        return out


LATENT_HEADS = tl.constexpr(4)
"""Heads per program that assembles queries."""


@triton.jit
def _rope_source(lane, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Place of element `lane` of a half-split rotary vector."""
    HALF: tl.constexpr = ROPE // 2
    return (lane % HALF) * 2 + lane // HALF if INTERLEAVED else lane


@triton.jit
def _rotated(pointers, lane, is_rope, turns, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The elements `lane` of vectors that begin at `place`, rotated, in float32; `turns`: its cos and sin."""
    cos_ptr, sin_ptr = turns
    partner = (lane + ROPE // 2) % ROPE
    x = tl.load(pointers + _rope_source(lane, ROPE, INTERLEAVED), mask=is_rope, other=0.0)
    swapped = tl.load(pointers + _rope_source(partner, ROPE, INTERLEAVED), mask=is_rope, other=0.0)
    cos = tl.load(cos_ptr + lane, mask=is_rope, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + lane, mask=is_rope, other=0.0).to(tl.float32)
    return x.to(tl.float32) * cos + swapped.to(tl.float32) * sin


@triton.jit
def _normed(pointers, weight_ptr, lane, is_lane, eps, SIZE: tl.constexpr):
    """RMSNorm of the first `SIZE` elements from `place` on, rounded to their dtype."""
    x = tl.load(pointers + lane, mask=is_lane, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + lane, mask=is_lane, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None]
    return (x * factor * weight).to(pointers.dtype.element_ty)


@triton.jit
def _latent_and_cache(
    latent_ptr,
    latent_weight_ptr,
    query_ptr,
    query_weight_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    slot_ptr,
    key_ptr,
    key_scale_ptr,
    latent_row,
    query_row,
    key_slot,
    latent_eps,
    query_eps,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERY_RANK: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Grid: tokens, 2 where there are queries to norm: program 1 norms them, 0 writes the latent and key."""
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 1:
        # Names of its own: the compiler gives one that both branches assign a single type.
        lanes = tl.arange(0, QUERY_BLOCK)[None, :]
        is_query = lanes < QUERY_RANK
        given = query_ptr + token * query_row
        out = _normed(given, query_weight_ptr, lanes, is_query, query_eps, QUERY_RANK)
        tl.store(out_ptr + token * QUERY_RANK + lanes, out, mask=is_query)
    else:
        lane = tl.arange(0, BLOCK)[None, :]
        is_latent, is_lane = lane < RANK, lane < RANK + ROPE
        row = latent_ptr + token * latent_row
        latent = _normed(row, latent_weight_ptr, lane, is_latent, latent_eps, RANK)
        turned = tl.maximum(lane - RANK, 0)
        is_rope = is_lane & (lane >= RANK)
        turns = cos_ptr + token * ROPE, sin_ptr + token * ROPE
        key = _rotated(row + RANK, turned, is_rope, turns, ROPE, INTERLEAVED)
        both = tl.where(is_latent, latent, key.to(latent.dtype)).to(tl.float32)
        slot = tl.load(slot_ptr + token) + tl.arange(0, 1)
        at = slot[:, None] * key_slot + lane
        write_heads(key_ptr, key_scale_ptr, at, slot, both, slot >= 0, is_lane, LARGEST)


@triton.jit(do_not_specialize=["absorbed_head", "absorbed_row", "rope_row"])
def _latent_queries(
    absorbed_ptr,
    rope_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    absorbed_head,
    absorbed_row,
    rope_row,
    rope_head,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Write `[absorbed, rotated]`. Grid: tokens, tiles of heads."""
    token = tl.program_id(0).to(tl.int64)
    # The absorbed rows of all tokens of a head lie together: beyond 2^31 elements for long prompts.
    head = tl.program_id(1) * LATENT_HEADS + tl.arange(0, LATENT_HEADS)[:, None]
    head = head.to(tl.int64)
    lane = tl.arange(0, BLOCK)[None, :]
    is_head = head < NUM_HEADS
    is_latent = is_head & (lane < RANK)
    is_rope = is_head & (lane >= RANK) & (lane < RANK + ROPE)
    pointers = absorbed_ptr + head * absorbed_head + token * absorbed_row + lane
    absorbed = tl.load(pointers, mask=is_latent, other=0.0)
    pointers = rope_ptr + token * rope_row + head * rope_head
    turns = cos_ptr + token * ROPE, sin_ptr + token * ROPE
    rotated = _rotated(pointers, tl.maximum(lane - RANK, 0), is_rope, turns, ROPE, INTERLEAVED)
    out = tl.where(is_latent, absorbed, rotated.to(absorbed.dtype))
    pointers = out_ptr + (token * NUM_HEADS + head) * (RANK + ROPE) + lane
    tl.store(pointers, out, mask=is_latent | is_rope)


def _latent_sizes(rank: int, rope: int, interleaved: bool) -> dict[str, Any]:
    block = power_of_two(rank + rope)
    return {"RANK": rank, "ROPE": rope, "BLOCK": block, "INTERLEAVED": interleaved}


class TritonLatent:
    """Fused norms, RoPE and cache write of latents, and assembly of their queries."""

    def write(
        self,
        latent: torch.Tensor,
        latent_norm: tuple[torch.Tensor, float],
        queries: torch.Tensor | None,
        query_norm: tuple[torch.Tensor, float] | None,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        interleaved: bool,
        keys: PagedTensor,
        slots: torch.Tensor,
    ) -> torch.Tensor | None:
        """Norm and rotate `latent` [tokens, rank + rope] into its slots; returns the normed `queries`."""
        tokens, rank, rope = len(latent), len(latent_norm[0]), cos_sin[0].shape[-1]
        cos, sin = cos_sin
        out = latent if queries is None else queries.new_empty(queries.shape)
        query_weight, query_eps = latent_norm if query_norm is None else query_norm
        if tokens:
            _latent_and_cache[(tokens, 1 if queries is None else 2)](
                *(latent, latent_norm[0], *or_unread(out, queries), query_weight, out),
                *(cos.contiguous(), sin.contiguous(), slots, keys.codes),
                *(keys.scales, latent.stride(0)),
                *(0 if queries is None else queries.stride(0), keys.codes.stride(1)),
                *(latent_norm[1], query_eps),
                **_latent_sizes(rank, rope, interleaved),
                QUERY_RANK=len(query_weight),
                QUERY_BLOCK=power_of_two(len(query_weight)),
                LARGEST=_largest(keys),
                num_warps=4,
            )
        return None if queries is None else out

    def queries(
        self,
        absorbed: torch.Tensor,
        rope_queries: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        interleaved: bool,
    ) -> torch.Tensor:
        """Join `absorbed` [heads, tokens, rank] and rotated `rope_queries`: [tokens, heads, rank + rope]."""
        tokens, heads, rope = rope_queries.shape
        rank = absorbed.shape[2]
        cos, sin = cos_sin
        out = absorbed.new_empty(tokens, heads, rank + rope)
        if tokens:
            _latent_queries[(tokens, -(-heads // LATENT_HEADS.value))](
                *(absorbed, rope_queries, out, cos.contiguous(), sin.contiguous()),
                *(*absorbed.stride()[:2], *rope_queries.stride()[:2]),
                NUM_HEADS=heads,
                **_latent_sizes(rank, rope, interleaved),
                num_warps=4,
            )
        return out
