"""Row kernels on CPU, ctypes bindings of C: RMSNorm, gated activations, RoPE + KV-cache write (`layer.c`),
token embeddings and cos/sin (`rows.c`), argmax of logits (`argmax.c`), and `advance_step`, the first launch
of a captured decode step (`advance_step.c`)."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch.nn import functional

from ....base.build import beside, fields
from ..common.graphs import addresses, launch, struct
from .reference import (
    ActivationQuant,
    GatedActivation,
    QuantizedActivations,
    RopeCall,
    expand_cos_sin,
)

CHANNELS = 16
"""Supported row sizes are multiples of this."""
_GRAIN = 32768
"""Elements below which a second thread does not pay off."""

# The structs of `layer.c` end with a work counter.
_QUANTIZED = struct("Quantized", "codes scales", "block", ("levels", ctypes.c_float))
_END = ("next", ctypes.c_long), ("failed", ctypes.c_int)
_Norm = struct(
    *("Norm", "", "", ("quantized", _QUANTIZED)),
    *fields("x added sum out weight", "rows size x_stride is_bf16 threads"),
    *(("eps", ctypes.c_float), *_END),
)
_Gate = struct(
    *("Gate", "", "", ("quantized", _QUANTIZED)),
    *fields("gate up out", "rows size stride is_bf16 activation threads"),
    *_END,
)
_RopeAndCache = struct(
    "RopeAndCache",
    "heads cos sin slots keys values key_scales value_scales",
    "rows stride queries kv_heads dim width key_stride value_stride is_bf16 cache_is_bf16 threads",
    *_END,
)

native_layer = beside(__file__, "layer.c")


def _empty_quantized(
    like: torch.Tensor, activation_quant: ActivationQuant
) -> tuple[QuantizedActivations, ctypes.Structure]:
    """Uninitialised int8 rows, and the C struct by which a kernel fills them."""
    (rows, size), block = like.shape, activation_quant.block
    codes = torch.empty(rows, size, dtype=torch.int8)
    scales = torch.empty(rows, -(-size // block) if block else 1, dtype=torch.float32)
    call = _QUANTIZED(*addresses(codes, scales), block, activation_quant.int8_levels)
    return QuantizedActivations(codes, scales), call


def _run(function: Any, call: ctypes.Structure) -> None:
    if launch(function, call):
        raise MemoryError("no memory for a quantized row")


def _threads(elements: int) -> int:
    return torch.get_num_threads() if elements > _GRAIN else 1


class NativeNorm:
    """RMSNorm over the last axis, of `x` or of `x + added`."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._function = native_layer().function("llmopt_norm")
        self._weight, self._eps = weight.contiguous(), eps

    def __call__(
        self, x: torch.Tensor, added: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`x [rows, size]` and, of the same shape, `added`; returns their sum and its norm."""
        out = x.new_empty(x.shape)
        return self._sum(x, added, _QUANTIZED(), out.data_ptr()), out

    def quantized(
        self, x: torch.Tensor, added: torch.Tensor | None, activation_quant: ActivationQuant
    ) -> tuple[torch.Tensor, QuantizedActivations]:
        """Sum, and norm in int8 with one scale per row or block."""
        rows, call = _empty_quantized(x, activation_quant)
        return self._sum(x, added, call, None), rows

    def _sum(
        self,
        x: torch.Tensor,
        added: torch.Tensor | None,
        quantized: ctypes.Structure,
        out: int | None,
    ) -> torch.Tensor:
        """Write the norm to `quantized` or to `out`; returns the sum."""
        if x.stride(1) != 1:
            x = x.contiguous()
        rows, size = x.shape
        total = x
        if added is not None:
            added, total = added.contiguous(), x.new_empty(rows, size)
        pointers = (*addresses(x, added, total), out, self._weight.data_ptr())
        is_bf16 = x.dtype is torch.bfloat16
        shape = rows, size, x.stride(0), is_bf16, _threads(rows * size)
        _run(self._function, _Norm(quantized, *pointers, *shape, self._eps))
        return total


ACTIVATIONS: tuple[GatedActivation, ...] = ("silu", "gelu_tanh", "gelu", "clamped_swiglu")
"""Names in the order of their numbers in `layer.c`."""


class NativeGate:
    """`activation(gate) * up`, of `[rows, size]` each, which may be slices of wider rows."""

    def __init__(self, activation: GatedActivation) -> None:
        self._function = native_layer().function("llmopt_gate")
        self.activation = ACTIVATIONS.index(activation)

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        out = gate.new_empty(gate.shape)
        self._fill(gate, up, _QUANTIZED(), out.data_ptr())
        return out

    def quantized(
        self, gate: torch.Tensor, up: torch.Tensor, activation_quant: ActivationQuant
    ) -> QuantizedActivations:
        """Result in int8, with one scale per row or block."""
        rows, call = _empty_quantized(gate, activation_quant)
        self._fill(gate, up, call, None)
        return rows

    def _fill(
        self, gate: torch.Tensor, up: torch.Tensor, quantized: ctypes.Structure, out: int | None
    ) -> None:
        if gate.stride() != up.stride() or gate.stride(1) != 1:
            gate, up = gate.contiguous(), up.contiguous()
        rows, size = gate.shape
        shape = rows, size, gate.stride(0), gate.dtype is torch.bfloat16
        numbers = *shape, self.activation, _threads(rows * size)
        _run(self._function, _Gate(quantized, *addresses(gate, up), out, *numbers))


class NativeRopeAndCache:
    """RoPE of queries and keys in place, and the KV-cache write: fused unless in fp8 or wider."""

    def __init__(self) -> None:
        self._function = native_layer().function("llmopt_rope_and_cache")

    def __call__(self, call: RopeCall) -> torch.Tensor:
        stacked, num_heads, cos, sin, keys, values, slots, norms = call
        if norms is not None:
            norms.apply(stacked, num_heads)
        rows, heads, dim = stacked.shape
        kv_heads = (heads - num_heads) // 2
        converted = () if dim % CHANNELS else (torch.int8, torch.bfloat16)
        written = {stacked.dtype, *converted}
        is_fused = all(
            p.codes.dtype in written and p.codes[0, 0].is_contiguous() for p in (keys, values)
        )
        codes = (keys.codes, values.codes) if is_fused else (None, None)
        launched = _RopeAndCache(
            *addresses(stacked, cos, sin, slots, *codes, keys.scales, values.scales),
            *(rows, stacked.stride(0), num_heads, kv_heads, dim, cos.shape[-1]),
            *(keys.codes.stride(1), values.codes.stride(1)),
            *(part.dtype is torch.bfloat16 for part in (stacked, keys.codes)),
            _threads(stacked.numel()),
        )
        _run(self._function, launched)
        if not is_fused:
            keys.write(stacked[:, num_heads : num_heads + kv_heads], slots)
            values.write(stacked[:, num_heads + kv_heads :], slots)
        return stacked[:, :num_heads]


# Structs of `rows.c`.
_EmbeddingCall = struct("EmbeddingCall", "table ids out", "rows bytes threads")

_CosSinCall = struct("CosSinCall", "cos sin positions cos_out sin_out", "rows half is_bf16")

native_rows = beside(__file__, "rows.c")


def embedding_rows(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows of `table` [vocab, width] for ids int64 [rows], as `torch.nn.functional.embedding`."""
    takes = ids.dtype is torch.int64 and ids.dim() == 1 and _on_cpu(table, ids)
    library = native_rows().library if takes else None
    if library is None:
        return functional.embedding(ids, table)
    out = table.new_empty(len(ids), table.shape[1])
    numbers = len(ids), table.shape[1] * table.itemsize, torch.get_num_threads()
    launch(library.llmopt_embedding, _EmbeddingCall(*addresses(table, ids, out), *numbers))
    return out


def cos_sin_rows(
    cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the float32 tables [positions, width / 2] for positions int64 [tokens], in the layout of
    `apply_rotary_emb`: two of [tokens, 1, width] in `dtype`."""
    known = dtype in (torch.bfloat16, torch.float32)
    library = native_rows().library if known and _on_cpu(cos, sin, positions) else None
    if library is None:
        rows = (table.index_select(0, positions).to(dtype).unsqueeze(1) for table in (cos, sin))
        return expand_cos_sin(*rows)
    half = cos.shape[1]
    cos_out, sin_out = (torch.empty(len(positions), 1, 2 * half, dtype=dtype) for _ in (cos, sin))
    pointers = addresses(cos, sin, positions, cos_out, sin_out)
    call = _CosSinCall(*pointers, len(positions), half, dtype is torch.bfloat16)
    launch(library.llmopt_cos_sin, call)
    return cos_out, sin_out


def _on_cpu(*tensors: torch.Tensor) -> bool:
    return all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors)


_ArgmaxCall = struct("ArgmaxCall", "logits tokens", "rows vocab threads")  # of `argmax.c`

native_argmax = beside(__file__, "argmax.c")


def argmax_rows(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Greedy tokens of float32 [rows, vocab], first among equals; `out` outlives a graph's replays."""
    library = native_argmax().library
    if library is None or logits.dtype is not torch.float32 or not logits.is_contiguous():
        return torch.argmax(logits, dim=-1, out=out)
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64) if out is None else out
    call = _ArgmaxCall(*addresses(logits, tokens), rows, vocab, torch.get_num_threads())
    launch(library.llmopt_argmax, call)
    return tokens


# Of `advance_step.c`; `follows` is set before each replay.
AdvanceCall = struct(
    "AdvanceCall",
    "token_ids positions slots lengths tables sampled",
    "rows width block_size follows",
)

native_advance = beside(__file__, "advance_step.c")
