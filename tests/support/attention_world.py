"""Batches over shuffled KV blocks, for tests of paged attention."""

from __future__ import annotations

from itertools import islice, product
from typing import Any

import torch
from hypothesis import strategies as st
from llmopt.engine.kernels.attention import batch as pa
from llmopt.engine.kernels.attention.paged_tensor import PagedTensor

from .unwritten_memory import fill_with_nan

STORED = (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn)


class World:
    """Sequences over shuffled blocks: `lengths[i]` tokens so far, of which `news[i]` are in the batch.

    On a CPU slots of no token are NaN, but for the null block's.
    """

    def __init__(
        self,
        lengths: list[int],
        news: list[int],
        *,
        heads: int = 8,
        kv_heads: int = 4,
        dims: tuple[int, int] = (32, 32),
        block_size: int = 8,
        stored: torch.dtype = torch.float32,
        dtype: torch.dtype = torch.float32,
        in_keys: bool = False,
        device: str = "cpu",
    ) -> None:
        g = torch.Generator().manual_seed(len(lengths) + sum(lengths))
        widths = [-(-length // block_size) for length in lengths]
        ids = iter((torch.randperm(sum(widths), generator=g) + 1).tolist())
        self.tables = [[next(ids) for _ in range(width)] for width in widths]
        self.lengths, self.news, self.block_size, self.dtype = lengths, news, block_size, dtype
        self.device = torch.device(device)
        num_blocks = sum(widths) + 1

        def filled(dim: int) -> PagedTensor:
            tensor = PagedTensor.zeros(num_blocks, block_size, kv_heads, dim, self.device, stored)
            if device == "cpu":  # as in the engine, elsewhere all is written
                fill_with_nan(tensor)
            of_sequences = [
                block * block_size + slot
                for blocks, length in zip(self.tables, lengths, strict=True)
                for block, slot in islice(product(blocks, range(block_size)), length)
            ]
            slots = torch.tensor([*range(block_size), *of_sequences], device=self.device)
            x = torch.randn(len(slots), kv_heads, dim, generator=g)
            tensor.write(x.to(self.device), slots)
            return tensor

        self.keys = filled(dims[0])
        self.values = self.keys.first_elements(dims[1]) if in_keys else filled(dims[1])
        self.queries = torch.randn(sum(news), heads, dims[0], generator=g).to(self.device, dtype)
        self.sink_queries = torch.randn(self.queries.shape, generator=g).to(self.queries)

    def batch(self, chosen: list[int] | None = None) -> tuple[torch.Tensor, pa.AttentionBatch]:
        """The rows of some sequences, and their batch."""

        def tensor(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=self.device)

        spans, single, rows, begin = [], [], [], 0
        for i in range(len(self.lengths)) if chosen is None else chosen:
            new, length = self.news[i], self.lengths[i]
            first = sum(self.news[:i])
            rows += range(first, first + new)
            if new == 1:
                single.append((begin, length, self.tables[i]))
            else:
                blocks = tensor(self.tables[i])
                spans.append(pa.SequenceSpan(begin, begin + new, length, blocks))
            begin += new
        decode = None
        if single:
            width = max(len(blocks) for _, _, blocks in single)
            decode = pa.DecodeGroup(
                tensor([row for row, _, _ in single]),
                tensor([b for *_, own in single for b in own + [0] * (width - len(own))]),
                tensor([length for _, length, _ in single]),
                tensor([0] * len(single)),
                counts=pa.DecodeCounts(
                    [row for row, _, _ in single], [length for _, length, _ in single]
                ),
            )
        made = pa.AttentionBatch(spans, decode, self.block_size, self.dtype)
        return tensor(rows), made

    def attend(
        self, kernel: Any, rule: pa.AttentionRule, chosen: list[int] | None = None
    ) -> torch.Tensor:
        rows, batch = self.batch(chosen)
        sink_queries = self.sink_queries[rows] if rule.num_sink_tokens else None
        return kernel(self.queries[rows], self.keys, self.values, batch, rule, sink_queries)


@st.composite
def rules(draw: st.DrawFn, heads: int) -> pa.AttentionRule:
    window = draw(st.none() | st.integers(1, 300))
    return pa.AttentionRule(
        draw(st.floats(0.05, 0.5)),
        window=window,
        num_sink_tokens=draw(st.integers(0, 40)) if window else 0,
        chunk=draw(st.none() | st.integers(1, 40)) if window is None else None,
        softcap=draw(st.none() | st.floats(0.5, 30.0)),
        sinks=draw(st.none() | st.just(torch.linspace(-3, 3, heads))),
    )
