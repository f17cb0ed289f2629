"""Backends behind the kernels' table, on stand-ins that hold callers to the libraries' documented signatures.

None of the libraries has run here: a stand-in checks shapes, dtypes and layouts, and computes in torch.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from llmopt.engine.kernels.attention import library_attention
from llmopt.engine.kernels.attention.batch import (
    AttentionBatch,
    AttentionRule,
    DecodeGroup,
    SequenceSpan,
)
from llmopt.engine.kernels.attention.dispatch import PAGED_ATTENTION
from llmopt.engine.kernels.attention.paged_attention import attend_sdpa
from llmopt.engine.kernels.attention.paged_tensor import PagedTensor
from llmopt.engine.kernels.common.devices import Backend
from llmopt.engine.kernels.common.dispatch import Operation
from llmopt.engine.kernels.elementwise.dispatch import DELTA_RULE
from llmopt.engine.kernels.linear import library_linear
from llmopt.engine.kernels.linear.quantized_linear import (
    QUANTIZED_LINEAR,
    QuantizedLinearKernelQuery,
)
from llmopt.engine.kernels.moe.dispatch import EXPERTS
from llmopt.quant.base.scheme import Activations
from llmopt.quant.kinds.fp8.kind import FloatKind
from llmopt.quant.kinds.fp8.scheme import FloatScheme
from llmopt.quant.kinds.integer.kind import round_to_nearest
from llmopt.quant.kinds.integer.scheme import IntScheme

from ...support.triton_world import DEVICE

CPU, ROOT = torch.device("cpu"), Path(__file__).parents[3]


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: None = None,
    v: None = None,
    qv: None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_seqlens: Any = None,
    cache_batch_idx: None = None,
    cache_leftpad: None = None,
    page_table: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: None = None,
    max_seqlen_q: int | None = None,
    softmax_scale: float = 1.0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> torch.Tensor:
    """FlashAttention-3's, with a page table: `hopper/flash_attn_interface.py` of Dao-AILab/flash-attention."""
    assert causal and cache_seqlens.dtype is page_table.dtype is torch.int32
    assert k_cache.dim() == 4 and k_cache.stride(-1) == 1
    if cu_seqlens_q is None:
        assert q.dim() == 4 and q.shape[1] == 1
        sequences = list(q.unbind())
    else:
        assert q.dim() == 3 and cu_seqlens_q.dtype is torch.int32
        counts = cu_seqlens_q.diff().tolist()
        assert max(counts) == max_seqlen_q and cu_seqlens_q[-1] == len(q)
        sequences = list(q.split(counts))
    outs = []
    for query, length, pages in zip(sequences, cache_seqlens.tolist(), page_table, strict=True):
        group = q.shape[-2] // k_cache.shape[2]
        keys, values = (
            cache[pages.long()].flatten(0, 1)[:length].repeat_interleave(group, dim=1)
            for cache in (k_cache, v_cache)
        )
        scores = torch.einsum("qhd,khd->hqk", query, keys) * softmax_scale
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        at = torch.arange(length)[None] - (length - len(query) + torch.arange(len(query)))[:, None]
        visible = at <= 0 if window_size == (-1, -1) else (at <= 0) & (at >= -window_size[0])
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.stack(outs) if cu_seqlens_q is None else torch.cat(outs)


def attention_world() -> tuple[torch.Tensor, PagedTensor, PagedTensor, AttentionBatch]:
    """Two spans and two decodes, of which one was evicted to a window; rows of theirs alternate."""
    g = torch.Generator().manual_seed(0)
    keys, values = (PagedTensor.zeros(12, 4, 2, 8, CPU, torch.float32) for _ in "kv")
    for cache in (keys, values):
        cache.codes.copy_(torch.randn(cache.codes.shape, generator=g))
    spans = [
        SequenceSpan(0, 3, 9, torch.tensor([1, 2, 3])),
        SequenceSpan(4, 9, 5, torch.tensor([4, 5])),
    ]
    tables = torch.tensor([[6, 7], [8, 0]]).view(-1)
    decode = DecodeGroup(torch.tensor([3, 9]), tables, torch.tensor([16, 2]), torch.tensor([8, 0]))
    queries = torch.randn(10, 4, 8, generator=g)
    return queries, keys, values, AttentionBatch(spans, decode, 4, torch.float32)


@pytest.mark.parametrize(
    "rule",
    [AttentionRule(0.3, window=6), AttentionRule(0.3, window=6, softcap=2.0)],
    ids=["window", "softcap"],
)
def test_flash_attention(rule: AttentionRule, monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)
    monkeypatch.setattr(library_attention, "hub_kernel", lambda name: Backend(library))

    def left(*_: Any) -> torch.Tensor:
        raise AssertionError("left to the other kernel")

    otherwise: Any = left

    world = attention_world()
    got = library_attention.attend_flash(otherwise)(*world, rule)
    torch.testing.assert_close(got, attend_sdpa(*world, rule))


def test_what_flash_attention_lacks_is_left_to_our_kernel() -> None:
    queries, keys, values, batch = attention_world()
    otherwise: Any = lambda *_: queries  # noqa: E731
    attend = library_attention.attend_flash(otherwise)
    for rule in (AttentionRule(1.0, sinks=torch.zeros(4)), AttentionRule(1.0, chunk=4)):
        assert attend(queries, keys, values, batch, rule) is queries
    stored = PagedTensor.zeros(12, 4, 2, 8, CPU, torch.int8)
    assert attend(queries, stored, stored, batch, AttentionRule(1.0)) is queries


