"""Dispatch of paged attention: the first kernel that supports a query, why the others do not, their trial.

The trial computes prefill and decode of a few sequences, under several rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch

from ..common.devices import refuses_native, refuses_rows, serves_all
from ..common.dispatch import Candidate, Operation
from ..common.verdicts import RandomInputs, Trial, tolerance
from .batch import AttentionBatch, AttentionRule, DecodeCounts, DecodeGroup, SequenceSpan
from .library_attention import (
    attend_flash,
    attend_flashinfer,
    refuses_flash_attention,
    refuses_flashinfer,
)
from .native_attention import HEAD_CHANNELS, attend_native, native_attention
from .paged_attention import AttentionCall, AttentionKernel, attend_sdpa, attention_kernel
from .paged_tensor import LARGEST_CODE, PagedTensor, quantize

Mask = Literal["causal", "tree", "image"]
MASKS: tuple[Mask, ...] = get_args(Mask)


@dataclass(frozen=True, slots=True)
class AttentionKernelQuery:
    """Kernel query of paged attention: device, dtype, head sizes, masks.

    Attributes:
        dtype: of the queries.
        key_dim, value_dim: elements of a head.
        mask: "causal"; "tree": draft tokens form token trees; "image": images see all of themselves, and the
            batch may have trees too.
        stored: of keys and values in the cache; None: as the queries.
    """

    device: str
    dtype: torch.dtype
    key_dim: int
    value_dim: int
    mask: Mask = "causal"
    stored: torch.dtype | None = None

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
        if self._stored not in LARGEST_CODE:
            return PagedTensor(values)
        return PagedTensor(*quantize(values, self._stored))

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
            padded = [block for each in tables for block in each + [0] * (width - len(each))]
            rows = range(begin, begin + len(decoded))
            decode = DecodeGroup(
                self.ints(rows),
                self.ints(padded),
                self.ints(decoded),
                self.ints([0] * len(decoded)),
                counts=DecodeCounts(rows, decoded),
            )
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


_ONLY_CAUSAL = "it does not support tree attention, nor bidirectional attention within an image"


def _refuses_native(kernel_query: AttentionKernelQuery) -> str | None:
    if (reason := refuses_native(kernel_query, native_attention)) is not None:
        return reason
    if kernel_query.key_dim % HEAD_CHANNELS or kernel_query.value_dim % HEAD_CHANNELS:
        return f"it is for heads of multiples of {HEAD_CHANNELS}"
    if kernel_query.mask == "image":
        return "it does not support bidirectional attention within an image"
    return None


def _refuses_triton(kernel_query: AttentionKernelQuery) -> str | None:
    if kernel_query.mask != "causal":
        return _ONLY_CAUSAL
    return refuses_rows(kernel_query)


@attention_kernel
def _attend_triton(call: AttentionCall) -> torch.Tensor:
    """`attend_triton`; Triton is imported by the first call."""
    from .triton_attention import attend_triton

    return attend_triton(*call)


Refusal = Callable[[str, torch.dtype, int, int], str | None]
"""From device, dtype, and elements of keys and values."""


def _refuses_library(refuses: Refusal, kernel_query: AttentionKernelQuery) -> str | None:
    """Why a kernel of another library does not serve a query; what `refuses` says is its own."""
    if kernel_query.mask != "causal":
        return _ONLY_CAUSAL
    if (reason := refuses_rows(kernel_query)) is not None:
        return reason  # our kernel serves what it does not
    if kernel_query.stored in LARGEST_CODE:
        return "it does not support 8-bit caches with a scale for each token and head"
    query = kernel_query
    return refuses(query.device, query.dtype, query.key_dim, query.value_dim)


_attend_flash = attend_flash(_attend_triton)
_attend_flashinfer = attend_flashinfer(_attend_triton)

PAGED_ATTENTION: Operation[AttentionKernelQuery, AttentionKernel] = Operation(
    "paged attention",
    [
        Candidate(
            "flash-attention-3", partial(_refuses_library, refuses_flash_attention), _attend_flash
        ),
        Candidate("flashinfer", partial(_refuses_library, refuses_flashinfer), _attend_flashinfer),
        Candidate("triton-paged", _refuses_triton, _attend_triton),
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
        """The kernel of a step."""
        if batch.has_images:
            return attention_kernel(self._attend_images)
        return self.trees if batch.has_trees else self.causal

    def _attend_images(self, call: AttentionCall) -> torch.Tensor:
        """Bidirectional attention of the sequences with images; the others' results do not depend on an
        image in the batch."""
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
    stored: torch.dtype | None = None,
) -> AttentionKernels:
    """The kernels for a decoder's heads; keys and values are `stored` in that dtype, or in the queries'."""

    def choose(mask: Mask) -> AttentionKernel:
        shape = key_dim, value_dim
        kernel_query = AttentionKernelQuery(device.type, dtype, *shape, mask, stored)
        return PAGED_ATTENTION.select(kernel_query).run

    return AttentionKernels(*map(choose, MASKS))


def takes_static_metadata(kernel: AttentionKernel) -> bool:
    """Whether a kernel reads all of a step from tensors: a captured launch serves others of its size."""
    return kernel in (_attend_triton, _attend_flash, _attend_flashinfer)


def reads_in_place(kernel: AttentionKernel) -> bool:
    """Whether a kernel reads KV blocks in place, whatever the block table's width (no gather)."""
    return kernel in (attend_native, _attend_triton, _attend_flash, _attend_flashinfer)
