"""Paged attention on CPU: ctypes bindings of the C kernel in `attention.c`."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from ....quant.native.build import Native, native
from ..common.graphs import launch
from .batch import AttentionBatch, TreeMask
from .paged_attention import AttentionCall, attention_kernel
from .paged_tensor import PagedTensor

HEAD_CHANNELS = 16
"""Supported head sizes are multiples of this."""
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float8_e4m3fn: 3}


class _Span(ctypes.Structure):
    """`Span` of `attention.c`."""

    _fields_ = [
        *[
            (name, ctypes.c_int64)
            for name in ("begin", "end", "num_cached", "sink_length", "evicted_span")
        ],
        ("blocks", ctypes.c_void_p),
        ("num_drafts", ctypes.c_int64),
        ("depths", ctypes.c_void_p),
        ("ancestors", ctypes.c_void_p),
    ]


class _DecodeGroup(ctypes.Structure):
    """`DecodeGroup` of `segment.h`."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("rows", "lengths", "evicted_spans", "blocks")],
        *[(name, ctypes.c_int64) for name in ("count", "width", "sink_length")],
    ]


class _Paged(ctypes.Structure):
    """`Paged` of `paged.h`."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("data", "scales")],
        *[(n, ctypes.c_int64) for n in ("type", "dim", "heads", "slot_bytes", "head_bytes")],
    ]


class _NativeCall(ctypes.Structure):
    """`Call` of `attention.c`."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("queries", "sink_queries", "out", "spans", "sinks")],
        *[
            (name, ctypes.c_int64)
            for name in (
                *("num_spans", "heads", "query_stride", "sink_query_stride", "is_bf16"),
                *("block_size", "window", "num_sink_tokens", "chunk", "threads"),
            )
        ],
        ("decode", _DecodeGroup),
        ("keys", _Paged),
        ("values", _Paged),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    ]


class _Spans:
    """Kernel metadata of a batch: the C structs of its sequences, and what keeps their block tables alive.

    Every call reads the decode group from its tensors, so that a captured call can be replayed.
    """

    def __init__(self, batch: AttentionBatch) -> None:
        library = native_attention().library
        assert library is not None
        self.attend = library.llmopt_attend
        self._held = batch
        group = batch.decode
        self.decode = _DecodeGroup()
        if group is not None:
            count = group.rows.numel()
            self.decode = _DecodeGroup(
                group.rows.data_ptr(),
                group.lengths.data_ptr(),
                group.evicted_spans.data_ptr(),
                group.block_ids.data_ptr(),
                count,
                group.block_ids.numel() // count,
                group.sink_length,
            )
        self.array = (_Span * (self.decode.count + len(batch.spans)))()
        for index, s in enumerate(batch.spans, self.decode.count):
            self.array[index] = (
                *(s.begin, s.end, s.num_cached, s.sink_length, s.evicted_span),
                s.block_ids.data_ptr(),
                *_tree(s.tree),
            )


def _tree(tree: TreeMask | None) -> tuple[int, int | None, int | None]:
    """The last fields of `_Span`."""
    if tree is None:
        return 0, None, None
    assert tree.depths.is_contiguous() and tree.ancestors.is_contiguous()
    return tree.depths.numel(), tree.depths.data_ptr(), tree.ancestors.data_ptr()


def native_attention() -> Native:
    """The compiled kernel, or the reason why there is none."""
    return native(Path(__file__).with_name("attention.c"))


@attention_kernel
def attend_native(call: AttentionCall) -> torch.Tensor:
    """Paged attention that reads KV blocks in place; batch-invariant: a token depends on its past alone."""
    queries, keys, values, batch, rule, sink_queries = call
    spans = batch.kernel_metadata(_Spans)
    queries = _dense_heads(queries)
    sink_queries = None if sink_queries is None else _dense_heads(sink_queries)
    out = call.empty_result()
    sinks = None if rule.sinks is None else rule.sinks.float().contiguous()
    launched = _NativeCall(
        queries.data_ptr(),
        None if sink_queries is None else sink_queries.data_ptr(),
        out.data_ptr(),
        ctypes.addressof(spans.array),
        None if sinks is None else sinks.data_ptr(),
        len(spans.array),
        queries.shape[1],
        queries.stride(0),
        0 if sink_queries is None else sink_queries.stride(0),
        queries.dtype is torch.bfloat16,
        batch.block_size,
        rule.window or 0,
        rule.num_sink_tokens,
        rule.chunk or 0,
        torch.get_num_threads(),
        spans.decode,
        _paged(keys),
        _paged(values),
        rule.scale,
        rule.softcap or 0.0,
    )
    if launch(spans.attend, launched):
        raise MemoryError(f"no memory for attention of {queries.shape[0]} tokens")
    return out


def _dense_heads(queries: torch.Tensor) -> torch.Tensor:
    """Queries with contiguous heads; the token stride is free."""
    is_dense = queries.stride(2) == 1 and queries.stride(1) == queries.shape[2]
    return queries if is_dense else queries.contiguous()


def _paged(tensor: PagedTensor) -> _Paged:
    codes, scales = tensor.codes, tensor.scales
    assert codes.stride(3) == 1 and codes.stride(0) == codes.shape[1] * codes.stride(1)
    return _Paged(
        codes.data_ptr(),
        None if scales is None else scales.data_ptr(),
        _TYPES[codes.dtype],
        codes.shape[3],
        codes.shape[2],
        codes.stride(1) * codes.itemsize,
        codes.stride(2) * codes.itemsize,
    )
