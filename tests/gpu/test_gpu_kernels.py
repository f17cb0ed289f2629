"""Triton's kernels on a GPU, at the sizes of real models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from llmopt.engine.kernels.attention import batch as pa
from llmopt.engine.kernels.attention.paged_attention import attend_sdpa
from llmopt.engine.kernels.attention.paged_tensor import PagedTensor
from llmopt.engine.kernels.elementwise.dispatch import GATE, RowKernelQuery
from llmopt.engine.kernels.elementwise.reference import (
    HeadNorms,
    RopeCall,
    TorchNorm,
    TorchRopeAndCache,
    fake_quantize_inputs,
    torch_silu_gate,
)
from llmopt.engine.kernels.linear.quantized_linear import prepare_quantized_linear
from llmopt.engine.kernels.moe.dispatch import EXPERTS, ExpertsKernelQuery, LoopedExperts
from llmopt.engine.model.layers.mlp import GatedMlp
from llmopt.engine.model.layers.projection import Projection
from llmopt.quant.base.device import cuda_problem
from llmopt.quant.base.scheme import Activations, Scheme
from llmopt.quant.kinds.codebook.scheme import CodebookScheme
from llmopt.quant.kinds.fp8.scheme import FloatScheme
from llmopt.quant.kinds.integer.scheme import IntScheme

from ..support.attention_world import STORED, World
from ..support.quantized_world import quantized

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda_problem() is not None, reason=f"no GPU: {cuda_problem()}"),
]
BF16 = torch.bfloat16


def close(got: torch.Tensor, expected: torch.Tensor, most: float = 1e-2) -> None:
    """Relative error of the whole, which NaN never passes."""
    error = (got.float() - expected.float()).norm() / expected.float().norm()
    assert error < most


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dims"),
    [(32, 8, (128, 128)), (16, 8, (128, 128)), (8, 1, (256, 256)), (16, 1, (576, 512))],
)
def test_attention(heads: int, kv_heads: int, dims: tuple[int, int], stored: torch.dtype) -> None:
    from llmopt.engine.kernels.attention.triton_attention import attend_triton

    shape: Any = {"heads": heads, "kv_heads": kv_heads, "dims": dims, "block_size": 16}
    shape |= {"stored": stored, "dtype": BF16, "device": "cuda", "in_keys": dims[0] != dims[1]}
    world = World([4000, 20000, 700, 1, 2500], [1, 1, 5, 1, 2048], **shape)
    for rule in (
        pa.AttentionRule(0.09),
        pa.AttentionRule(0.09, window=1000, num_sink_tokens=4, softcap=30.0),
    ):
        close(world.attend(attend_triton, rule), world.attend(attend_sdpa, rule))


@pytest.mark.parametrize(("kv_heads", "dims"), [(8, (128, 128)), (1, (576, 512))])
def test_a_tile_is_reduced_when_all_its_parts_are_there(
    kv_heads: int, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program that arrives last reads what programs of other multiprocessors wrote, in each replay."""
    from llmopt.engine.kernels.attention import triton_attention as attention

    shape: Any = {"heads": 32, "kv_heads": kv_heads, "dims": dims, "in_keys": kv_heads == 1}
    lengths = [20000, 300, *range(257, 9000, 700)]
    shape |= {"block_size": 16, "stored": BF16, "dtype": BF16, "device": "cuda"}
    world, rule = World(lengths, [1] * len(lengths), **shape), pa.AttentionRule(0.09)
    _, batch = world.batch()
    # Queries take turns, so that what an earlier launch left in a part's place is another result.
    queries = [world.queries, world.queries.flip(1)] * 10

    def attend_all() -> list[torch.Tensor]:
        return [
            attention.attend_triton(own, world.keys, world.values, batch, rule) for own in queries
        ]

    limits = attention.gpu_limits(world.device)
    few = replace(limits, multiprocessors=1)
    with monkeypatch.context() as patch:
        # One program takes all parts of a head, one after the other.
        patch.setattr(attention, "gpu_limits", lambda device: few)
        expected = attend_all()
    attend_all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = attend_all()
    for _ in range(100):
        graph.replay()
        assert all(map(torch.equal, results, expected))


def test_a_cache_beyond_32_bit_offsets() -> None:
    """More than 2**31 elements in one tensor; the sequence lies at its end."""
    from llmopt.engine.kernels.attention.triton_attention import attend_triton

    free, _ = torch.cuda.mem_get_info()
    blocks = 2**31 // (16 * 8 * 128) + 64
    if free < blocks * 16 * 8 * 128 * 4 * 1.2:
        pytest.skip("the GPU has not the memory for it")
    codes = torch.empty(blocks, 16, 8, 128, dtype=BF16, device="cuda")
    ids = torch.arange(blocks - 40, blocks, device="cuda")
    codes[ids] = torch.randn(40, 16, 8, 128, device="cuda").to(BF16)
    span = pa.SequenceSpan(0, 100, 640, ids)
    batch = pa.AttentionBatch([span], None, 16, BF16)
    queries = torch.randn(100, 32, 128, device="cuda").to(BF16)
    cache, rule = PagedTensor(codes), pa.AttentionRule(0.09)
    expected = attend_sdpa(queries, cache, cache, batch, rule)
    close(attend_triton(queries, cache, cache, batch, rule), expected)


