"""Dispatch of elementwise kernels: RMSNorm, gated activations, fused RoPE + KV-cache write (with QK-norm)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch.nn import functional

from ..attention.paged_tensor import PagedTensor
from ..common.dispatch import Candidate, Operation
from ..common.runtime import refuses_rows
from .head_norms import HeadNorms
from .native_layer import (
    CHANNELS,
    NativeGate,
    NativeNorm,
    NativeRopeAndCache,
    native_layer,
)
from .rotary import apply_rotary_emb
from .trials import gate_trial, norm_trial, rope_trial


@dataclass(frozen=True, slots=True)
class RowKernelQuery:
    """Kernel query of a row-wise kernel: device, dtype, and the row size (or the rotary dimension)."""

    device: str
    dtype: torch.dtype
    size: int

    def __str__(self) -> str:
        return f"rows of {self.size} in {self.dtype} on {self.device}"


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


def _torch_gelu_gate(is_tanh: bool) -> GateKernel:
    approximate = "tanh" if is_tanh else "none"
    return lambda gate, up: functional.gelu(gate, approximate=approximate) * up


class RopeAndCacheKernel(Protocol):
    """Fused RoPE + KV-cache write, optionally with QK-norm; returns the rotated queries.

    `stacked` [tokens, heads, dim] holds queries, keys and values, and may be overwritten; `cos` and `sin` are
    as `apply_rotary_emb` takes them. `norms` are applied before the rotation.
    """

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
    ) -> torch.Tensor: ...


class TorchRopeAndCache:
    """RoPE and KV-cache write as separate torch operations: the reference."""

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
        if norms is not None:
            norms.apply(stacked, num_heads)
        kv_heads = (stacked.shape[1] - num_heads) // 2
        queries, new_keys, new_values = stacked.split([num_heads, kv_heads, kv_heads], dim=1)
        keys.write(apply_rotary_emb(new_keys, cos, sin), slots)
        values.write(new_values, slots)
        return apply_rotary_emb(queries, cos, sin)


def _refuses(kernel_query: RowKernelQuery, channels: int = 1) -> str | None:
    if kernel_query.device != "cpu":
        return "it is a CPU kernel"
    if (reason := native_layer().reason) is not None:
        return reason
    if kernel_query.dtype not in (torch.bfloat16, torch.float32):
        return f"it takes bfloat16 and float32, not {kernel_query.dtype}"
    if kernel_query.size % channels:
        return f"it is for multiples of {channels} elements"
    return None


def _refuses_norm(kernel_query: RowKernelQuery) -> str | None:
    return _refuses(kernel_query, CHANNELS)


def _refuses_rope_and_cache(kernel_query: RowKernelQuery) -> str | None:
    return _refuses(kernel_query, 2 * CHANNELS)


def _refuses_triton(kernel_query: RowKernelQuery) -> str | None:
    return refuses_rows(kernel_query.device, kernel_query.dtype)


def _triton_norm(weight: torch.Tensor, eps: float) -> NormKernel:
    from .triton_norm import TritonNorm

    return TritonNorm(weight, eps)


def _triton_silu_gate() -> GateKernel:
    from .triton_gate import TritonGate

    return TritonGate("silu")


def _triton_gelu_gate(is_tanh: bool) -> GateKernel:
    from .triton_gate import TritonGate

    return TritonGate("gelu_tanh" if is_tanh else "gelu")


def _triton_clamped_swiglu() -> GateKernel:
    from .triton_gate import TritonGate

    return TritonGate("clamped_swiglu")


def _triton_rope_and_cache() -> RopeAndCacheKernel:
    from .triton_rope_and_cache import TritonRopeAndCache

    return TritonRopeAndCache()


NORM: Operation[RowKernelQuery, Callable[[torch.Tensor, float], NormKernel]] = Operation(
    "norm",
    [
        Candidate("triton", _refuses_triton, _triton_norm),
        Candidate("native", _refuses_norm, NativeNorm),
        Candidate("torch", lambda _: None, TorchNorm),
    ],
    lambda q: norm_trial(torch.device(q.device), q.dtype, q.size),
)
GATE: Operation[RowKernelQuery, Callable[[], GateKernel]] = Operation(
    "silu gate",
    [
        Candidate("triton", _refuses_triton, _triton_silu_gate),
        Candidate("native", _refuses, lambda: NativeGate("silu")),
        Candidate("torch", lambda _: None, lambda: torch_silu_gate),
    ],
    lambda q: gate_trial(torch.device(q.device), q.dtype, q.size, ()),
)
GELU_GATE: Operation[RowKernelQuery, Callable[[bool], GateKernel]] = Operation(
    "gelu gate",
    [
        Candidate("triton", _refuses_triton, _triton_gelu_gate),
        Candidate(
            "native", _refuses, lambda is_tanh: NativeGate("gelu_tanh" if is_tanh else "gelu")
        ),
        Candidate("torch", lambda _: None, _torch_gelu_gate),
    ],
    lambda q: gate_trial(torch.device(q.device), q.dtype, q.size, (True,), (False,)),
)
"""The candidates take whether to use the tanh approximation."""
CLAMPED_SWIGLU_GATE: Operation[RowKernelQuery, Callable[[], GateKernel]] = Operation(
    "clamped swiglu gate",
    [
        Candidate("triton", _refuses_triton, _triton_clamped_swiglu),
        Candidate("native", _refuses, lambda: NativeGate("clamped_swiglu")),
        Candidate("torch", lambda _: None, lambda: torch_clamped_swiglu),
    ],
)
ROPE_AND_CACHE: Operation[RowKernelQuery, Callable[[], RopeAndCacheKernel]] = Operation(
    "rotation and cache write",
    [
        Candidate("triton", _refuses_triton, _triton_rope_and_cache),
        Candidate("native", _refuses_rope_and_cache, NativeRopeAndCache),
        Candidate("torch", lambda _: None, TorchRopeAndCache),
    ],
    lambda q: rope_trial(torch.device(q.device), q.dtype, q.size),
)
