"""GEMMs with trellis codes: C and torch against the dequantized weight."""

from __future__ import annotations

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.base.processor import VARIABLE
from llmopt.engine.kernels.common.devices import VARIABLE as TRITON
from llmopt.engine.kernels.linear.hadamard_linear import (
    NativeTrellisLinear,
    TransformedLinear,
    native_trellis,
    native_trellis_integer,
)
from llmopt.engine.kernels.linear.quantized_linear import (
    QUANTIZED_LINEAR,
    QuantizedLinearKernelQuery,
    prepare_quantized_linear,
)
from llmopt.engine.model.layers.parallel import take
from llmopt.quant.kinds.trellis.kind import TrellisTensor
from llmopt.quant.kinds.trellis.scheme import TRELLIS_CODEBOOKS, TrellisScheme
from llmopt.quant.kinds.trellis.viterbi import codebook, from_sequences, unpack_states

from ...support.format_support import trellis_tensor
from ...support.native_paths import native_paths

NATIVE = native_paths()
SCHEMES = [
    *(TrellisScheme(bits) for bits in range(1, 9)),
    *(TrellisScheme(3, name) for name in TRELLIS_CODEBOOKS[:2]),
]


def weight_of(scheme: TrellisScheme, out: int = 384, inner: int = 256) -> TrellisTensor:
    return trellis_tensor(scheme, out, inner, torch.Generator().manual_seed(scheme.bits))


def inputs_of(rows: int, inner: int = 256) -> torch.Tensor:
    return torch.randn(rows, inner, generator=torch.Generator().manual_seed(rows))


def distance(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.label)
@pytest.mark.parametrize("path", NATIVE)
def test_the_kernel_multiplies_with_the_dequantized_weight(
    path: str, scheme: TrellisScheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, path)
    if native_trellis().library is None:
        pytest.skip(str(native_trellis().reason))
    weight, x = weight_of(scheme), inputs_of(11)
    linear = prepare_quantized_linear(weight, torch.float32)
    assert isinstance(linear, NativeTrellisLinear)
    expected = x @ weight.dequantize().T
    assert distance(linear(x), expected) < 1e-5
    assert torch.equal(linear(x[3:4])[0], linear(x)[3])  # a row's sums do not depend on the others
    strided = torch.cat([x, x], dim=1)[:, :256]
    assert torch.equal(linear(strided), linear(x))
    bias = torch.randn(384)
    assert isinstance(linear, NativeTrellisLinear)
    linear.fuse_bias(bias)
    assert distance(linear(x.bfloat16()), expected + bias) < 0.02
    assert distance(linear.in_float32(x), expected + bias) < 1e-5
    assert linear(x[:0]).shape == (0, 384)


def butterflies(values: torch.Tensor) -> torch.Tensor:
    """The transform of blocks of 128, a stage at a time as in C, so that its float32 bits are the same."""
    half = 1
    while half < 128:
        pairs = values.unflatten(-1, (-1, 2, half))
        first, second = pairs.unbind(-2)
        values = torch.stack([first + second, first - second], dim=-2).flatten(-3)
        half *= 2
    return values * torch.tensor(128.0).rsqrt()


def integers_of(weight: TrellisTensor, input_bits: int) -> torch.Tensor:
    """Byte sums of mul1's products, or values in units of 2^-13: int64 `[in, out]`."""
    states = unpack_states(weight.trellis, weight.scheme.bits).long()
    if input_bits == 8:
        products = states * 0x83DCD12D
        numbers = sum(products >> shift & 255 for shift in (0, 8, 16, 24))
    else:
        values = torch.from_numpy(codebook(weight.scheme.codebook).copy()).float()
        numbers = (values * 8192).round().long()[states]
    assert isinstance(numbers, torch.Tensor)
    return from_sequences(numbers)


