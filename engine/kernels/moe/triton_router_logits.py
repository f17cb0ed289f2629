# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
"""Router logits in Triton: 16-bit rows times a float32 weight, without a float32 copy of the rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional

FEW_TOKENS = 64
"""Tokens up to which a program's tile of experts meets all of them; beyond, cuBLAS multiplies."""
TOKENS, EXPERTS, RUN = 16, 16, 128


@triton.jit(do_not_specialize=["tokens"])
def _router_logits(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    tokens,
    experts,
    size,
    x_row,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    RUN: tl.constexpr,
):
    """Grid: tiles of experts, tiles of tokens. Three TF32 products make a float32 one."""
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_token, is_expert = token < tokens, expert < experts
    total = tl.zeros([TOKENS, EXPERTS], tl.float32)
    for begin in range(0, size, RUN):
        lane = begin + tl.arange(0, RUN)
        place = x_ptr + token.to(tl.int64)[:, None] * x_row + lane[None, :]
        x = tl.load(place, mask=is_token[:, None] & (lane < size)[None, :], other=0.0)
        place = weight_ptr + expert[None, :] * size + lane[:, None]
        weight = tl.load(place, mask=is_expert[None, :] & (lane < size)[:, None], other=0.0)
        total = tl.dot(x.to(tl.float32), weight, total, input_precision="tf32x3")
    if HAS_BIAS:
        total += tl.load(bias_ptr + expert, mask=is_expert, other=0.0)[None, :]
    place = out_ptr + token[:, None] * experts + expert[None, :]
    tl.store(place, total, mask=is_token[:, None] & is_expert[None, :])


def router_logits(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`x [tokens, hidden] @ weight.T + bias` in float32, [tokens, experts]; weight and bias are float32."""
    tokens, experts = x.shape[0], weight.shape[0]
    if tokens > FEW_TOKENS or x.dtype is torch.float32 or x.stride(1) != 1:
        return functional.linear(x.float(), weight, bias)
    out = weight.new_empty(tokens, experts)
    if tokens:
        _router_logits[(-(-experts // EXPERTS), -(-tokens // TOKENS))](
            x,
            weight,
            out if bias is None else bias,
            out,
            tokens,
            experts,
            weight.shape[1],
            x.stride(0),
            HAS_BIAS=bias is not None,
            TOKENS=TOKENS,
            EXPERTS=EXPERTS,
            RUN=RUN,
            num_warps=4,
        )
    return out
