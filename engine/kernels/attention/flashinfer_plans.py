"""Plans of FlashInfer's attention (Ye et al., 2025): page tables in its terms, and its wrappers.

`plan` runs on the host and copies to the device, from pinned memory: neither our numbers nor its own staging
memory may change before the device has read them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from ...base.device import to_device
from ..common.devices import gpu_limits, package
from .paged_tensor import PagedTensor

NAME = "flashinfer"
WORKSPACE_BYTES = 128 << 20
"""Split-KV workspace: FlashInfer's recommended size; it grows on demand."""
PLAN_BYTES = 1 << 20
"""Size of a graph's plan, on the device and pinned on the host: a few numbers for each tile."""


class Shape(NamedTuple):
    """Parameters of a plan other than the sequences: heads, block size, and a layer's rule. `dtype` is the
    queries' dtype, `stored` the cache's. If keys are wider than values, the values are their first elements
    (MLA): the other `key_dim - value_dim` are rotated."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    block_size: int
    dtype: torch.dtype
    stored: torch.dtype
    scale: float
    window: int | None
    softcap: float | None

    @property
    def is_latent(self) -> bool:
        return self.key_dim != self.value_dim


class Pages(NamedTuple):
    """CSR page tables of a step's sequences, int32; `indices` on the device, all else on the host. Those of a
    graph are buffers on the device, which every plan fills anew.

    `query_begins` and `page_begins` [sequences + 1] are the first query and page of each, `lengths` its
    tokens, `last_lengths` those in its last page."""

    query_begins: torch.Tensor
    page_begins: torch.Tensor
    indices: torch.Tensor
    lengths: torch.Tensor
    last_lengths: torch.Tensor


def pages_of(
    num_queries: Sequence[int],
    num_held: Sequence[int],
    tables: torch.Tensor,
    places: Sequence[int],
    block_size: int,
) -> Pages:
    """Page tables of sequences with so many queries and tokens, their blocks at `places` of `tables`."""
    lengths = np.asarray(num_held, np.int32)
    pages = -(-lengths // block_size)
    query_begins, page_begins = (
        np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (num_queries, pages)
    )
    device = tables.device
    # Page p belongs to the first sequence that ends after it; `p + shift` is its place in the tables.
    shifts = np.asarray(places) - page_begins[:-1]
    ends, shift = to_device(np.stack([page_begins[1:], shifts]).astype(np.int64), device)
    page = torch.arange(int(page_begins[-1]), device=device)
    sequence = torch.searchsorted(ends, page, right=True)
    indices = tables.index_select(0, page + shift.index_select(0, sequence)).int()
    host = (query_begins, page_begins, lengths, lengths - (pages - 1) * block_size)
    tensors = (torch.from_numpy(values) for values in host)
    if device.type == "cuda":
        tensors = (tensor.pin_memory() for tensor in tensors)
    queries, begins, counts, last = tensors
    return Pages(queries, begins, indices, counts, last)


def partial_bytes(shape: Shape, *, sequences: int, multiprocessors: int, is_decode: bool) -> int:
    """Most bytes of a plan's partial results: float32, all query heads of each tile of rows.

    As FlashInfer's scheduler: rows are the tokens' query heads of one KV head, and keys are split for two
    programs per multiprocessor. `sequences` of a captured step have tiles of their own each; 0: an eager
    step.
    """
    group = shape.heads // shape.kv_heads
    tile = 128 if group > 64 or not is_decode else 64 if group > 16 else 16
    tiles = 2 * multiprocessors // shape.kv_heads
    if sequences:
        tiles = max(tiles, -(-sequences * group // tile) + sequences - 1)
    return shape.heads * tiles * tile * (shape.value_dim + 1) * 4 + 4096


class _Wrapper(ABC):
    """Planned wrapper of FlashInfer's; `owner` is what it was last planned for."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.owner = shape, None
        self._library = package(NAME).module
        self._read: torch.cuda.Event | None = None

    def plan(self, pages: Pages, owner: Any) -> None:
        if self._read is not None:
            self._read.synchronize()
        self._plan(pages)
        self.owner = owner
        if pages.indices.device.type == "cuda":
            self._read = torch.cuda.Event()
            self._read.record()

    @abstractmethod
    def _plan(self, pages: Pages) -> None: ...

    @abstractmethod
    def run(self, queries: torch.Tensor, keys: PagedTensor, values: PagedTensor) -> torch.Tensor:
        """Attention of queries [tokens, heads, head_dim], in the order of the plan's sequences."""


