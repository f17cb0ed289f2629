"""GEMMs with E8P codes: C and torch against the dequantized weight, and C against its arithmetic in torch."""

from __future__ import annotations

import pytest
import torch
from llmopt.engine.kernels.common import devices
from llmopt.engine.kernels.linear.hadamard_linear import (
    NativeE8pLinear,
    TransformedLinear,
    native_e8p,
)
from llmopt.engine.kernels.linear.quantized_linear import (
    QUANTIZED_LINEAR,
    QuantizedLinearKernelQuery,
    prepare_quantized_linear,
)
from llmopt.engine.model.layers.parallel import take
from llmopt.quant.base.errors import BadInput
from llmopt.quant.base.processor import VARIABLE
from llmopt.quant.kinds.base.incoherence import whole_width
from llmopt.quant.kinds.e8p.kind import RESIDUAL_STEPS, E8pTensor, points, residual_points
from llmopt.quant.kinds.e8p.scheme import E8pScheme

from ...support.format_support import make
from ...support.native_paths import native_paths

NATIVE = native_paths()
# Odd factors 3, 9 and 7; inputs and outputs that fill no block of 128, no 16; every code of E8P.
SHAPES = [(200, 96), (64, 576), (1536, 224), (256, 2048)]


def weight_of(bits: int, out: int, inner: int) -> E8pTensor:
    """Every code in turn, with a scale for each row of them where `out` is no power of two."""
    generator = torch.Generator().manual_seed(bits + out)

    def sides(width: int) -> torch.Tensor:
        return torch.randn(width, generator=generator).half()

    count = out * inner // 8
    codes = (torch.arange(count) * 40503 % 65536).to(torch.int16).view(out, -1)
    residual = torch.randint(0, 65536, (out, inner // 8), generator=generator)
    left, right = whole_width(inner).factor, whole_width(out).factor
    return E8pTensor(
        codes,
        sides(inner),
        sides(out),
        torch.tensor(0.7) if right is None else torch.rand(out, generator=generator) + 0.5,
        E8pScheme(bits),
        {2: None, 3: residual.to(torch.uint8), 4: residual.to(torch.int16)}[bits],
        left,
        right,
    )


def inputs_of(rows: int, inner: int) -> torch.Tensor:
    return torch.randn(rows, inner, generator=torch.Generator().manual_seed(rows))


def distance(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y.float() - expected).norm() / expected.norm())


def needs_the_kernel(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, path)
    if native_e8p().library is None:
        pytest.skip(str(native_e8p().reason))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("path", NATIVE)
def test_the_kernel_multiplies_with_the_dequantized_weight(
    path: str, bits: int, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_the_kernel(path, monkeypatch)
    (out, inner), x = shape, inputs_of(40, shape[1])
    weight = weight_of(bits, out, inner)
    linear = prepare_quantized_linear(weight, torch.float32)
    assert isinstance(linear, NativeE8pLinear)
    y, expected = linear(x), x @ weight.dequantize().T
    assert distance(y, expected) < 1e-5
    for count in (1, 3, 6):  # a row's sums do not depend on the others
        assert torch.equal(linear(x[4 : 4 + count]), y[4 : 4 + count])
    strided = torch.cat([x, x], dim=1)[:, :inner]
    assert torch.equal(linear(strided), y)
    bias = torch.randn(out)
    linear.fuse_bias(bias)
    assert torch.equal(linear(x), y + bias)
    assert distance(linear(x.bfloat16()), expected + bias) < 0.02
    assert linear(x[:0]).shape == (0, out)


def fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """`a * b + c` in float32, rounded once."""
    return (a.double() * b.double() + c.double()).float()


def turned(values: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    """The transform but for its power of two, an operation at a time as in C, so that its bits are the same."""
    order = 1 if factor is None else len(factor)
    parts = values.unflatten(1, (order, -1))
    if factor is not None:
        sums = torch.zeros_like(parts)
        for j in range(order):
            sums = fused(factor[:, j, None], parts[:, j, None], sums)
        parts = sums
    half = 1
    while half < parts.shape[2]:
        first, second = parts.unflatten(2, (-1, 2, half)).unbind(3)
        parts = torch.stack([first + second, first - second], dim=3).flatten(2)
        half *= 2
    return parts.flatten(1)


def integers_of(weight: E8pTensor) -> list[torch.Tensor]:
    """E8P's points in units of 1/4 and the residual's in its own, float64 `[out, in]`."""
    levels = [points()[weight.codes.long() & 0xFFFF] * 4]
    if weight.residual is not None:
        three = weight.scheme.bits == 3
        table, unit = (residual_points(), 2) if three else (points(), 4)
        levels.append(table[weight.residual.long() & 0xFFFF] * unit)
    return [level.flatten(1).double() for level in levels]


def in_integers(weight: E8pTensor, x: torch.Tensor, input_bits: int) -> torch.Tensor:
    """What the C kernel promises, bit for bit: quantized inputs, exact sums, scales in float32."""
    left, right, bits = weight.left, weight.right, weight.scheme.bits
    out, inner = weight.shape
    powers = [width & -width for width in (inner, out)]
    su, sv = (
        side.float() * size**-0.5 for side, size in zip((weight.su, weight.sv), powers, strict=True)
    )
    values = turned(x * su, None if left is None else left.mT)
    levels = torch.tensor({8: 127.0, 16: 32639.0}[input_bits])
    step = torch.tensor(RESIDUAL_STEPS.get(bits, 0.0) * (2 if bits == 3 else 1))
    parts, whole = integers_of(weight), torch.zeros(len(x), out)
    for begin in range(0, inner, 128):
        block = values[:, begin : begin + 128]
        scale = block.abs().amax(1, keepdim=True) / levels
        codes = (block / scale).round().double()
        sums = [(codes @ part[:, begin : begin + 128].T).float() for part in parts]
        value = sums[0] if bits == 2 else fused(sums[1], step, sums[0])
        whole = fused(value, scale, whole)
    return turned(whole * (weight.scale * 0.25), right) * sv


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("path", NATIVE)
def test_quantized_inputs_are_multiplied_exactly(
    path: str, bits: int, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_the_kernel(path, monkeypatch)
    (out, inner), x = shape, inputs_of(70, shape[1]).bfloat16()
    weight = weight_of(bits, out, inner)
    x[69] = 0  # a scale of nothing
    exact = x.float() @ weight.dequantize().T
    bias = torch.randn(out)
    for input_bits, most in ((8, 0.012), (16, 5e-5)):
        linear = NativeE8pLinear(weight, input_bits)
        y = linear.in_float32(x)
        assert torch.equal(y[:69], in_integers(weight, x[:69].float(), input_bits))
        assert not y[69].any()
        assert distance(y, exact) < most
        for count in (1, 2, 3, 12, 40):  # decoded in registers, and for tiles of rows
            assert torch.equal(linear.in_float32(x[4 : 4 + count]), y[4 : 4 + count])
        strided = torch.cat([x, x], dim=1)[:, :inner]
        assert torch.equal(linear(strided), y.bfloat16())
        linear.fuse_bias(bias)
        assert torch.equal(linear.in_float32(x.float()), y + bias)
        assert linear(x[:0]).shape == (0, out)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so_in_its_row(value: float) -> None:
    if native_e8p().library is None:
        pytest.skip(str(native_e8p().reason))
    weight, x = weight_of(3, 64, 576), inputs_of(4, 576).bfloat16()
    for others in ([5], [5, 6], [0, 5, 64, 575]):  # whose sums are infinite or none
        wrong = x.clone()
        wrong[1, others] = value
        for input_bits in (8, 16, 32):
            y = NativeE8pLinear(weight, input_bits)(wrong)
            assert not y[1].isfinite().any() and y[[0, 2, 3]].isfinite().all()


def test_the_inputs_dtype_and_bits_choose_the_arithmetic() -> None:
    if native_e8p().library is None:
        pytest.skip(str(native_e8p().reason))
    for dtype, input_bits, name in (
        (torch.bfloat16, 16, "e8p-16bit-inputs"),
        (torch.bfloat16, 8, "e8p-8bit-inputs"),
        (torch.float32, 16, "native-e8p"),
        (torch.float32, 8, "e8p-8bit-inputs"),
        (torch.float16, 16, "torch-e8p"),
    ):
        query = QuantizedLinearKernelQuery("cpu", dtype, 64, 96, E8pScheme(3), input_bits)
        assert QUANTIZED_LINEAR.select(query).name == name


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_torch_multiplies_where_there_is_no_compiler(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    weight, x = weight_of(bits, 1088, 96), inputs_of(3, 96)  # more rows than a tile
    linear = prepare_quantized_linear(weight, torch.float32)
    assert isinstance(linear, TransformedLinear)
    expected = x @ weight.dequantize().T
    assert distance(linear(x), expected) < 1e-5
    assert distance(linear.in_float32(x.bfloat16()), expected) < 0.01
    assert linear(x.bfloat16()).dtype is torch.bfloat16
    assert linear(x[:0]).shape == (0, 1088)


def test_a_gpu_decodes_in_triton_or_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    query = QuantizedLinearKernelQuery("cuda", torch.bfloat16, 256, 256, E8pScheme(2))
    reasons = dict(QUANTIZED_LINEAR.explain(query).reasons)
    able = [name for name, reason in reasons.items() if reason is None]
    assert able == ["triton-codes", "torch-e8p"]
    monkeypatch.setenv(devices.VARIABLE, "off")
    assert QUANTIZED_LINEAR.select(query).name == "torch-e8p"


def test_ranks_cannot_divide_it() -> None:
    weight = make(E8pScheme(2), 256, 256)
    for rows, columns in (((slice(0, 128),), None), ((), slice(0, 128))):
        with pytest.raises(BadInput, match="e8p2 cannot be divided along its"):
            take("a", weight, rows, columns)
