"""Norms, gated activations, RoPE and the KV-cache write: the interfaces of kernels, and references in torch.

Rotary position embedding (RoPE) is of half-split (NeoX) pairs (i, i + width / 2) of each head: Su et al.,
"RoFormer" (arXiv:2104.09864). QK-norm is RMSNorm of each query and key head before it (Qwen3, Gemma 3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch.nn import functional

from ..attention.paged_tensor import PagedTensor


def apply_rotary_emb(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys; elements of a head beyond `width` pass through (partial rotary).

    Args:
        x: [tokens, heads, head_dim].
        cos, sin: [tokens, 1, width], in x's dtype; the second half of `cos` repeats the first, and
            the first half of `sin` is the second's negative (`expand_cos_sin` makes them so).
    """
    width = cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat([apply_rotary_emb(x[..., :width], cos, sin), x[..., width:]], dim=-1)
    half = width // 2
    swapped = torch.cat([x[..., half:], x[..., :half]], dim=-1)
    return x * cos + swapped * sin


def interleaved_to_halves(x: torch.Tensor, width: int) -> torch.Tensor:
    """Reorder interleaved (GPT-J) pairs (2i, 2i + 1) of the first `width` elements to half-split (NeoX) ones,
    for `apply_rotary_emb`.

    Applied to queries and keys alike, it changes no attention score.
    """
    if width < x.shape[-1]:
        return torch.cat([interleaved_to_halves(x[..., :width], width), x[..., width:]], dim=-1)
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def expand_cos_sin(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Expand cos and sin [..., width / 2] to the full-width factors that `apply_rotary_emb` takes."""
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """QK-norm weights [head_dim] of queries and keys, in the dtype of the heads, or in float32
    for a kernel that takes wide weights."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float

    def apply(self, stacked: torch.Tensor, num_heads: int) -> None:
        """Norm the queries and keys of `stacked` [tokens, heads, dim] (queries, keys, values) in place."""
        kv_heads = (stacked.shape[1] - num_heads) // 2
        queries, keys, _ = stacked.split([num_heads, kv_heads, kv_heads], dim=1)
        for heads, weight in ((queries, self.query), (keys, self.key)):
            heads.copy_(functional.rms_norm(heads, weight.shape, weight, self.eps))


@runtime_checkable
class TakesWideWeights(Protocol):
    """A kernel that computes in float32: its norm weights may be float32 beside 16-bit rows (Gemma)."""

    takes_wide_weights: ClassVar[bool]


class NormKernel(Protocol):
    """RMSNorm of `x [rows, size]`, or fused add + RMSNorm of `x + added`: returns the sum and its norm."""

    def __call__(
        self, x: torch.Tensor, added: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class TorchNorm:
    """RMSNorm in torch."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight, self._eps = weight, eps

    def __call__(
        self, x: torch.Tensor, added: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x if added is None else x + added
        return x, functional.rms_norm(x, (x.shape[-1],), self._weight, self._eps)


GateKernel = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Gated activation: `activation(gate) * up`, of `[rows, size]` each."""


GatedActivation = Literal["silu", "gelu_tanh", "gelu", "clamped_swiglu"]


def torch_silu_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SiLU gate (SwiGLU) in torch."""
    return functional.silu(gate) * up


SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0


def torch_clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SwiGLU of gpt-oss: gate and up are clamped, and 1 is added to `up`."""
    gate = gate.clamp(max=SWIGLU_LIMIT)
    up = up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * SWIGLU_ALPHA))


TORCH_GATES: dict[GatedActivation, GateKernel] = {
    "silu": torch_silu_gate,
    "gelu_tanh": lambda gate, up: functional.gelu(gate, approximate="tanh") * up,
    "gelu": lambda gate, up: functional.gelu(gate) * up,
    "clamped_swiglu": torch_clamped_swiglu,
}


class RopeCall(NamedTuple):
    """The arguments of fused RoPE + KV-cache write.

    Attributes:
        stacked: [tokens, heads, dim], queries, keys and values; may be overwritten.
        cos, sin: as `apply_rotary_emb` takes them.
        norms: QK-norm, which is applied before the rotation.
    """

    stacked: torch.Tensor
    num_heads: int
    cos: torch.Tensor
    sin: torch.Tensor
    keys: PagedTensor
    values: PagedTensor
    slots: torch.Tensor
    norms: HeadNorms | None = None


RopeAndCacheKernel = Callable[[RopeCall], torch.Tensor]
"""Fused RoPE + KV-cache write, optionally with QK-norm; returns the rotated queries."""


class TorchRopeAndCache:
    """RoPE and KV-cache write as separate torch operations: the reference."""

    def __call__(self, call: RopeCall) -> torch.Tensor:
        stacked, num_heads, cos, sin, keys, values, slots, norms = call
        if norms is not None:
            norms.apply(stacked, num_heads)
        kv_heads = (stacked.shape[1] - num_heads) // 2
        queries, new_keys, new_values = stacked.split([num_heads, kv_heads, kv_heads], dim=1)
        keys.write(apply_rotary_emb(new_keys, cos, sin), slots)
        values.write(new_values, slots)
        return apply_rotary_emb(queries, cos, sin)
