"""Experts in one C call, on every path that this processor has, against the loop over experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from llmopt.base.processor import VARIABLE
from llmopt.engine.kernels.common.graphs import CpuGraph, GraphMemoryPool
from llmopt.engine.kernels.elementwise.dispatch import RowKernelQuery
from llmopt.engine.kernels.moe.dispatch import (
    EXPERTS,
    ExpertsKernel,
    ExpertsKernelQuery,
    LoopedExperts,
    NativeExperts,
    RoutingRule,
    native_experts,
    route_torch,
)
from llmopt.engine.model.layers.mlp import GatedMlp, gating
from llmopt.engine.model.layers.projection import Projection
from llmopt.quant.base.scheme import Activations, Scheme
from llmopt.quant.families.spec_parts import CLAMPED_SWIGLU
from llmopt.quant.kinds.fp4.scheme import Fp4Scheme
from llmopt.quant.kinds.fp8.scheme import FloatScheme
from llmopt.quant.kinds.ggml.scheme import GgufScheme
from llmopt.quant.kinds.ggml.tensor import GgufTensor, quantize_blocks
from llmopt.quant.kinds.integer.scheme import IntScheme

from ...support.native_paths import native_paths
from ...support.quantized_world import quantized

HERE = native_paths()
pytestmark = pytest.mark.skipif(not HERE, reason="the C kernels want AVX2 or NEON, and a compiler")
HIDDEN, INNER, COUNT = 256, 288, 6


@pytest.fixture(params=HERE or ["off"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every path, forced; the test runs on it and on no other."""
    monkeypatch.setenv(VARIABLE, request.param)
    chosen = native_experts()
    if chosen.library is None:
        pytest.skip(str(chosen.reason))
    assert chosen.path == request.param
    yield request.param


def expert(
    number: int,
    scheme: Scheme | None,
    dtype: torch.dtype,
    bits: int = 16,
    activation: str = "silu",
    bias: bool = False,
) -> GatedMlp:
    g = torch.Generator().manual_seed(number)

    def projection(out: int, inputs: int) -> Projection:
        weight = torch.randn(out, inputs, generator=g) * inputs**-0.5
        added = torch.randn(out, generator=g).to(dtype) if bias else None
        if scheme is None:
            return Projection([weight.to(dtype)], added, dtype)
        if isinstance(scheme, GgufScheme):
            held = GgufTensor(quantize_blocks(weight, scheme.type), scheme)
        else:
            held = quantized(weight, scheme, torch.float16)
        return Projection([held], added, dtype, bits)

    combine = gating(activation, RowKernelQuery("cpu", dtype, INNER))
    return GatedMlp(projection(2 * INNER, HIDDEN), projection(HIDDEN, INNER), combine)


