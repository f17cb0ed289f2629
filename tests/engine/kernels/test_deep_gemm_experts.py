"""Experts on DeepGEMM's grouped GEMM, with a stand-in that checks its contiguous layout and computes in torch."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from llmopt.engine.kernels.common.devices import VARIABLE, Backend
from llmopt.engine.kernels.elementwise.dispatch import RowKernelQuery
from llmopt.engine.kernels.linear import library_linear
from llmopt.engine.kernels.moe.dispatch import EXPERTS, ExpertsKernelQuery, LoopedExperts
from llmopt.engine.model.decoder import expert_loader
from llmopt.engine.model.layers.mlp import GatedMlp, gating
from llmopt.quant.base.scheme import Activations
from llmopt.quant.kinds.fp8.kind import FloatKind
from llmopt.quant.kinds.fp8.scheme import FloatScheme

from ...support.triton_world import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="its stand-in computes on a CPU")
HIDDEN, INNER, COUNT, ROWS = 256, 128, 4, 128
SCHEME = FloatScheme("block", Activations("fp8", "group128"))


def product(
    codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, factors: torch.Tensor
) -> torch.Tensor:
    blocks = factors.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (codes.float() * scales.repeat_interleave(128, 1)) @ (values.float() * blocks).T


class Library:
    """`deep_gemm` on Hopper, as far as it is called."""

    calls = 0

    @staticmethod
    def get_mn_major_tma_aligned_tensor(scales: torch.Tensor) -> torch.Tensor:
        assert scales.dtype is torch.float32
        return scales.T.contiguous().T

    @staticmethod
    def fp8_gemm_nt(a: Any, b: Any, d: torch.Tensor) -> None:
        d.copy_(product(*a, *b))

    @classmethod
    def m_grouped_fp8_gemm_nt_contiguous(
        cls, a: Any, b: Any, d: torch.Tensor, grouped_layout: torch.Tensor
    ) -> None:
        cls.calls += 1
        (codes, scales), (values, factors) = a, b
        rows, inputs = codes.shape
        experts, outputs, _ = values.shape
        assert codes.dtype is values.dtype is torch.float8_e4m3fn and d.dtype is torch.bfloat16
        assert d.shape == (rows, outputs) and scales.shape == (rows, inputs // 128)
        assert scales.stride(0) == 1 and values.is_contiguous() and factors.is_contiguous()
        assert factors.shape == (experts, outputs // 128, inputs // 128)
        assert grouped_layout.dtype is torch.int32 and grouped_layout.shape == (rows,)
        assert rows % ROWS == 0 and grouped_layout.is_contiguous()
        for begin in range(0, rows, ROWS):
            block = slice(begin, begin + ROWS)
            held = grouped_layout[block]
            expert, used = int(held[0]), int((held >= 0).sum())
            # One expert a block, its padding at the end; the kernel skips a block that begins with padding.
            assert (held[:used] == expert).all() and (held[used:] == -1).all()
            if expert >= 0:
                d[block] = product(codes[block], scales[block], values[expert], factors[expert]).to(
                    d.dtype
                )


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    from llmopt.engine.kernels.moe import triton_experts

    monkeypatch.setenv(VARIABLE, "interpret")
    Library.calls = 0
    for module in (library_linear, triton_experts):
        monkeypatch.setattr(module, "package", lambda name: Backend(Library))


def expert(number: int) -> Any:
    g = torch.Generator().manual_seed(number)

    def linear(out: int, inputs: int) -> Any:
        weight = torch.randn(out, inputs, generator=g) * inputs**-0.5
        kernel = library_linear.DeepGemmLinear(
            FloatKind(SCHEME).round(weight, torch.float32), torch.bfloat16
        )
        return SimpleNamespace(kernel=kernel, bias=None, weight_bytes=kernel.weight_bytes)

    gate_up, down = linear(2 * INNER, HIDDEN), linear(HIDDEN, INNER)
    combine = gating("silu", RowKernelQuery(DEVICE, torch.bfloat16, INNER))

    class Mlp(SimpleNamespace):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            gate, up = gate_up.kernel(x).chunk(2, dim=-1)
            return down.kernel(combine(gate, up).contiguous())

    return Mlp(gate_up=gate_up, down=down, combine=combine, weight_bytes=0)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("ids", [range(COUNT), range(1, COUNT)], ids=["all", "a rank's"])
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (7, 2), (150, 2)])
def test_they_are_the_sum_of_the_experts(tokens: int, top_k: int, ids: range) -> None:
    """No token is routed to the last expert; the first has more than one block of the largest batch."""
    from llmopt.engine.kernels.moe.triton_experts import group_deep_gemm

    experts = [expert(number) for number in range(COUNT)]
    some = experts[ids.start : ids.stop]
    grouped = group_deep_gemm(some, ids, COUNT, False)
    assert grouped is not None and grouped.is_capturable
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=g).bfloat16()
    scores = torch.rand(tokens, COUNT - 1, generator=g)
    scores[:, 0] += 1
    weights, chosen = scores.topk(top_k, dim=1)
    got = grouped(x, weights, chosen)
    expected = LoopedExperts(some, ids, COUNT, False)(x, weights, chosen)
    assert (got - expected).norm() <= 0.02 * expected.norm()
    assert Library.calls == 2


def test_it_says_why_it_does_not_serve() -> None:
    reasons = dict(EXPERTS.explain(ExpertsKernelQuery(DEVICE, torch.bfloat16)).reasons)
    assert reasons["deep-gemm-grouped"] == "it is a CUDA library"


def test_a_verdict_is_of_experts_in_block_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """One on other experts, where our kernel takes its place, would be one on our kernel."""
    from llmopt.engine.kernels.moe import dispatch

    monkeypatch.setattr(dispatch, "refuses_dtype", lambda *_: None)
    bf16 = ExpertsKernelQuery(DEVICE, torch.bfloat16)
    fp8 = replace(bf16, is_block_fp8=True)
    assert EXPERTS.select(bf16).name == "triton-grouped"
    reasons = dict(EXPERTS.explain(bf16).reasons)
    assert reasons["deep-gemm-grouped"] == "it is for experts in block FP8"
    assert EXPERTS.select(fp8).name == "deep-gemm-grouped"
    assert str(fp8) != str(bf16)


def test_a_loader_tells_experts_in_block_fp8_from_others() -> None:
    each = expert(0)
    in_fp8 = GatedMlp(each.gate_up, each.down, each.combine)
    other = replace(in_fp8, down=cast(Any, SimpleNamespace(kernel=None)))
    assert expert_loader._is_block_fp8([in_fp8] * 2)
    assert not expert_loader._is_block_fp8([in_fp8, other])


def test_other_experts_are_left_to_our_kernel() -> None:
    from llmopt.engine.kernels.moe.triton_experts import group_deep_gemm

    other = expert(1)
    other.gate_up.kernel = None
    assert group_deep_gemm([expert(0), other], range(2), 2, False) is None