class _Grouped(_Wrapper):
    """Grouped-query attention over keys and values apart (layout NHD)."""

    _wrapper: Any
    _partial: torch.Tensor
    """The workspace that a graph reads; the one in use may have grown since."""

    @property
    def _heads(self) -> tuple[int, int, int, int]:
        return self.shape.heads, self.shape.kv_heads, self.shape.key_dim, self.shape.block_size

    @property
    def _rule(self) -> dict[str, Any]:
        shape = self.shape
        return {
            "window_left": -1 if shape.window is None else shape.window - 1,
            "logits_soft_cap": shape.softcap,
            "sm_scale": shape.scale,
            "q_data_type": shape.dtype,
            "kv_data_type": shape.stored,
        }

    def run(self, queries: torch.Tensor, keys: PagedTensor, values: PagedTensor) -> torch.Tensor:
        return self._wrapper.run(queries, (keys.codes, values.codes))


class _Decode(_Grouped):
    """One query a sequence. With tensor cores, as in vLLM: they serve every size of group."""

    def __init__(self, shape: Shape, workspace: Workspace, fixed: Pages | None) -> None:
        super().__init__(shape)
        sequences = 0 if fixed is None else len(fixed.lengths)
        self._partial = workspace.partial_for(shape, sequences, is_decode=True)
        given: dict[str, Any] = {}
        if fixed is not None:
            given = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": fixed.page_begins,
                "paged_kv_indices_buffer": fixed.indices,
                "paged_kv_last_page_len_buffer": fixed.last_lengths,
            }
        # "auto" may take a backend whose graphs cannot be planned again.
        self._wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._partial, "NHD", use_tensor_cores=True, backend="fa2", **given
        )
        if fixed is not None:
            self._wrapper.reset_workspace_buffer(self._partial, workspace.plan_of(shape))

    def _plan(self, pages: Pages) -> None:
        tables = pages.page_begins, pages.indices, pages.last_lengths
        self._wrapper.plan(*tables, *self._heads, seq_lens=pages.lengths, **self._rule)


class _Mixed(_Grouped):
    """Several queries a sequence, the last of its tokens: prefill, chunks of it with decodes."""

    def __init__(self, shape: Shape, workspace: Workspace, fixed: Pages | None) -> None:
        super().__init__(shape)
        assert fixed is None
        self._partial = workspace.partial_for(shape, 0, is_decode=False)
        # No other backend has a kernel for 16-bit queries and an 8-bit cache.
        given = {"backend": "fa2"} if shape.stored.itemsize == 1 else {}
        self._wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(
            self._partial, "NHD", **given
        )

    def _plan(self, pages: Pages) -> None:
        tables = pages.query_begins, pages.page_begins, pages.indices, pages.last_lengths
        lengths, rule = pages.lengths, self._rule
        self._wrapper.plan(*tables, *self._heads, causal=True, seq_lens=lengths, **rule)


class _Latent(_Wrapper):
    """Multi-head latent attention, absorbed; in queries and cache the latent precedes the rotated part."""

    def __init__(self, shape: Shape, workspace: Workspace, fixed: Pages | None) -> None:
        super().__init__(shape)
        given: dict[str, Any] = {}
        if fixed is not None:
            given = {
                "use_cuda_graph": True,
                "qo_indptr": fixed.query_begins,
                "kv_indptr": fixed.page_begins,
                "kv_indices": fixed.indices,
                "kv_len_arr": fixed.lengths,
            }
        major, _ = torch.cuda.get_device_capability()
        # Both can be planned again for a graph; other backends, which "auto" may take, cannot.
        backend = "fa3" if major == 9 else "fa2"
        self._wrapper = self._library.BatchMLAPagedAttentionWrapper(
            workspace.partial, backend=backend, **given
        )

    def _plan(self, pages: Pages) -> None:
        shape = self.shape
        self._wrapper.plan(
            metadata=self._library.mla.MLAPlanMetadata.csr(
                pages.query_begins, pages.page_begins, pages.indices, pages.lengths
            ),
            num_heads=shape.heads,
            head_dim_ckv=shape.value_dim,
            head_dim_kpe=shape.key_dim - shape.value_dim,
            page_size=shape.block_size,
            causal=True,
            sm_scale=shape.scale,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )

    def run(self, queries: torch.Tensor, keys: PagedTensor, values: PagedTensor) -> torch.Tensor:
        return self._wrapper.run(query=queries, kv_cache=keys.codes.squeeze(2))