def test_rows() -> None:
    from llmopt.engine.kernels.elementwise.triton_rows import TritonGate, TritonNorm

    x, weight = torch.randn(4097, 4096, device="cuda").to(BF16), torch.randn(4096, device="cuda")
    ours, theirs = TritonNorm(weight.to(BF16), 1e-5), TorchNorm(weight.to(BF16), 1e-5)
    for got, expected in zip(ours(x, x.flip(0)), theirs(x, x.flip(0)), strict=True):
        close(got, expected)
    gate, up = torch.randn(1000, 28672, device="cuda").to(BF16).split(14336, dim=1)
    close(TritonGate("silu")(gate, up), torch_silu_gate(gate, up))


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_rope_and_cache(stored: torch.dtype) -> None:
    from llmopt.engine.kernels.elementwise.triton_cache_write import TritonRopeAndCache

    stacked = torch.randn(3000, 48, 128, device="cuda").to(BF16)
    angle = torch.rand(3000, 1, 64, device="cuda") * 6
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([-angle.sin(), angle.sin()], -1)
    weight = torch.randn(128, device="cuda").to(BF16)
    norms = HeadNorms(weight, weight.flip(0), 1e-6)
    slots = torch.randperm(4096, device="cuda")[:3000]
    results = []
    for rope_and_cache in (TorchRopeAndCache(), TritonRopeAndCache()):
        keys, values = (PagedTensor.zeros(256, 16, 8, 128, slots.device, stored) for _ in range(2))
        turned = cos.to(BF16), sin.to(BF16)
        own = rope_and_cache(RopeCall(stacked.clone(), 32, *turned, keys, values, slots, norms))
        blocks = torch.arange(256, device="cuda")
        results.append([own, keys.read(blocks, BF16), values.read(blocks, BF16)])
    for expected, got in zip(*results, strict=True):
        close(got, expected, 3e-2 if stored is torch.float8_e4m3fn else 1e-2)


SCHEMES: list[Scheme] = [
    IntScheme(4, 128, False),
    IntScheme(4, 32, True),
    IntScheme(8, -1, True),
    IntScheme(8, -1, True, Activations("int8")),
    FloatScheme("channel"),
    FloatScheme("channel", Activations("fp8")),
    FloatScheme("block", Activations("fp8", "group128")),
    CodebookScheme("nf4"),
]


@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (1000, 4096)], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_gemm(scheme: Scheme, shape: tuple[int, int]) -> None:
    weight = quantized(torch.randn(shape), scheme, torch.float32).to("cuda")
    linear, floats = prepare_quantized_linear(weight, BF16), weight.dequantize(torch.float32)
    for tokens in (1, 2, 16, 17, 64, 65, 500):
        x = torch.randn(tokens, shape[1], device="cuda").to(BF16)
        close(linear(x), fake_quantize_inputs(x.float(), scheme) @ floats.T)


@pytest.mark.parametrize(
    "scheme",
    [None, IntScheme(4, 128, False), FloatScheme("block", Activations("fp8", "group128"))],
    ids=str,
)
def test_experts(scheme: Scheme | None) -> None:
    """64 experts of the size of Qwen3-30B-A3B's, top-8 routing."""
    rows = RowKernelQuery("cuda", BF16, 768)

    def linear(out: int, inputs: int) -> Projection:
        weight = torch.randn(out, inputs) * inputs**-0.5
        held = weight.to(BF16) if scheme is None else quantized(weight, scheme, torch.float32)
        return Projection([held.to("cuda")], None, BF16)

    experts = [
        GatedMlp(linear(2 * 768, 2048), linear(2048, 768), GATE.select(rows).run())
        for _ in range(64)
    ]
    candidate = EXPERTS.select(ExpertsKernelQuery("cuda", BF16))
    assert candidate.name == "triton-grouped"
    kernel = candidate.run(experts, range(64), 64, False)
    reference = LoopedExperts(experts, range(64), 64, False)
    for tokens in (1, 7, 100, 2000):
        x = torch.randn(tokens, 2048, device="cuda").to(BF16)
        chosen = torch.rand(tokens, 64, device="cuda").topk(8, dim=1)
        given = (x, chosen.values / 8, chosen.indices)
        close(kernel(*given), reference(*given), 2e-2)
