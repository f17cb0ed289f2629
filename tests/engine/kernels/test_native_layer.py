"""C kernels for norms, gates and RoPE + KV write, on every path that this processor has, against torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llmopt.base.processor import VARIABLE
from llmopt.engine.kernels.attention.paged_tensor import PagedTensor
from llmopt.engine.kernels.elementwise.dispatch import GATE, NORM, ROPE_AND_CACHE, RowKernelQuery
from llmopt.engine.kernels.elementwise.native_rows import (
    NativeGate,
    NativeNorm,
    NativeRopeAndCache,
    native_layer,
)
from llmopt.engine.kernels.elementwise.reference import (
    ActivationQuant,
    RopeCall,
    TakesQuantizedInput,
    TorchNorm,
    TorchRopeAndCache,
    expand_cos_sin,
    torch_clamped_swiglu,
    torch_silu_gate,
)
from llmopt.engine.kernels.linear.quantized_linear import prepare_quantized_linear
from llmopt.quant.base.scheme import Activations
from llmopt.quant.kinds.integer.kind import round_to_nearest
from llmopt.quant.kinds.integer.scheme import IntScheme
from torch.nn import functional

from ...support.native_paths import native_paths

HERE = native_paths()
pytestmark = pytest.mark.skipif(not HERE, reason="the C kernels want AVX2 or NEON, and a compiler")
DTYPES = (torch.float32, torch.bfloat16)
CPU = torch.device("cpu")


@pytest.fixture(params=HERE or ["off"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every path, forced; the test runs on it and on no other."""
    monkeypatch.setenv(VARIABLE, request.param)
    found = native_layer()
    if found.library is None:
        pytest.skip(str(found.reason))
    assert found.path == request.param
    yield request.param


def rows_of(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-2, 1, rows)[:, None]
    return (torch.randn(rows, width, generator=g) * scale).to(dtype)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """bfloat16: a sum in another order may round to an adjacent value."""
    bound = 1e-5 if got.dtype is torch.float32 else 1.6e-2
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=bound)


