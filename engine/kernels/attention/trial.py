"""Trial of the attention kernels: prefill and decode of a few sequences, under several rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..common.verdicts import Trial, tolerance
from .paged_attention import (
    AttentionBatch,
    AttentionKernel,
    AttentionRule,
    DecodeCounts,
    DecodeGroup,
    SequenceSpan,
)
from .paged_tensor import LARGEST_CODE, PagedTensor, quantize

BLOCK_SIZE = 16
GROUP = 4
"""Query heads of a KV head."""
WIDEST_HEAD = 256
"""Wider keys are latents (MLA): one KV head, whose values are the keys' first elements."""
PREFILL, CACHED = 40, 101
DECODED = (320, 1, 71)
"""Tokens of the sequences that are compared: a chunk after cached ones, and those that decode."""
TIMED_SEQUENCES, TIMED_TOKENS = 8, 1024


class _World:
    """Queries and a cache for heads of one shape."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        key_dim: int,
        value_dim: int,
        num_tokens: int,
        stored: torch.dtype | None = None,
    ) -> None:
        self._device, self._dtype, self._key_dim = device, dtype, key_dim
        self._stored = stored
        self._generator = torch.Generator().manual_seed(0)
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
        self._free = iter(torch.randperm(num_blocks - 1, generator=self._generator).tolist())

    def random(self, *shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=self._generator)
        return values.to(self._device, self._dtype)

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
        return torch.tensor(values, dtype=torch.int64).to(self._device)

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
        return AttentionBatch(spans, decode, BLOCK_SIZE, self._dtype)


def attention_trial(
    device: torch.device,
    dtype: torch.dtype,
    key_dim: int,
    value_dim: int,
    stored: torch.dtype | None = None,
) -> Trial[AttentionKernel]:
    """Causal attention of heads of one shape, over a cache of one dtype."""
    scale = key_dim**-0.5
    shape = device, dtype, key_dim, value_dim
    world = _World(*shape, PREFILL + CACHED + 2 * sum(DECODED), stored)
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
        many = _World(*shape, (TIMED_SEQUENCES + 1) * TIMED_TOKENS, stored)
        steps = (None, [TIMED_TOKENS] * TIMED_SEQUENCES), ((TIMED_TOKENS, 0), [])
        timed: list[Callable[[], object]] = []
        for prefill, decoded in steps:
            step = many.batch(prefill, decoded)
            tokens = many.queries(len(decoded) + (prefill[0] if prefill else 0))
            timed.append(_call(attend, tokens, many, step, AttentionRule(scale)))
        return timed

    return Trial(compute, tolerance(dtype), calls)


def _call(
    attend: AttentionKernel,
    queries: torch.Tensor,
    world: _World,
    batch: AttentionBatch,
    rule: AttentionRule,
) -> Callable[[], object]:
    return lambda: attend(queries, world.keys, world.values, batch, rule)
