"""Trellis codes in Triton against torch: values, transforms, and whole linears."""

from __future__ import annotations

import pytest
import torch
from llmopt.engine.kernels.common.devices import VARIABLE
from llmopt.engine.kernels.linear.quantized_linear import prepare_quantized_linear
from llmopt.engine.kernels.linear.triton_code_gemm import dequantize_codes, trellis_tiles
from llmopt.engine.kernels.linear.triton_hadamard import TritonTransformedLinear, block_transform
from llmopt.quant.kinds.base.incoherence import HadamardBlocks
from llmopt.quant.kinds.trellis.kind import TrellisTensor
from llmopt.quant.kinds.trellis.scheme import TRELLIS_CODEBOOKS, TrellisScheme

from ...support.format_support import trellis_tensor
from ...support.triton_world import DEVICE

TRELLISES = [
    *(TrellisScheme(bits) for bits in range(1, 9)),
    *(TrellisScheme(bits, name) for name in TRELLIS_CODEBOOKS[:2] for bits in (3, 4)),
]


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "interpret" if DEVICE == "cpu" else "auto")


def weight_of(scheme: TrellisScheme, out: int, inner: int) -> TrellisTensor:
    generator = torch.Generator().manual_seed(scheme.bits)
    return trellis_tensor(scheme, out, inner, generator).to(DEVICE)


@pytest.mark.parametrize("scheme", TRELLISES, ids=lambda scheme: scheme.label)
def test_states_have_the_values_of_the_codebook(scheme: TrellisScheme) -> None:
    weight = weight_of(scheme, 128, 128)  # half a run
    tiles = trellis_tiles(weight)
    values = dequantize_codes(tiles, torch.float32)[:, tiles.places.long()]
    assert torch.equal(values, weight.inner())


def distance(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y.double() - expected).norm() / expected.norm())


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("scheme", "out", "inner", "dtype"),
    [
        (TrellisScheme(2), 128, 384, torch.float32),
        (TrellisScheme(5, "mcg"), 128, 128, torch.bfloat16),
        (TrellisScheme(4, "3inst"), 128, 128, torch.float16),
    ],
    ids=str,
)
def test_linear(scheme: TrellisScheme, out: int, inner: int, dtype: torch.dtype) -> None:
    weight = weight_of(scheme, out, inner)
    linear = prepare_quantized_linear(weight, dtype)
    assert isinstance(linear, TritonTransformedLinear)
    wide = torch.randn(70, 2 * inner, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    x = wide[:, :inner]  # strided
    bias = torch.randn(out, device=DEVICE)
    expected = x.double() @ weight.dequantize().double().T
    most = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}[dtype]
    for tokens in (3, 70):  # decoded in registers, and dequantized
        y = linear(x[:tokens])
        assert y.dtype is dtype and y.shape == (tokens, out)
        assert distance(y, expected[:tokens]) < most
    assert linear(x[:0]).shape == (0, out)
    linear.fuse_bias(bias)
    y = linear.in_float32(x[:17])
    assert y.dtype is torch.float32 and distance(y, expected[:17] + bias) < most


def test_codes_stay_packed() -> None:
    linear = TritonTransformedLinear(weight_of(TrellisScheme(2), 1024, 2048), torch.bfloat16)
    assert 8 * linear.weight_bytes < 2.2 * 1024 * 2048


def test_a_token_depends_on_no_neighbour() -> None:
    """Bit-identical among batch sizes, with splits of the inputs."""
    linear = TritonTransformedLinear(weight_of(TrellisScheme(3), 128, 768), torch.float32)
    x = torch.randn(16, 768, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert torch.equal(linear(x[3:6]), linear(x)[3:6])


def test_blocks_are_transformed() -> None:
    transform = block_transform(384, torch.float32, torch.device(DEVICE))
    x = torch.randn(70, 384, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for rows in (x, x[:3]):
        expected = HadamardBlocks().forward(rows)
        torch.testing.assert_close(transform(rows, torch.float32), expected, rtol=1e-5, atol=1e-5)
