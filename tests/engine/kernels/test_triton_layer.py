"""Triton kernels for norms, gates, per-token quantization and RoPE + KV write, against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from llmopt.engine.kernels.attention.paged_tensor import E4M3_ALONE, CacheDtype, PagedTensor
from llmopt.engine.kernels.elementwise.dispatch import (
    GATE,
    GELU_GATE,
    NORM,
    ROPE_AND_CACHE,
    RowKernelQuery,
)
from llmopt.engine.kernels.elementwise.reference import (
    ActivationQuant,
    HeadNorms,
    QuantizedActivations,
    RopeCall,
    TorchNorm,
    TorchRopeAndCache,
    expand_cos_sin,
    torch_silu_gate,
)
from llmopt.quant.base.scheme import Activations
from torch.nn import functional

from ...support.triton_world import DEVICE

pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # the interpreter's: exp overflows
DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(DEVICE, dtype)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype is expected.dtype
    bound = 2e-2 if got.dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(got, expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 64, 65, 1000, 1024])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_norm(rows: int, size: int, dtype: torch.dtype) -> None:
    from llmopt.engine.kernels.elementwise.triton_rows import TritonNorm

    weight = random(size, seed=1, dtype=dtype)
    wide = random(rows, size + 3, seed=2, dtype=dtype)
    x, added = wide[:, 1 : size + 1], random(rows, size, seed=3, dtype=dtype)
    ours, theirs = TritonNorm(weight, 1e-5), TorchNorm(weight, 1e-5)
    for other in (None, added):
        for got, expected in zip(ours(x, other), theirs(x, other), strict=True):
            close(got, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 172, 1024, 1500])
def test_gates(size: int, dtype: torch.dtype) -> None:
    from llmopt.engine.kernels.elementwise.triton_rows import TritonGate

    both = random(3, 2 * size, dtype=dtype) * 4
    gate, up = both.split(size, dim=1)
    close(TritonGate("silu")(gate, up), torch_silu_gate(gate, up))
    close(TritonGate("gelu")(gate, up), functional.gelu(gate) * up)
    tanh = functional.gelu(gate, approximate="tanh") * up
    close(TritonGate("gelu_tanh")(gate, up), tanh)
    assert TritonGate("silu")(gate[:0], up[:0]).shape == (0, size)


def test_gates_far_from_zero_are_no_nan() -> None:
    from llmopt.engine.kernels.elementwise.triton_rows import TritonGate

    gate = torch.tensor([[-300.0, -90.0, 0.0, 90.0, 300.0]], device=DEVICE)
    expected = torch.tensor([[0.0, 0.0, 0.0, 90.0, 300.0]], device=DEVICE)
    for name in ("silu", "gelu", "gelu_tanh"):
        close(TritonGate(name)(gate, torch.ones_like(gate)), expected)


ACTIVATION_QUANTS = [
    Activations("int8"),
    Activations("int8", "tensor", dynamic=False),
    Activations("fp8", "group128"),
]


@pytest.mark.sweep(10)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activations", ACTIVATION_QUANTS, ids=str)
@pytest.mark.parametrize("size", [1, 80, 128, 172, 1000])
def test_norms_and_gates_quantize_what_they_write(
    size: int, activations: Activations, dtype: torch.dtype
) -> None:
    """Bit-identical to quantizing the float output."""
    from llmopt.engine.kernels.elementwise.triton_rows import TritonGate, TritonNorm, round_rows

    fixed = None if activations.dynamic else torch.tensor([0.02], device=DEVICE)
    activation_quant = ActivationQuant(activations, fixed)
    x, added = (random(3, size, seed=seed, dtype=dtype) for seed in (1, 2))
    x[1], added[1] = 0.0, 0.0
    norm, gate = TritonNorm(random(size, seed=3, dtype=dtype), 1e-5), TritonGate("silu")
    for other in (None, added):
        (total, plain), (own, rows) = norm(x, other), norm.quantized(x, other, activation_quant)
        assert torch.equal(own, total)
        same_rows(rows, round_rows(plain, activation_quant))
    front, back = random(3, 2 * size, seed=4, dtype=dtype).split(size, dim=1)
    same_rows(
        gate.quantized(front, back, activation_quant),
        round_rows(gate(front, back), activation_quant),
    )
    assert norm.quantized(x[:0], None, activation_quant)[1].codes.shape == (0, size)


def same_rows(got: QuantizedActivations, expected: QuantizedActivations) -> None:
    assert torch.equal(got.codes.float(), expected.codes.float())
    assert torch.equal(got.scales, expected.scales)


ROPE_CASES: list[tuple[dict[str, Any], CacheDtype]] = [
    ({}, torch.float32),
    ({"normed": True}, torch.float32),
    ({"normed": True, "width": 16}, torch.bfloat16),
    ({"heads": 5, "kv_heads": 1, "dim": 24}, torch.bfloat16),
    ({"heads": 2, "kv_heads": 2, "dim": 80, "width": 20, "normed": True}, torch.int8),
    ({"heads": 10, "kv_heads": 2}, torch.int8),
    ({"heads": 6, "kv_heads": 3, "normed": True}, torch.float8_e4m3fn),
    ({"heads": 6, "kv_heads": 3}, torch.float8_e5m2),
    ({"heads": 6, "kv_heads": 3}, E4M3_ALONE),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "stored"), ROPE_CASES)
def test_rope_and_cache(shape: dict[str, Any], stored: CacheDtype, dtype: torch.dtype) -> None:
    from llmopt.engine.kernels.elementwise.triton_cache_write import TritonRopeAndCache

    given = {"heads": 4, "kv_heads": 2, "dim": 32, "width": None, "normed": False, **shape}
    heads, kv_heads, dim = given["heads"], given["kv_heads"], given["dim"]
    width = given["width"] or dim
    tokens = 5
    wide = random(tokens, (heads + 2 * kv_heads) * dim + 8, dtype=dtype)
    stacked = wide[:, : (heads + 2 * kv_heads) * dim].unflatten(1, (-1, dim))
    stacked[2, heads + kv_heads :] = 0.0
    angle = random(tokens, 1, width // 2, seed=4) * 3
    cos, sin = (part.to(dtype) for part in expand_cos_sin(angle.cos(), angle.sin()))
    slots = torch.tensor([7, 0, 3, 11, 2], device=DEVICE)
    norms = None
    if given["normed"]:
        norms = HeadNorms(random(dim, seed=5, dtype=dtype), random(dim, seed=6, dtype=dtype), 1e-6)
    results = []
    for rope_and_cache in (TorchRopeAndCache(), TritonRopeAndCache()):
        caches = [
            PagedTensor.zeros(3, 4, kv_heads, dim, torch.device(DEVICE), stored) for _ in range(2)
        ]
        queries = rope_and_cache(
            RopeCall(stacked.clone(), heads, cos, sin, caches[0], caches[1], slots, norms)
        )
        blocks = torch.arange(3, device=DEVICE)
        results.append([queries, *(cache.read(blocks, torch.float32) for cache in caches)])
    # torch rounds between its operations, so the last bit differs, and with it an 8-bit cache code.
    ulp = 1e-5 if dtype is torch.float32 else 3e-2
    steps: dict[CacheDtype, float] = {
        torch.int8: 0.05,
        torch.float8_e5m2: 0.6,
        torch.bfloat16: 1e-2,
    }
    steps |= dict.fromkeys((torch.float8_e4m3fn, E4M3_ALONE), 0.3)
    step = steps.get(stored, 1e-5)
    for expected, got, bound in zip(*results, (ulp, ulp + step, step), strict=True):
        torch.testing.assert_close(got, expected, atol=bound, rtol=bound)
        assert (got - expected).abs().mean() < 4e-3


def test_values_are_rounded_half_to_even() -> None:
    """Values with a scale of 1 in int8, by hand; in e4m3 within half a step."""
    from llmopt.engine.kernels.elementwise.triton_cache_write import TritonRopeAndCache

    values = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 3.49], device=DEVICE)
    stacked = values.view(1, 1, 8).repeat(3, 3, 1)
    ones, zeros = torch.ones(3, 1, 8, device=DEVICE), torch.zeros(3, 1, 8, device=DEVICE)
    slots = torch.arange(3, device=DEVICE)
    for stored in (torch.int8, torch.float8_e4m3fn):
        keys, cache = (
            PagedTensor.zeros(1, 4, 1, 8, torch.device(DEVICE), stored) for _ in range(2)
        )
        TritonRopeAndCache()(RopeCall(stacked.clone(), 1, ones, zeros, keys, cache, slots))
        codes, scales = cache.codes.float()[0, :3, 0], cache.parts[1].float()[0, :3, 0]
        largest = 127.0 if stored is torch.int8 else 448.0
        torch.testing.assert_close(
            scales, torch.full_like(scales, 127 / largest), rtol=1e-6, atol=0
        )
        if stored is torch.int8:
            assert codes.tolist() == [[127, 0, 2, 2, 0, -2, -126, 3]] * 3
        else:
            scaled = (values * (448 / 127)).expand_as(codes)
            torch.testing.assert_close(codes, scaled, rtol=1 / 16, atol=2**-10)


def test_a_gpu_takes_them() -> None:
    kernel_query = RowKernelQuery("cuda", torch.bfloat16, 100)
    for operation in (NORM, GATE, GELU_GATE, ROPE_AND_CACHE):
        assert operation.select(kernel_query).name == "triton"