@pytest.mark.parametrize(
    ("levels", "group", "block"), [(127.0, -1, 128), (127.0, 32, 32), (127.5, -1, 0)]
)
def test_quantized_activations_are_what_a_linear_would_make_of_them(
    path: str, levels: float, group: int, block: int
) -> None:
    """Bit-identical, with a row of zeros, and gate widths that do not fill a vector."""
    scheme = IntScheme(8, group, True, Activations("int8") if levels == 127.5 else None)
    activation_quant = ActivationQuant(Activations("int8"), int8_levels=levels, block=block)

    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(st.integers(1, 20), st.integers(1, 19), st.sampled_from(DTYPES), st.booleans())
    def check(rows: int, sixteens: int, dtype: torch.dtype, adds: bool) -> None:
        size = 32 * (sixteens + 1) if block == 32 else 16 * sixteens
        weight = round_to_nearest(rows_of(40, size, torch.float32), scheme, torch.float32)
        linear: Any = prepare_quantized_linear(weight, dtype, input_bits=8)
        assert isinstance(linear, TakesQuantizedInput)
        assert linear.activation_quant == activation_quant
        norm = NativeNorm(rows_of(1, size, dtype, 3)[0], 1e-5)
        x = rows_of(rows, size, dtype, 1)
        x[rows // 2] = 0.0
        added = x.flip(0) if adds else None
        (total, plain), (same, quantized) = (
            norm(x, added),
            norm.quantized(x, added, activation_quant),
        )
        assert torch.equal(total, same)
        assert torch.equal(linear(quantized), linear(plain))
        gate = NativeGate("silu")
        both = gate.quantized(x, plain, activation_quant)
        assert torch.equal(linear(both), linear(gate(x, plain)))
        odd = gate.quantized(x[:, 1:], plain[:, 1:], activation_quant)
        values = gate(x[:, 1:], plain[:, 1:]).float()
        width = block or size - 1
        values = functional.pad(values, (0, -values.shape[1] % width)).unflatten(1, (-1, width))
        scales = values.abs().amax(-1, keepdim=True) / levels
        scales = scales.where(scales > 0, 1.0)
        assert torch.equal(odd.scales, scales.squeeze(-1))
        codes = (values / scales).round().clamp(-128, 127).to(torch.int8).flatten(1)
        assert torch.equal(odd.codes, codes[:, : size - 1])

    check()


def test_norms(path: str) -> None:
    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(
        st.integers(0, 20),
        st.integers(1, 40),
        st.sampled_from(DTYPES),
        st.booleans(),
        st.booleans(),
    )
    def sweep(rows: int, sixteens: int, dtype: torch.dtype, adds: bool, wide: bool) -> None:
        size = 16 * sixteens
        weight = rows_of(1, size, dtype, 7)[0]
        x = rows_of(rows, size + 48 * wide, dtype)[:, 16 * wide : 16 * wide + size]
        added = rows_of(rows, size, dtype, 3) if adds else None
        got, expected = (kind(weight, 1e-5)(x, added) for kind in (NativeNorm, TorchNorm))
        assert torch.equal(got[0], expected[0])
        close(got[1], expected[1])

    sweep()


def test_gates(path: str) -> None:
    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(st.integers(0, 20), st.integers(1, 200), st.sampled_from(DTYPES), st.booleans())
    def sweep(rows: int, size: int, dtype: torch.dtype, stacked: bool) -> None:
        both = 4 * rows_of(rows, 2 * size, dtype)
        gate, up = both.chunk(2, dim=-1)
        if not stacked:
            gate = gate.contiguous()
        close(NativeGate("silu")(gate, up), torch_silu_gate(gate, up))
        close(NativeGate("clamped_swiglu")(gate, up), torch_clamped_swiglu(gate, up))
        opened = functional.gelu(gate.double()).to(dtype)
        close(NativeGate("gelu")(gate, up), opened * up)
        opened = functional.gelu(gate.double(), approximate="tanh").to(dtype)
        expected = opened * up
        close(NativeGate("gelu_tanh")(gate, up), expected)

    sweep()


def test_gates_far_from_zero(path: str) -> None:
    gate = torch.tensor([[-1e30, -200.0, -88.0, -1.0, -0.0, 0.0, 1.0, 88.0, 200.0, 1e30]])
    got = NativeGate("silu")(gate, torch.ones_like(gate))
    torch.testing.assert_close(
        got, torch_silu_gate(gate, torch.ones_like(gate)), atol=1e-30, rtol=1e-6
    )
    got = NativeGate("gelu_tanh")(gate, torch.ones_like(gate))
    expected = functional.gelu(gate.double(), approximate="tanh").float()
    torch.testing.assert_close(got, expected, atol=1e-30, rtol=1e-6)
    gate = torch.cat([gate, torch.linspace(-8, 8, 400)[None]], dim=1)
    got = NativeGate("gelu")(gate, torch.ones_like(gate))
    below = torch.special.erfc(-gate.double() * 0.5**0.5) / 2  # without cancellation
    torch.testing.assert_close(got, (gate.double() * below).float(), atol=1e-30, rtol=1e-5)


@pytest.mark.parametrize("stored", [*DTYPES, torch.int8, torch.float8_e4m3fn], ids=str)
def test_rope_and_cache_write(path: str, stored: torch.dtype) -> None:
    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(
        st.integers(0, 9),
        st.sampled_from([(4, 1), (4, 2), (3, 3)]),
        st.sampled_from([(32, 32), (64, 32), (80, 32), (128, 128)]),
        st.sampled_from(DTYPES),
    )
    def sweep(
        tokens: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype
    ) -> None:
        (num_heads, kv_heads), (dim, width) = heads, dims
        whole = rows_of(tokens, (num_heads + 2 * kv_heads) * dim, dtype)
        angles = torch.rand(tokens, 1, width // 2, generator=torch.Generator().manual_seed(1)) * 6
        cos, sin = (part.to(dtype) for part in expand_cos_sin(angles.cos(), angles.sin()))
        slots = torch.randperm(24, generator=torch.Generator().manual_seed(2))[:tokens]
        whole[:1, -dim:] = 0.0  # a value of zeros
        found, of_values = [], list[tuple[torch.Tensor, ...]]()
        for kernel in (NativeRopeAndCache(), TorchRopeAndCache()):
            caches = [PagedTensor.zeros(3, 8, kv_heads, dim, CPU, stored) for _ in range(2)]
            stacked = whole.clone().view(tokens, num_heads + 2 * kv_heads, dim)
            queries = kernel(RopeCall(stacked, num_heads, cos, sin, caches[0], caches[1], slots))
            read = [cache.read(torch.arange(3), torch.float32) for cache in caches]
            found.append((queries, *read))
            of_values.append(caches[1].parts)
        if stored is not torch.float8_e4m3fn:  # values are not rotated: bit for bit
            assert all(torch.equal(*parts) for parts in zip(*of_values, strict=True))
        # An 8-bit code, or the last bit of bfloat16, may differ by one.
        bound = (
            0.07 if stored.itemsize == 1 else 1.6e-2 if torch.bfloat16 in (dtype, stored) else 1e-5
        )
        for got, expected in zip(*found, strict=True):
            scale = float(expected.abs().max()) if expected.numel() else 0.0
            torch.testing.assert_close(got, expected, atol=bound * scale, rtol=bound)

    sweep()


def test_a_second_thread_changes_nothing(path: str) -> None:
    x, weight = rows_of(64, 1024, torch.bfloat16), rows_of(1, 1024, torch.bfloat16)[0]
    alone = NativeNorm(weight, 1e-5)(x)[1], NativeGate("silu")(x, x)
    torch.set_num_threads(2)
    try:
        both = NativeNorm(weight, 1e-5)(x)[1], NativeGate("silu")(x, x)
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(alone, both, strict=True))
    assert torch.equal(NativeNorm(weight, 1e-5)(x[5:6])[1], alone[0][5:6])


def test_the_chosen_kernel_and_the_reasons_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = RowKernelQuery("cpu", torch.float32, 24)
    even = RowKernelQuery("cpu", torch.float32, 64)
    monkeypatch.setenv(VARIABLE, HERE[0])
    if native_layer().library is not None:
        assert (
            NORM.select(even).name
            == GATE.select(odd).name
            == ROPE_AND_CACHE.select(even).name
            == "native"
        )
        assert dict(NORM.explain(odd).reasons)["native"] == "it is for multiples of 16 elements"
        assert (
            dict(ROPE_AND_CACHE.explain(odd).reasons)["native"]
            == "it is for multiples of 32 elements"
        )
    monkeypatch.setenv(VARIABLE, "off")
    for operation in (NORM, GATE, ROPE_AND_CACHE):
        assert operation.explain(even).chosen == "torch"
        assert dict(operation.explain(even).reasons)["native"] == f"{VARIABLE}=off"
