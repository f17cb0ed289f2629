"""Dispatch of paged attention: kernels, the reasons why they do not support a query, and their trial.

The CPU kernel in `attention.c` is called by ctypes. The trial computes prefill and decode of a few sequences,
with several rules.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch

from ....base.build import beside, fields
from ..common.devices import refuses_native, refuses_rows, serves_all
from ..common.dispatch import Candidate, Operation, lazily
from ..common.graphs import addresses, launch, struct
from ..common.verdicts import RandomInputs, Trial, tolerance
from .batch import AttentionBatch, AttentionRule, DecodeCounts, DecodeGroup, SequenceSpan
from .library_attention import (
    attend_flash,
    attend_flashinfer,
    refuses_flash_attention,
    refuses_flashinfer,
)
from .paged_attention import AttentionCall, AttentionKernel, attend_sdpa, attention_kernel
from .paged_tensor import (
    LARGEST_CODE,
    ONLY_LIBRARIES,
    CacheDtype,
    PagedTensor,
    WithoutScales,
    quantize,
)

HEAD_CHANNELS = 16
"""Supported head sizes are multiples of this."""
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float8_e4m3fn: 3}

# Structs of `attention.c`, `segment.h` and `paged.h`.
_Span = struct(
    *("Span", "", "begin end num_cached sink_length evicted_span"),
    *fields("blocks", "num_drafts"),
    *fields("depths ancestors"),
)
_DecodeGroup = struct("DecodeGroup", "rows lengths evicted_spans blocks", "count width sink_length")
_Paged = struct("Paged", "data scales", "type dim heads slot_bytes head_bytes")
_NativeCall = struct(
    "Call",
    "queries sink_queries out spans sinks",
    "num_spans heads query_stride sink_query_stride is_bf16 "
    "block_size window num_sink_tokens chunk threads",
    *(("decode", _DecodeGroup), ("keys", _Paged), ("values", _Paged)),
    *(("scale", ctypes.c_float), ("softcap", ctypes.c_float)),
)


class _Spans:
    """C structs of a batch's sequences. A call reads the decode group from its tensors, as a replay needs."""

    def __init__(self, batch: AttentionBatch) -> None:
        self.attend = native_attention().function("llmopt_attend")
        self._held = batch
        group = batch.decode
        self.decode = _DecodeGroup()
        if group is not None:
            count = group.rows.numel()
            self.decode = _DecodeGroup(
                *addresses(group.rows, group.lengths, group.evicted_spans, group.block_ids),
                *(count, group.block_ids.numel() // count, group.sink_length),
            )
        self.array = (_Span * (self.decode.count + len(batch.spans)))()
        for index, s in enumerate(batch.spans, self.decode.count):
            drafts, tree = 0, s.tree
            if tree is not None:
                assert tree.depths.is_contiguous() and tree.ancestors.is_contiguous()
                drafts = tree.depths.numel()
            masks = addresses(*((None, None) if tree is None else (tree.depths, tree.ancestors)))
            span = s.begin, s.end, s.num_cached, s.sink_length, s.evicted_span
            self.array[index] = (*span, s.block_ids.data_ptr(), drafts, *masks)


native_attention = beside(__file__, "attention.c")


@attention_kernel
def attend_native(call: AttentionCall) -> torch.Tensor:
    """Paged attention that reads KV blocks in place; batch-invariant: a token depends on its past alone."""
    queries, keys, values, batch, rule, sink_queries = call
    spans = batch.kernel_metadata(_Spans)
    queries = _dense_heads(queries)
    sink_queries = None if sink_queries is None else _dense_heads(sink_queries)
    out = call.empty_result()
    sinks = None if rule.sinks is None else rule.sinks.float().contiguous()
    shape = len(spans.array), queries.shape[1], queries.stride(0)
    launched = _NativeCall(
        *(*addresses(queries, sink_queries, out), ctypes.addressof(spans.array), *addresses(sinks)),
        *(*shape, 0 if sink_queries is None else sink_queries.stride(0)),
        *(queries.dtype is torch.bfloat16, batch.block_size, rule.window or 0),
        *(rule.num_sink_tokens, rule.chunk or 0, torch.get_num_threads(), spans.decode),
        *(_paged(keys), _paged(values), rule.scale, rule.softcap or 0.0),
    )
    if launch(spans.attend, launched):
        raise MemoryError(f"no memory for attention of {queries.shape[0]} tokens")
    return out


def _dense_heads(queries: torch.Tensor) -> torch.Tensor:
    """Queries with contiguous heads; the token stride is free."""
    is_dense = queries.stride(2) == 1 and queries.stride(1) == queries.shape[2]
    return queries if is_dense else queries.contiguous()


def _paged(tensor: PagedTensor) -> ctypes.Structure:
    codes, scales = tensor.codes, tensor.scales
    assert codes.stride(3) == 1 and codes.stride(0) == codes.shape[1] * codes.stride(1)
    strides = codes.stride(1) * codes.itemsize, codes.stride(2) * codes.itemsize
    sizes = _TYPES[codes.dtype], codes.shape[3], codes.shape[2], *strides
    return _Paged(*addresses(codes, scales), *sizes)


Mask = Literal["causal", "tree", "image"]
MASKS: tuple[Mask, ...] = get_args(Mask)


@dataclass(frozen=True, slots=True)
class AttentionKernelQuery:
    """Kernel query of paged attention; `stored` None: as the queries. A batch with images may have trees."""

    device: str
    dtype: torch.dtype
    key_dim: int
    value_dim: int
    mask: Mask = "causal"
    stored: CacheDtype | None = None

    def __str__(self) -> str:
        same = self.key_dim == self.value_dim
        heads = f"{self.key_dim}" if same else f"{self.key_dim} and {self.value_dim}"
        mask = {"causal": "", "tree": ", token trees", "image": ", images"}[self.mask]
        stored = "" if self.stored in (None, self.dtype) else f", cached in {self.stored}"
        return f"heads of {heads} in {self.dtype} on {self.device}{stored}{mask}"


BLOCK_SIZE = 16
GROUP = 4
"""Query heads of a KV head."""
WIDEST_HEAD = 256
"""Wider keys are latents (MLA): one KV head, whose values are the keys' first elements."""
PREFILL, CACHED = 40, 101
DECODED = (320, 1, 71)
"""Tokens of the sequences that are compared: a chunk after cached ones, and those that decode."""
TIMED_SEQUENCES, TIMED_TOKENS = 8, 1024


class _TrialWorld:
    """Queries and a cache for heads of one shape."""

    def __init__(self, query: AttentionKernelQuery, num_tokens: int) -> None:
        key_dim, value_dim = query.key_dim, query.value_dim
        self.random = RandomInputs(query.device, query.dtype)
        self._key_dim, self._stored = key_dim, query.stored
        is_latent = key_dim > WIDEST_HEAD
        kv_heads = 1 if is_latent else 2
        self.heads = GROUP * kv_heads
        num_blocks = -(-num_tokens // BLOCK_SIZE) + 8
        self.keys = self.cached(num_blocks, BLOCK_SIZE, kv_heads, key_dim)
        self.values = (
            self.keys.first_elements(value_dim)
            if is_latent
            else self.cached(num_blocks, BLOCK_SIZE, kv_heads, value_dim)
        )
        self._free = iter(torch.randperm(num_blocks - 1, generator=self.random.generator).tolist())

    def cached(self, *shape: int) -> PagedTensor:
        values = self.random(*shape)
        stored = self._stored or values.dtype
        if isinstance(stored, WithoutScales):
            return PagedTensor(values.to(stored.dtype))
        if stored not in LARGEST_CODE:
            return PagedTensor(values.to(stored))
        return PagedTensor(*quantize(values, stored))

    def queries(self, tokens: int) -> torch.Tensor:
        return self.random(tokens, self.heads, self._key_dim)

    def blocks(self, tokens: int) -> list[int]:
        return [next(self._free) + 1 for _ in range(-(-tokens // BLOCK_SIZE))]

    def ints(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.random.device)

    def batch(self, prefill: tuple[int, int] | None, decoded: Sequence[int]) -> AttentionBatch:
        """A chunk of so many tokens after so many cached ones, and sequences that decode."""
        spans, begin = [], 0
        if prefill is not None:
            begin, whole = prefill[0], sum(prefill)
            spans = [SequenceSpan(0, begin, whole, self.ints(self.blocks(whole)))]
        decode = None
        if decoded:
            tables = [self.blocks(length) for length in decoded]
            width = max(map(len, tables))
            padded = [block for table in tables for block in table + [0] * (width - len(table))]
            rows = range(begin, begin + len(decoded))
            evicted, counts = [0] * len(decoded), DecodeCounts(rows, decoded)
            at, blocks, lengths, spans_of = map(self.ints, (rows, padded, decoded, evicted))
            decode = DecodeGroup(at, blocks, lengths, spans_of, counts=counts)
        return AttentionBatch(spans, decode, BLOCK_SIZE, self.random.dtype)


def attention_trial(query: AttentionKernelQuery) -> Trial[AttentionKernel] | None:
    """Causal attention of heads of one shape, over a cache of one dtype; None for other masks."""
    if query.mask != "causal":
        return None
    scale = query.key_dim**-0.5
    world = _TrialWorld(query, PREFILL + CACHED + 2 * sum(DECODED))
    # Libraries have kernels of their own for decode alone, and for each kind of rule.
    steps = [
        (world.batch(prefill, DECODED), *(world.queries(tokens) for _ in range(2)))
        for prefill, tokens in (((PREFILL, CACHED), PREFILL + len(DECODED)), (None, len(DECODED)))
    ]
    rules = [
        AttentionRule(scale),
        AttentionRule(scale, window=50),
        AttentionRule(scale, softcap=30.0),
        AttentionRule(scale, window=50, softcap=30.0),
        AttentionRule(scale, window=50, num_sink_tokens=4),
    ]

    def compute(attend: AttentionKernel) -> list[torch.Tensor]:
        keys, values = world.keys, world.values
        return [
            attend(queries, keys, values, batch, rule, at_sinks if rule.num_sink_tokens else None)
            for batch, queries, at_sinks in steps
            for rule in rules
        ]

    def calls(attend: AttentionKernel) -> list[Callable[[], object]]:
        many = _TrialWorld(query, (TIMED_SEQUENCES + 1) * TIMED_TOKENS)
        rule = AttentionRule(scale)
        steps = (None, [TIMED_TOKENS] * TIMED_SEQUENCES), ((TIMED_TOKENS, 0), [])
        timed: list[Callable[[], object]] = []
        for prefill, decoded in steps:
            step = many.batch(prefill, decoded)
            tokens = many.queries(len(decoded) + (prefill[0] if prefill else 0))
            timed.append(partial(attend, tokens, many.keys, many.values, step, rule))
        return timed

    return Trial(compute, tolerance(query.dtype), calls)


_NO_8_BITS_ALONE = "it reads no 8-bit cache without scales"
_ONLY_CAUSAL = "it does not support tree attention, nor bidirectional attention within an image"


def _refuses_native(kernel_query: AttentionKernelQuery) -> str | None:
    if (reason := refuses_native(kernel_query, native_attention)) is not None:
        return reason
    if kernel_query.key_dim % HEAD_CHANNELS or kernel_query.value_dim % HEAD_CHANNELS:
        return f"it is for heads of multiples of {HEAD_CHANNELS}"
    if kernel_query.mask == "image":
        return "it does not support bidirectional attention within an image"
    if kernel_query.stored in ONLY_LIBRARIES:
        return _NO_8_BITS_ALONE
    return None


_attend_triton: AttentionKernel = lazily("attention.triton_attention", "attend_triton")

Refusal = Callable[[str, torch.dtype, int, int], str | None]
"""Refusal by device, dtype, and elements of keys and values."""


def _refuses_library(refuses: Refusal, query: AttentionKernelQuery) -> str | None:
    if query.mask != "causal":
        return _ONLY_CAUSAL
    if (reason := refuses_rows(query)) is not None:
        return reason  # our kernel serves what it does not
    if query.stored in LARGEST_CODE:
        return "it does not support 8-bit caches with a scale for each token and head"
    return refuses(query.device, query.dtype, query.key_dim, query.value_dim)


def _refuses_flash(query: AttentionKernelQuery) -> str | None:
    if query.stored in ONLY_LIBRARIES:
        return _NO_8_BITS_ALONE
    return _refuses_library(refuses_flash_attention, query)


_attend_flash = attend_flash(_attend_triton)
_attend_flashinfer = attend_flashinfer(_attend_triton)

PAGED_ATTENTION: Operation[AttentionKernelQuery, AttentionKernel] = Operation(
    "paged attention",
    [
        Candidate("flash-attention-3", _refuses_flash, _attend_flash),
        Candidate("flashinfer", partial(_refuses_library, refuses_flashinfer), _attend_flashinfer),
        Candidate(
            "triton-paged",
            lambda query: _ONLY_CAUSAL if query.mask != "causal" else refuses_rows(query),
            _attend_triton,
        ),
        Candidate("native-paged", _refuses_native, attend_native),
        Candidate("torch-sdpa", serves_all, attend_sdpa),
    ],
    attention_trial,
)


class AttentionKernels(NamedTuple):
    """The kernels for a decoder's heads: of causal attention, of token trees, and of images."""

    causal: AttentionKernel
    trees: AttentionKernel
    images: AttentionKernel

    def of(self, batch: AttentionBatch) -> AttentionKernel:
        if batch.has_images:
            return attention_kernel(self._attend_images)
        return self.trees if batch.has_trees else self.causal

    def _attend_images(self, call: AttentionCall) -> torch.Tensor:
        """Bidirectional attention of the sequences with images; the others' results do not depend on them."""
        plain = self.trees if call.batch.has_trees else self.causal
        if not call.rule.bidirectional:
            return plain(*call)
        images, others = call.batch.parts
        masked = self.images(*call._replace(batch=images))
        if not others.spans and others.decode is None:
            return masked
        out = plain(*call._replace(batch=others))
        for span in images.spans:
            out[span.begin : span.end] = masked[span.begin : span.end]
        return out


def attention_kernels(
    device: torch.device,
    dtype: torch.dtype,
    key_dim: int,
    value_dim: int,
    stored: CacheDtype | None = None,
) -> AttentionKernels:
    """The kernels for a decoder's heads; keys and values are `stored` in that dtype, or in the queries'."""

    def choose(mask: Mask) -> AttentionKernel:
        shape = key_dim, value_dim
        kernel_query = AttentionKernelQuery(device.type, dtype, *shape, mask, stored)
        return PAGED_ATTENTION.select(kernel_query).run

    return AttentionKernels(*map(choose, MASKS))


def takes_static_metadata(kernel: AttentionKernel) -> bool:
    """True if a kernel reads all of a step from tensors: a captured launch serves others of its size."""
    return kernel in (_attend_triton, _attend_flash, _attend_flashinfer)


def reads_in_place(kernel: AttentionKernel) -> bool:
    """True if a kernel reads KV blocks in place, at any width of the block table (no gather)."""
    return kernel in (attend_native, _attend_triton, _attend_flash, _attend_flashinfer)