def routing(
    tokens: int, per_token: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, top-k weights and expert ids; no token is routed to the last expert."""
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=g).to(dtype)
    chosen = torch.rand(tokens, COUNT - 1, generator=g).topk(per_token, dim=1)
    return x, chosen.values, chosen.indices


def selected(experts: list[GatedMlp], dtype: torch.dtype, on_inputs: bool = False) -> ExpertsKernel:
    candidate = EXPERTS.select(ExpertsKernelQuery("cpu", dtype))
    assert candidate.name == "native-grouped"
    return candidate.run(experts, range(COUNT), COUNT, on_inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("scheme", "bits"),
    [
        (IntScheme(4, 32, False), 16),
        (IntScheme(4, 32, True), 8),
        (IntScheme(8, -1, True, Activations("int8")), 16),
        (GgufScheme("Q8_0"), 8),
        (Fp4Scheme("mxfp4"), 16),
        (FloatScheme("block", Activations("fp8", "group128")), 16),
    ],
    ids=str,
)
def test_they_are_the_loop_bit_for_bit(
    path: str, scheme: Scheme, bits: int, dtype: torch.dtype
) -> None:
    experts = [expert(number, scheme, dtype, bits) for number in range(COUNT)]
    kernel = selected(experts, dtype)
    assert isinstance(kernel, NativeExperts)
    reference = LoopedExperts(experts, range(COUNT), COUNT, False)
    assert kernel.weight_bytes == reference.weight_bytes
    for tokens, per_token in ((0, 2), (1, 1), (3, 5), (20, 2), (300, 3)):
        given = routing(tokens, per_token, dtype)
        assert torch.equal(kernel(*given), reference(*given))


@pytest.mark.parametrize("on_inputs", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", CLAMPED_SWIGLU])
def test_biases_activations_and_weights_on_the_inputs(
    path: str, activation: str, on_inputs: bool
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        experts = [
            expert(number, Fp4Scheme("mxfp4"), dtype, 16, activation, bias=True)
            for number in range(COUNT)
        ]
        kernel = selected(experts, dtype, on_inputs)
        assert isinstance(kernel, NativeExperts)
        reference = LoopedExperts(experts, range(COUNT), COUNT, on_inputs)
        given = routing(9, 3, dtype)
        assert torch.equal(kernel(*given), reference(*given))
        shared = torch.randn(9, HIDDEN).to(dtype)
        assert torch.equal(kernel(*given, shared), reference(*given, shared))


def test_the_experts_of_a_rank_are_its_part_of_the_sum(path: str) -> None:
    scheme, dtype = IntScheme(4, 32, True), torch.float32
    experts = [expert(number, scheme, dtype) for number in range(COUNT)]
    given = routing(30, 3, dtype)
    candidate = EXPERTS.select(ExpertsKernelQuery("cpu", dtype))
    for ids in (range(2), range(2, 5), range(5, 6)):
        local = [experts[number] for number in ids]
        kernel = candidate.run(local, ids, COUNT, False)
        assert isinstance(kernel, NativeExperts)
        assert torch.equal(kernel(*given), LoopedExperts(local, ids, COUNT, False)(*given))


def test_threads_and_neighbours_change_nothing(path: str) -> None:
    dtype = torch.bfloat16
    experts = [expert(number, GgufScheme("Q4_1"), dtype, 8) for number in range(COUNT)]
    kernel = selected(experts, dtype)
    x, weights, ids = routing(200, 3, dtype)
    together = kernel(x, weights, ids)
    for rows in (slice(0, 1), slice(7, 40)):
        assert torch.equal(kernel(x[rows], weights[rows], ids[rows]), together[rows])
    torch.set_num_threads(2)
    try:
        assert torch.equal(kernel(x, weights, ids), together)
    finally:
        torch.set_num_threads(1)


def test_a_captured_call_follows_the_routing(path: str) -> None:
    dtype = torch.bfloat16
    experts = [expert(number, GgufScheme("Q4_1"), dtype, 8) for number in range(COUNT)]
    kernel = selected(experts, dtype)
    assert kernel.is_capturable
    first, second = routing(4, 2, dtype), routing(4, 2, dtype)
    second = (second[0].flip(0), second[1].flip(0), (second[2].flip(0) + 1) % COUNT)
    held = [part.clone() for part in first]
    graph = CpuGraph(lambda: kernel(*held), GraphMemoryPool())
    for given in (first, second):
        for to, part in zip(held, given, strict=True):
            to.copy_(part)
        assert torch.equal(graph.replay(), kernel(*given))


def test_experts_that_differ_or_are_not_packed_are_run_one_by_one(path: str) -> None:
    dtype = torch.float32
    kinds: list[Sequence[Scheme | None]] = [
        [None] * COUNT,
        [IntScheme(4, 32, True)] * (COUNT - 1) + [IntScheme(4, 16, True)],
        [IntScheme(8, -1, True, Activations("int8", "tensor", dynamic=False))] * COUNT,
    ]
    for schemes in kinds:
        experts = [expert(number, scheme, dtype) for number, scheme in enumerate(schemes)]
        assert isinstance(selected(experts, dtype), LoopedExperts)


@pytest.mark.parametrize(
    "rule", [RoutingRule(2), RoutingRule(2, False, num_groups=2, num_shared=1)]
)
def test_a_captured_routing_follows_the_logits(rule: RoutingRule) -> None:
    held = torch.zeros(3, 8)
    graph = CpuGraph(lambda: torch.stack(route_torch(held, rule)), GraphMemoryPool())
    for seed in range(2):
        held.copy_(torch.randn(3, 8, generator=torch.Generator().manual_seed(seed)))
        assert torch.equal(graph.replay(), torch.stack(route_torch(held, rule)))
