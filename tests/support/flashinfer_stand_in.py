"""FlashInfer's wrappers as of 0.7.2, in torch: documented signatures and semantics, checked and computed.

`plan` copies page tables to the wrapper's buffers; `run` reads these alone, as the kernels do. In a graph the
buffers are the caller's and fixed, and planning is refused while a step is captured or replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch


@dataclass
class Log:
    """What was done: `captured` tells whether a step is being captured or replayed."""

    plans: list[str] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    captured: bool = False
    computes: bool = True


class Replayed:
    """A graph as CUDA's: the call runs once before it is captured; a replay plans nothing."""

    def __init__(self, call: Callable[[], torch.Tensor], log: Log) -> None:
        self._call, self._log = call, log
        call()
        self.replay()

    def replay(self) -> torch.Tensor:
        self._log.captured = True
        try:
            return self._call()
        finally:
            self._log.captured = False


def stand_in(log: Log) -> Any:
    """The module `flashinfer`."""
    return SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=lambda *args, **given: BatchDecode(*args, **given)._with(
            log
        ),
        BatchPrefillWithPagedKVCacheWrapper=lambda *args, **given: BatchPrefill(
            *args, **given
        )._with(log),
        BatchMLAPagedAttentionWrapper=lambda *args, **given: BatchMLA(*args, **given)._with(log),
        mla=SimpleNamespace(MLAPlanMetadata=MLAPlanMetadata),
    )


def _check_on_host(*tensors: torch.Tensor) -> None:
    assert all(each.dtype is torch.int32 and each.device.type == "cpu" for each in tensors)
    assert all(each.dim() == 1 and each.is_contiguous() for each in tensors)