class Workspace:
    """Memory, and wrappers of eager steps, that all plans on a device share: one step runs at a time. Graphs
    of grouped queries with the same shape share a plan's memory on the device: each is planned before its
    replay. The pinned copy belongs to each wrapper, and a wrapper of latents allocates both."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.partial = self._bytes(WORKSPACE_BYTES)
        self._eager: dict[tuple[bool, Shape], _Wrapper] = {}
        self._plans: dict[Shape, torch.Tensor] = {}
        self._indices = self._ints(0)

    def partial_for(self, shape: Shape, sequences: int, *, is_decode: bool) -> torch.Tensor:
        """Memory of partial results, grown to `partial_bytes`; earlier users keep what they have."""
        count = gpu_limits(self._device).multiprocessors
        need = partial_bytes(shape, sequences=sequences, multiprocessors=count, is_decode=is_decode)
        if len(self.partial) < need:
            self.partial = self._bytes(need)
        return self.partial

    def plan_of(self, shape: Shape) -> torch.Tensor:
        if shape not in self._plans:
            self._plans[shape] = self._bytes(PLAN_BYTES)
        return self._plans[shape]

    def eager(self, shape: Shape, *, is_decode: bool) -> _Wrapper:
        """Wrapper of eager steps, with one query a sequence or with any number."""
        key = is_decode, shape
        if key not in self._eager:
            self._eager[key] = _kind(shape, is_decode)(shape, self, None)
        return self._eager[key]

    def captured(self, shape: Shape, sequences: int, num_pages: int) -> _Wrapper:
        """Wrapper for a graph of so many sequences, with at most `num_pages` pages."""
        if len(self._indices) < num_pages:
            self._indices = self._ints(num_pages)
        queries, pages = self._ints(sequences + 1), self._ints(sequences + 1)
        lengths = self._ints(sequences)
        fixed = Pages(queries, pages, self._indices[:num_pages], lengths, lengths)
        return _kind(shape, True)(shape, self, fixed)

    def _ints(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self._device)

    def _bytes(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.uint8, device=self._device)


def _kind(shape: Shape, is_decode: bool) -> type[_Decode | _Mixed | _Latent]:
    if shape.is_latent:
        return _Latent
    return _Decode if is_decode else _Mixed


@cache
def workspace_on(device: torch.device) -> Workspace:
    return Workspace(device)


class CapturedPlans:
    """Plans of one graph's decode step, one for each shape, which outlive the captured call. `num_held` are
    the tokens in its sequences' blocks."""

    _tables: torch.Tensor
    """The step's static block tables; the first run sets them, and the size of a block."""
    _block_size: int

    def __init__(self, num_held: Sequence[int]) -> None:
        self._num_held = num_held
        self._wrappers: dict[Shape, _Wrapper] = {}

    def __bool__(self) -> bool:
        return bool(self._wrappers)

    @torch.inference_mode()
    def renew(self, num_held: Sequence[int]) -> None:
        self._num_held = num_held
        pages = self._pages()
        for wrapper in self._wrappers.values():
            wrapper.plan(pages, self)

    def run(
        self,
        tables: torch.Tensor,
        shape: Shape,
        queries: torch.Tensor,
        keys: PagedTensor,
        values: PagedTensor,
    ) -> torch.Tensor:
        """Attention of the step's rows; the first call of a shape plans it, and cannot be captured."""
        if shape not in self._wrappers:
            self._tables, self._block_size = tables, shape.block_size
            workspace = workspace_on(tables.device)
            wrapper = workspace.captured(shape, len(self._num_held), len(tables))
            wrapper.plan(self._pages(), self)
            self._wrappers[shape] = wrapper
        return self._wrappers[shape].run(queries, keys, values)

    def _pages(self) -> Pages:
        count = len(self._num_held)
        places = range(0, len(self._tables), len(self._tables) // count)
        return pages_of([1] * count, self._num_held, self._tables, places, self._block_size)
