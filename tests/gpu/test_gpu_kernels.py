"""Triton's kernels on a GPU, at the sizes of real models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_world import STORED, World
from llmopt.engine.kernels import paged_attention as pa
from llmopt.engine.kernels.head_norms import HeadNorms
from llmopt.engine.kernels.layer_kernels import TorchNorm, TorchTurn, torch_silu_gate
from llmopt.engine.kernels.paged_tensor import PagedTensor
from llmopt.engine.kernels.quantized_linear import prepare_quantized_linear
from llmopt.quant.methods.int_grid import round_to_nearest
from llmopt.quant.scheme import IntScheme

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
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
    from llmopt.engine.kernels.triton.attention import attend_triton

    shape: Any = {"heads": heads, "kv_heads": kv_heads, "dims": dims, "block_size": 16}
    shape |= {"stored": stored, "dtype": BF16, "device": "cuda", "in_keys": dims[0] != dims[1]}
    world = World([4000, 20000, 700, 1, 2500], [1, 1, 5, 1, 2048], **shape)
    for rule in (pa.AttentionRule(0.09), pa.AttentionRule(0.09, window=1000, kept=4, softcap=30.0)):
        close(world.attend(attend_triton, rule), world.attend(pa.attend_sdpa, rule))


def test_a_cache_beyond_32_bit_offsets() -> None:
    """More than 2**31 elements in one tensor; the sequence lies at its end."""
    from llmopt.engine.kernels.triton.attention import attend_triton

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
    expected = pa.attend_sdpa(queries, cache, cache, batch, rule)
    close(attend_triton(queries, cache, cache, batch, rule), expected)


def test_rows() -> None:
    from llmopt.engine.kernels.triton.gate import TritonGate
    from llmopt.engine.kernels.triton.norm import TritonNorm

    x, weight = torch.randn(4097, 4096, device="cuda").to(BF16), torch.randn(4096, device="cuda")
    ours, theirs = TritonNorm(weight.to(BF16), 1e-5), TorchNorm(weight.to(BF16), 1e-5)
    for got, expected in zip(ours(x, x.flip(0)), theirs(x, x.flip(0)), strict=True):
        close(got, expected)
    gate, up = torch.randn(1000, 28672, device="cuda").to(BF16).split(14336, dim=1)
    close(TritonGate("silu")(gate, up), torch_silu_gate(gate, up))


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_turn(stored: torch.dtype) -> None:
    from llmopt.engine.kernels.triton.turn import TritonTurn

    stacked = torch.randn(3000, 48, 128, device="cuda").to(BF16)
    angle = torch.rand(3000, 1, 64, device="cuda") * 6
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([-angle.sin(), angle.sin()], -1)
    weight = torch.randn(128, device="cuda").to(BF16)
    norms = HeadNorms(weight, weight.flip(0), 1e-6)
    slots = torch.randperm(4096, device="cuda")[:3000]
    results = []
    for turn in (TorchTurn(), TritonTurn()):
        keys, values = (PagedTensor.zeros(256, 16, 8, 128, slots.device, stored) for _ in range(2))
        own = turn(stacked.clone(), 32, cos.to(BF16), sin.to(BF16), keys, values, slots, norms)
        blocks = torch.arange(256, device="cuda")
        results.append([own, keys.read(blocks, BF16), values.read(blocks, BF16)])
    for expected, got in zip(*results, strict=True):
        close(got, expected, 3e-2 if stored is torch.float8_e4m3fn else 1e-2)


@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (1000, 4096)], ids=str)
@pytest.mark.parametrize(
    "scheme", [IntScheme(4, 128, False), IntScheme(4, 32, True), IntScheme(8, -1, True)], ids=str
)
def test_products(scheme: IntScheme, shape: tuple[int, int]) -> None:
    weight: Any = round_to_nearest(torch.randn(shape), scheme, torch.float16)
    weight = replace(weight, **{name: part.cuda() for name, part in weight.parts().items()})
    linear, floats = prepare_quantized_linear(weight, BF16), weight.dequantize(torch.float32)
    for tokens in (1, 2, 16, 17, 64, 65, 500):
        x = torch.randn(tokens, shape[1], device="cuda").to(BF16)
        close(linear(x), x.float() @ floats.T)