def in_integers(weight: TrellisTensor, x: torch.Tensor, input_bits: int) -> torch.Tensor:
    """What the C kernel promises, bit for bit: quantized inputs, exact sums, scales in float32."""
    blocks = butterflies((x * weight.suh.float()).unflatten(1, (-1, 128)))
    levels, unit, step = (
        (127, 0.00676727294921875, 128) if input_bits == 8 else (4095, 2.0**-13, 16)
    )
    scales = blocks.abs().amax(-1) / levels
    codes = (blocks / scales[..., None]).round().long()
    weights = integers_of(weight, input_bits)
    whole, share = torch.zeros(len(x), weight.out_features), torch.zeros(len(x))
    for number in range(blocks.shape[1]):
        code, scale = codes[:, number], scales[:, number]
        if input_bits == 8:
            share += scale * code.sum(1) * torch.tensor(-0.0018157959)
        for begin in range(0, 128, step):
            part = weights[number * 128 + begin : number * 128 + begin + step]
            sums = code[:, begin : begin + step] @ (part - 510 if input_bits == 8 else part)
            factor = (scale * unit).double()[:, None]  # one rounding, as of a fused multiply-add
            whole = (sums.float().double() * factor + whole.double()).float()
    whole = butterflies((whole + share[:, None]).unflatten(1, (-1, 128)))
    return whole.flatten(1) * weight.svh.float()


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.label)
@pytest.mark.parametrize("path", NATIVE)
def test_quantized_inputs_are_multiplied_exactly(
    path: str, scheme: TrellisScheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, path)
    if native_trellis_integer().library is None:
        pytest.skip(str(native_trellis_integer().reason))
    weight, x = weight_of(scheme), inputs_of(29).bfloat16()
    x[7] = 0  # a scale of nothing
    exact = x.float() @ weight.dequantize().T
    bias = torch.randn(384)
    for input_bits, most in ((8, 0.01), (16, 3e-4)):
        if input_bits == 8 and scheme.codebook != "mul1":
            continue
        linear = NativeTrellisLinear(weight, input_bits)
        y = linear.in_float32(x)
        rows = [row for row in range(29) if row != 7]
        assert torch.equal(y[rows], in_integers(weight, x[rows].float(), input_bits))
        assert not y[7].any()
        # 8 bits of 128 inputs that share a scale; 13 bits.
        assert distance(y, exact) < most
        for count in (1, 2, 3, 12):  # bytes, and tiles of rows
            assert torch.equal(linear.in_float32(x[4 : 4 + count]), y[4 : 4 + count])
        strided = torch.cat([x, x], dim=1)[:, :256]
        assert torch.equal(linear(strided), y.bfloat16())
        linear.fuse_bias(bias)
        assert torch.equal(linear.in_float32(x.float()), y + bias)
        assert linear(x[:0]).shape == (0, 384)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so_in_its_row(value: float) -> None:
    if native_trellis_integer().library is None:
        pytest.skip(str(native_trellis_integer().reason))
    weight, x = weight_of(TrellisScheme(3)), inputs_of(4).bfloat16()
    x[1, 5] = value
    for input_bits in (8, 16):
        linear = NativeTrellisLinear(weight, input_bits)
        y = linear(x)
        assert not y[1].isfinite().any() and y[[0, 2, 3]].isfinite().all()
        for other in range(8):  # whose sums with the first are infinite or none
            for sign in (1, -1):
                both = x.clone()
                both[1, other] = sign * value
                assert not linear(both)[1].isfinite().any()


def test_the_inputs_dtype_and_bits_choose_the_arithmetic() -> None:
    if native_trellis_integer().library is None:
        pytest.skip(str(native_trellis_integer().reason))
    eight, sixteen = "trellis-8bit-inputs", "trellis-16bit-inputs"
    for scheme, dtype, input_bits, name in (
        (TrellisScheme(2), torch.bfloat16, 16, sixteen),
        (TrellisScheme(2), torch.bfloat16, 8, eight),
        (TrellisScheme(2, "mcg"), torch.bfloat16, 8, sixteen),
        (TrellisScheme(2), torch.float32, 16, "native-trellis"),
        (TrellisScheme(2), torch.float32, 8, eight),
    ):
        query = QuantizedLinearKernelQuery("cpu", dtype, 256, 256, scheme, input_bits)
        assert QUANTIZED_LINEAR.select(query).name == name


def test_torch_multiplies_where_there_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    weight, x = weight_of(TrellisScheme(2), 1152), inputs_of(3)
    linear = prepare_quantized_linear(weight, torch.float32)
    assert isinstance(linear, TransformedLinear)
    assert distance(linear(x), x @ weight.dequantize().T) < 1e-5
    assert linear(x.bfloat16()).dtype is torch.bfloat16


def test_a_gpu_has_the_triton_form_or_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    query = QuantizedLinearKernelQuery("cuda", torch.bfloat16, 256, 256, TrellisScheme(2))
    assert QUANTIZED_LINEAR.select(query).name == "triton-codes"
    monkeypatch.setenv(TRITON, "off")
    assert QUANTIZED_LINEAR.select(query).name == "torch-trellis"


def test_ranks_divide_at_whole_blocks() -> None:
    weight = weight_of(TrellisScheme(3), 384, 256)
    floats = weight.dequantize()
    rows, columns = (slice(0, 128), slice(256, 384)), slice(128, 256)
    part = take("a", weight, rows, columns)
    assert isinstance(part, TrellisTensor)
    chosen = torch.cat([floats[run] for run in rows])[:, columns]
    assert torch.allclose(part.dequantize(), chosen, atol=1e-6)
    for wrong in (((slice(0, 64),), None), ((), slice(64, 256))):
        with pytest.raises(BadInput, match="cannot be divided"):
            take("a", weight, *wrong)