class _Wrapper:
    kind: str
    _log: Log
    _fixed: dict[str, torch.Tensor] | None = None
    _tables: dict[str, torch.Tensor] | None = None

    def _with(self, log: Log) -> Any:
        self._log = log
        return self

    def _init(self, workspace: torch.Tensor, fixed: dict[str, Any] | None) -> None:
        assert workspace.dtype is torch.uint8 and workspace.numel() >= 128 << 20
        self._device, self._fixed, self._bytes = workspace.device, fixed, workspace.numel()
        if fixed is not None:
            assert all(each.device == workspace.device for each in fixed.values())
            assert all(each.dtype is torch.int32 for each in fixed.values())

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        assert int_workspace_buffer.numel() >= 1 << 20

    def _plan(self, **tables: torch.Tensor) -> None:
        assert not self._log.captured, "planned in a capture"
        self._log.plans.append(self.kind)
        indices = tables["indices"]
        assert indices.dtype is torch.int32 and indices.device == self._device
        host = [each for name, each in tables.items() if name != "indices"]
        _check_on_host(*host)
        assert tables["indptr"][-1] == len(indices)
        if self._fixed is None:
            self._tables = {
                name: each.to(self._device, non_blocking=True) for name, each in tables.items()
            }
            return
        for name, each in tables.items():
            buffer = self._fixed[name]
            assert len(each) == len(buffer) or name == "indices"
            buffer[: len(each)].copy_(each, non_blocking=True)
        self._tables = self._fixed

    def _attend(
        self, queries: torch.Tensor, counts: list[int], keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Of queries [tokens, heads, head_dim], the last of each sequence's tokens."""
        assert self._tables is not None, "run before it is planned"
        indptr, indices = (self._tables[name].tolist() for name in ("indptr", "indices"))
        outs, group = [], queries.shape[1] // keys.shape[2]
        for place, query in enumerate(queries.split(counts)):
            length = self._length(place, keys.shape[1])
            pages = torch.tensor(indices[indptr[place] : indptr[place + 1]])
            assert 0 < length <= len(pages) * keys.shape[1]
            held, mixed = (
                each[pages].to(query.dtype).flatten(0, 1)[:length].repeat_interleave(group, dim=1)
                for each in (keys, values)
            )
            scores = torch.einsum("qhd,khd->hqk", query, held) * self._rule["sm_scale"]
            if cap := self._rule.get("logits_soft_cap") or 0.0:
                scores = cap * (scores / cap).tanh()
            last = length - len(query) + torch.arange(len(query))
            at = torch.arange(length)[None] - last[:, None]
            left = self._rule.get("window_left", -1)
            visible = at <= 0 if left < 0 else (at <= 0) & (at >= -left)
            weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
            outs.append(torch.einsum("hqk,khd->qhd", weights, mixed))
        return torch.cat(outs)

    _rule: dict[str, Any]

    def _length(self, place: int, page_size: int) -> int:
        assert self._tables is not None
        pages = int(self._tables["indptr"][place + 1] - self._tables["indptr"][place])
        return (pages - 1) * page_size + int(self._tables["last"][place])


class _Grouped(_Wrapper):
    def _plan_heads(
        self, heads: tuple[int, int, int, int], q_data_type: Any, kv_data_type: Any, **rule: Any
    ) -> None:
        self._heads, self._dtype = heads, q_data_type
        assert kv_data_type in (q_data_type, torch.float8_e4m3fn, torch.float8_e5m2)
        assert heads[0] % heads[1] == 0
        self._stored, self._rule = kv_data_type, rule

    def _check(self, q: torch.Tensor, paged_kv_cache: Any) -> None:
        keys, values = paged_kv_cache
        heads, kv_heads, dim, page_size = self._heads
        assert q.shape[1:] == (heads, dim) and q.dtype is self._dtype
        assert keys.dtype is values.dtype is self._stored
        assert keys.shape[1:] == values.shape[1:] == (page_size, kv_heads, dim)
        assert q.stride(-1) == keys.stride(-1) == 1 and keys.stride() == values.stride()
        self._log.runs.append(self.kind)


class BatchDecode(_Grouped):
    """`flashinfer.BatchDecodeWithPagedKVCacheWrapper`."""

    kind = "decode"

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD",
        use_cuda_graph: bool = False, use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Any = None, paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None, backend: str = "auto",
    ) -> None:  # fmt: skip
        assert kv_layout == "NHD" and use_tensor_cores and backend == "fa2"
        fixed = {
            "indptr": paged_kv_indptr_buffer,
            "indices": paged_kv_indices_buffer,
            "last": paged_kv_last_page_len_buffer,
        }
        self._init(float_workspace_buffer, fixed if use_cuda_graph else None)

    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, *,
        window_left: int = -1, logits_soft_cap: float | None = None, q_data_type: Any = None,
        kv_data_type: Any = None, sm_scale: float | None = None, seq_lens: Any = None,
    ) -> None:  # fmt: skip
        heads = num_qo_heads, num_kv_heads, head_dim, page_size
        rule = {"window_left": window_left, "logits_soft_cap": logits_soft_cap}
        self._plan_heads(heads, q_data_type, kv_data_type, sm_scale=sm_scale, **rule)
        _check_on_host(seq_lens)
        if self._fixed is not None:
            sequences, group = len(last_page_len), num_qo_heads // num_kv_heads
            tile = 16 if group <= 16 else 64 if group <= 64 else 128
            # Float32 partial results and their log-sum-exp, of every tile that the graph may have.
            tiles = -(-sequences * group // tile) + sequences - 1
            floats = num_qo_heads * tiles * tile * (head_dim + 1)
            assert 4 * floats <= self._bytes, "Buffer overflow"
        assert torch.equal(seq_lens, (indptr.diff() - 1) * page_size + last_page_len)
        self._plan(indptr=indptr, indices=indices, last=last_page_len)

    def run(self, q: torch.Tensor, paged_kv_cache: Any) -> torch.Tensor:
        self._check(q, paged_kv_cache)
        if not self._log.computes:
            return torch.empty_like(q)
        assert self._tables is not None and len(q) == len(self._tables["last"])
        return self._attend(q, [1] * len(q), *paged_kv_cache)


class BatchPrefill(_Grouped):
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper`."""

    kind = "prefill"

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, backend: str = "auto"
    ) -> None:
        assert kv_layout == "NHD"
        self._backend = backend
        self._init(float_workspace_buffer, None)

    def plan(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor, paged_kv_last_page_len: torch.Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool = False,
        sm_scale: float | None = None, window_left: int = -1, logits_soft_cap: float | None = None,
        q_data_type: Any = "float16", kv_data_type: Any = None, seq_lens: Any = None,
    ) -> None:  # fmt: skip
        assert causal and (self._backend == "fa2" or kv_data_type is q_data_type)
        heads = num_qo_heads, num_kv_heads, head_dim_qk, page_size
        rule = {"window_left": window_left, "logits_soft_cap": logits_soft_cap}
        self._plan_heads(heads, q_data_type, kv_data_type, sm_scale=sm_scale, **rule)
        _check_on_host(qo_indptr, seq_lens)
        self._counts = qo_indptr.diff().tolist()
        self._plan(indptr=paged_kv_indptr, indices=paged_kv_indices, last=paged_kv_last_page_len)

    def run(self, q: torch.Tensor, paged_kv_cache: Any) -> torch.Tensor:
        self._check(q, paged_kv_cache)
        assert len(q) == sum(self._counts)
        if not self._log.computes:
            return torch.empty_like(q)
        return self._attend(q, self._counts, *paged_kv_cache)


@dataclass
class MLAPlanMetadata:
    """`flashinfer.mla.MLAPlanMetadata`."""

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_len_arr: torch.Tensor

    @classmethod
    def csr(
        cls, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
    ) -> MLAPlanMetadata:  # fmt: skip
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)


class BatchMLA(_Wrapper):
    """`flashinfer.BatchMLAPagedAttentionWrapper`, with packed queries and cache."""

    kind = "latent"

    def __init__(
        self, float_workspace_buffer: torch.Tensor, use_cuda_graph: bool = False,
        qo_indptr: Any = None, kv_indptr: Any = None, kv_indices: Any = None,
        kv_len_arr: Any = None, backend: str = "auto",
    ) -> None:  # fmt: skip
        assert backend in ("fa2", "fa3")
        fixed = {
            "queries": qo_indptr, "indptr": kv_indptr, "indices": kv_indices, "lengths": kv_len_arr
        }  # fmt: skip
        self._init(float_workspace_buffer, fixed if use_cuda_graph else None)

    def plan(
        self, *, metadata: MLAPlanMetadata, num_heads: int, head_dim_ckv: int, head_dim_kpe: int,
        page_size: int, causal: bool, sm_scale: float, q_data_type: Any, kv_data_type: Any,
    ) -> None:  # fmt: skip
        assert causal and q_data_type is kv_data_type
        assert 128 % num_heads == 0, "a query's heads lie in two tiles"
        self._shape = num_heads, head_dim_ckv, head_dim_kpe, page_size
        self._rule, self._dtype = {"sm_scale": sm_scale}, q_data_type
        self._counts = metadata.qo_indptr.diff().tolist()
        self._plan(
            queries=metadata.qo_indptr,
            indptr=metadata.kv_indptr,
            indices=metadata.kv_indices,
            lengths=metadata.kv_len_arr,
        )

    def run(self, *, query: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        heads, latent, rotated, page_size = self._shape
        assert query.shape[1:] == (heads, latent + rotated) and query.stride(-1) == 1
        assert kv_cache.shape[1:] == (page_size, latent + rotated) and kv_cache.stride(-1) == 1
        assert query.dtype is kv_cache.dtype is self._dtype and len(query) == sum(self._counts)
        self._log.runs.append(self.kind)
        if not self._log.computes:
            return query.new_empty(*query.shape[:2], latent)
        cache = kv_cache[:, :, None]
        return self._attend(query, self._counts, cache, cache[..., :latent])

    def _length(self, place: int, page_size: int) -> int:
        assert self._tables is not None
        return int(self._tables["lengths"][place])
