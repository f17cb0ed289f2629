"""Trellis and E8P codes in Triton against torch: values, transforms, and whole linears."""

from __future__ import annotations

import pytest
import torch
from llmopt.engine.kernels.common.devices import VARIABLE
from llmopt.engine.kernels.linear.quantized_linear import prepare_quantized_linear
from llmopt.engine.kernels.linear.triton_code_gemm import dequantize_codes, e8p_tiles, trellis_tiles
from llmopt.engine.kernels.linear.triton_hadamard import (
    TransformedRows,
    TritonTransformedLinear,
    stages_of,
)
from llmopt.quant.base.scheme import Scheme
from llmopt.quant.kinds.base.incoherence import HadamardBlocks, whole_width
from llmopt.quant.kinds.e8p.kind import E8pTensor
from llmopt.quant.kinds.e8p.scheme import E8pScheme
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


def e8p_tensor(bits: int, out: int, inner: int, generator: torch.Generator) -> E8pTensor:
    """Random codes, each of which is a point, with a scale for each row."""

    def codes(dtype: torch.dtype) -> torch.Tensor:
        least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max + 1
        return torch.randint(least, most, (out, inner // 8), generator=generator).to(dtype)

    residual = None if bits == 2 else codes(torch.uint8 if bits == 3 else torch.int16)
    su, sv = (torch.randn(width, generator=generator).half() for width in (inner, out))
    scale = torch.rand(out, generator=generator) + 0.5
    factors = (whole_width(width).factor for width in (inner, out))
    return E8pTensor(codes(torch.int16), su, sv, scale, E8pScheme(bits), residual, *factors)


def weight_of(scheme: Scheme, out: int, inner: int) -> TrellisTensor | E8pTensor:
    generator = torch.Generator().manual_seed(scheme.bits)
    if isinstance(scheme, TrellisScheme):
        return trellis_tensor(scheme, out, inner, generator).to(DEVICE)
    return e8p_tensor(scheme.bits, out, inner, generator).to(DEVICE)


@pytest.mark.parametrize("scheme", TRELLISES, ids=lambda scheme: scheme.label)
def test_states_have_the_values_of_the_codebook(scheme: TrellisScheme) -> None:
    weight = weight_of(scheme, 128, 128)  # half a run
    assert isinstance(weight, TrellisTensor)
    tiles = trellis_tiles(weight)
    values = dequantize_codes(tiles, torch.float32)[:, tiles.places.long()]
    assert torch.equal(values, weight.inner())


def test_every_e8p_code_is_its_point() -> None:
    weight = weight_of(E8pScheme(2), 128, 4096)
    assert isinstance(weight, E8pTensor)
    weight.codes.copy_(torch.arange(-(2**15), 2**15).view(128, -1))
    tiles = e8p_tiles(weight)
    values = dequantize_codes(tiles, torch.float32)[:, tiles.places.long()]
    assert torch.equal(values, weight.inner())


@pytest.mark.parametrize("bits", [3, 4])
def test_residuals_are_added(bits: int) -> None:
    weight = weight_of(E8pScheme(bits), 72, 96)  # of 128 outputs, 256 inputs
    assert isinstance(weight, E8pTensor)
    tiles = e8p_tiles(weight)
    values = dequantize_codes(tiles, torch.float32)[: weight.out_features, tiles.places.long()]
    torch.testing.assert_close(values, weight.inner(), rtol=1e-6, atol=1e-6)


def distance(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y.double() - expected).norm() / expected.norm())


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("scheme", "out", "inner", "dtype"),
    [
        (TrellisScheme(2), 128, 384, torch.float32),
        (TrellisScheme(5, "mcg"), 128, 128, torch.bfloat16),
        (TrellisScheme(4, "3inst"), 128, 128, torch.float16),
        (E8pScheme(2), 64, 96, torch.bfloat16),
        (E8pScheme(3), 136, 96, torch.float32),
        (E8pScheme(4), 56, 32, torch.float16),
    ],
    ids=str,
)
def test_linear(scheme: Scheme, out: int, inner: int, dtype: torch.dtype) -> None:
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
    for scheme, most in ((TrellisScheme(2), 2.2), (E8pScheme(3), 3.2)):
        weight = weight_of(scheme, 1024, 2048)
        linear = TritonTransformedLinear(weight, torch.bfloat16)
        assert 8 * linear.weight_bytes < most * 1024 * 2048


def test_a_token_depends_on_no_neighbour() -> None:
    """Bit-identical among batch sizes, with splits of the inputs."""
    linear = TritonTransformedLinear(weight_of(TrellisScheme(3), 128, 768), torch.float32)
    x = torch.randn(16, 768, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert torch.equal(linear(x[3:6]), linear(x)[3:6])


@pytest.mark.parametrize("width", [64, 96, 896], ids=str)
def test_whole_widths_are_transformed(width: int) -> None:
    transform, device = whole_width(width), torch.device(DEVICE)
    x = torch.randn(2, width, generator=torch.Generator().manual_seed(width)).to(device)
    forward = stages_of(transform, width, device)
    rows = TransformedRows(forward, torch.float32)(x, torch.float32)
    torch.testing.assert_close(rows, transform.forward(x), rtol=1e-4, atol=1e-4)
    backward = TransformedRows(stages_of(transform, width, device, backward=True), torch.float32)
    torch.testing.assert_close(backward(rows, torch.float32), x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("width", "launches"), [(96, 2), (14336, 2), (29568, 2), (2**16, 2), (2**17, 3)], ids=str
)
def test_a_whole_width_is_few_matrices(width: int, launches: int) -> None:
    transform = whole_width(width)
    x = torch.randn(1, width, generator=torch.Generator().manual_seed(width))
    stages = stages_of(transform, width, torch.device("cpu"))
    assert len(stages) == launches
    rows = x
    for stage in stages:
        axis = rows.view(-1, len(stage.matrix), stage.inner)
        rows = (stage.matrix @ axis * stage.scale).view(1, width)
    torch.testing.assert_close(rows, transform.forward(x), rtol=1e-4, atol=1e-4)


def test_blocks_are_transformed_in_one_launch() -> None:
    device = torch.device(DEVICE)
    (stage,) = stages_of(HadamardBlocks(), 384, device)
    x = torch.randn(70, 384, generator=torch.Generator().manual_seed(0)).to(device)
    rows = TransformedRows([stage], torch.float32)(x, torch.float32)
    torch.testing.assert_close(rows, HadamardBlocks().forward(x), rtol=1e-5, atol=1e-5)