def marlin_library(weight: torch.Tensor) -> Any:
    """Marlin's functions as `kernels-community/quantization` has them."""

    def gptq_marlin_repack(
        b_q_weight: torch.Tensor, perm: torch.Tensor, size_k: int, size_n: int, num_bits: int
    ) -> torch.Tensor:
        assert b_q_weight.dtype is torch.int32 and b_q_weight.shape == (size_k // 8, size_n)
        assert perm.numel() == 0 and num_bits == 4 and b_q_weight.is_contiguous()
        for place in range(8):
            assert torch.equal((b_q_weight >> 4 * place) & 15, weight.T[place::8].int())
        return b_q_weight.view(size_k // 16, -1)

    def gptq_marlin_gemm(
        a: torch.Tensor, c: None, b_q_weight: torch.Tensor, b_scales: torch.Tensor,
        global_scale: None, b_zeros: torch.Tensor, g_idx: torch.Tensor, perm: torch.Tensor,
        workspace: torch.Tensor, b_q_type: str, size_m: int, size_n: int, size_k: int,
        is_k_full: bool = True, use_atomic_add: bool = False, use_fp32_reduce: bool = False,
        is_zp_float: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        assert a.shape == (size_m, size_k) and a.is_contiguous() and b_scales.dtype is a.dtype
        assert b_scales.shape[1] == size_n and b_q_type == "uint4b8" and is_k_full
        assert not b_zeros.numel() and not g_idx.numel() and not perm.numel()
        assert workspace.dtype is torch.int32 and not workspace.any()
        order = [8 * j + i for i in range(8) for j in range(8)]
        scales = torch.empty_like(b_scales).reshape(-1, 64)
        scales[:, order] = b_scales.reshape(-1, 64)
        factors = scales.view_as(b_scales).T.repeat_interleave(size_k // len(b_scales), 1)
        return a @ ((weight.to(a.dtype) - 8) * factors).T

    types = SimpleNamespace(scalar_types=SimpleNamespace(uint4b8="uint4b8"))
    return SimpleNamespace(
        gptq_marlin_repack=gptq_marlin_repack, gptq_marlin_gemm=gptq_marlin_gemm, scalar_type=types
    )


def test_marlin(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = round_to_nearest(torch.randn(128, 256), IntScheme(4, 64, True), torch.float32)
    library = marlin_library(weight.codes)
    monkeypatch.setattr(library_linear, "hub_kernel", lambda name: Backend(library))
    linear = library_linear.MarlinLinear(weight, torch.float32)
    x = torch.randn(3, 256)
    torch.testing.assert_close(linear(x), x @ weight.dequantize().T, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(DEVICE != "cpu", reason="its stand-in computes on a CPU")
def test_deep_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """`fp8_gemm_nt(a, b, d)` of deepseek-ai/DeepGEMM, on Hopper's layouts."""
    scheme = FloatScheme("block", Activations("fp8", "group128"))
    weight = FloatKind(scheme).round(torch.randn(256, 384), torch.float32)

    def transposed(scales: torch.Tensor) -> torch.Tensor:
        assert scales.dtype is torch.float32 and scales.dim() == 2
        return scales.T.contiguous().T

    def fp8_gemm_nt(a: Any, b: Any, d: torch.Tensor) -> None:
        (codes, scales), (values, factors) = a, b
        assert codes.dtype is values.dtype is torch.float8_e4m3fn and d.dtype is torch.bfloat16
        assert scales.shape == (len(codes), codes.shape[1] // 128) and scales.stride(0) == 1
        assert factors.shape == (len(values) // 128, values.shape[1] // 128)
        x = codes.float() * scales.repeat_interleave(128, 1)
        d.copy_(x @ weight.dequantize().T)

    library = SimpleNamespace(get_mn_major_tma_aligned_tensor=transposed, fp8_gemm_nt=fp8_gemm_nt)
    monkeypatch.setattr(library_linear, "package", lambda name: Backend(library))
    linear = library_linear.DeepGemmLinear(weight, torch.bfloat16)
    x = torch.randn(3, 384).bfloat16()
    expected = x.float() @ weight.dequantize().T
    # Of the inputs in e4m3.
    assert (linear(x) - expected).norm() / expected.norm() < 0.05
    assert linear(x[:0]).shape == (0, 256)


def test_a_deep_gemm_without_the_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse version 1.0.0 of February 2025, the one on the package index."""
    scheme = FloatScheme("block", Activations("fp8", "group128"))
    monkeypatch.setattr(library_linear, "package", lambda _: Backend(SimpleNamespace()))
    assert "no fp8_gemm_nt" in (library_linear.refuses_deep_gemm(scheme, 256, 384) or "")


def test_without_the_extra_ours_serve() -> None:
    query = QuantizedLinearKernelQuery("cuda", torch.bfloat16, 128, 256, IntScheme(4, 64, True))
    reasons = dict(QUANTIZED_LINEAR.explain(query).reasons)
    assert reasons["marlin"] and reasons["deep-gemm"]


OURS = ("triton", "native", "torch", "tiled", "trellis", "e8p", "loop")
"""How the names of our own kernels begin, and of torch's."""


def test_the_page_names_every_library_among_the_candidates() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    table = page.partition("| candidate | from | what for |")[2].partition("\n\n")[0]
    told = {row.split("|")[1].strip() for row in table.splitlines()[2:]}
    operations: list[Operation[Any, Any]] = [PAGED_ATTENTION, QUANTIZED_LINEAR, EXPERTS, DELTA_RULE]
    named = {each.name for operation in operations for each in operation.candidates}
    assert told == {name for name in named if not name.startswith(OURS)}
