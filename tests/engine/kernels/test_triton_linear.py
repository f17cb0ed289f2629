"""Quantized GEMMs in Triton against the dequantized weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from llmopt.engine.kernels.common import devices
from llmopt.engine.kernels.common.devices import VARIABLE
from llmopt.engine.kernels.common.verdicts import VARIABLE as TRIALS
from llmopt.engine.kernels.elementwise.reference import (
    RUN,
    ActivationQuant,
    fake_quantize_activations,
    fake_quantize_inputs,
)
from llmopt.engine.kernels.linear.quantized_linear import (
    QUANTIZED_LINEAR,
    QuantizedLinearKernelQuery,
    prepare_quantized_linear,
)
from llmopt.engine.model.layers.projection import Projection
from llmopt.quant.base.scheme import Activations, Scheme
from llmopt.quant.kinds.base.tensor import QuantizedTensor
from llmopt.quant.kinds.codebook.scheme import CodebookScheme
from llmopt.quant.kinds.fp4.scheme import Fp4Scheme
from llmopt.quant.kinds.fp8.kind import Fp8Tensor
from llmopt.quant.kinds.fp8.scheme import FloatScheme
from llmopt.quant.kinds.ggml.scheme import GgufScheme
from llmopt.quant.kinds.ggml.tensor import GgufTensor, quantize_blocks
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.kinds.lookup.scheme import LookupScheme
from llmopt.quant.kinds.vectorwise.scheme import VectorwiseScheme

from ...support.quantized_world import quantized
from ...support.triton_world import DEVICE

CASES: list[tuple[Scheme, int, int]] = [
    (IntScheme(4, 128, False), 64, 256),
    (IntScheme(4, 128, True), 65, 512),
    (IntScheme(4, 32, False), 70, 192),
    (IntScheme(4, 16, True), 33, 64),
    (IntScheme(4, -1, False), 64, 640),
    (IntScheme(4, 32, False, permuted=True), 20, 192),
    (IntScheme(3, 64, True), 20, 128),
    (IntScheme(8, -1, True), 130, 160),
    (IntScheme(8, 32, False), 9, 96),
    (IntScheme(6, 64, False), 9, 192),
    (VectorwiseScheme(), 40, 144),
    (FloatScheme("tensor"), 40, 144),
    (FloatScheme("channel"), 129, 272),
    (FloatScheme("block"), 200, 320),
    (CodebookScheme("nf4"), 66, 192),
    (CodebookScheme("fp4", 128, double_quant=True), 32, 256),
    (Fp4Scheme("mxfp4"), 32, 128),
    (Fp4Scheme("nvfp4"), 32, 128),
    (Fp4Scheme("mxfp4", Activations("mxfp4", "group32")), 7, 128),
    *(
        (GgufScheme(kind), 7, 192)
        for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4")
    ),
    *((GgufScheme(kind), 7, 512) for kind in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")),
]


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "interpret" if DEVICE == "cpu" else "auto")


def weight_of(scheme: Scheme, out: int, inputs: int) -> QuantizedTensor:
    """A random weight of a scheme."""
    floats = torch.randn(out, inputs, generator=torch.Generator().manual_seed(out))
    if isinstance(scheme, GgufScheme):
        return GgufTensor(quantize_blocks(floats, scheme.type), scheme).to(DEVICE)
    return quantized(floats, scheme, torch.float32).to(DEVICE)


def inputs_of(inputs: int, tokens: int) -> torch.Tensor:
    return torch.randn(tokens, inputs, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def is_close(got: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> bool:
    bound = 5e-3 if dtype is torch.bfloat16 else 1e-5
    return bool((got.double() - exact).norm() <= bound * exact.norm())


@pytest.mark.sweep(9)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gemm(case: tuple[Scheme, int, int]) -> None:
    scheme, out, inputs = case
    weight, x = weight_of(scheme, out, inputs), inputs_of(inputs, 70)
    kernel_query = QuantizedLinearKernelQuery(DEVICE, torch.float32, out, inputs, scheme)
    assert QUANTIZED_LINEAR.select(kernel_query).name == "triton"
    for dtype, counts in ((torch.float32, (0, 1, 3, 17, 70)), (torch.bfloat16, (1, 2))):
        linear = prepare_quantized_linear(weight, dtype)
        expected = weight.dequantize(dtype).double()
        for tokens in counts:
            given = x[:tokens].to(dtype)
            got = linear(given)
            assert got.dtype is dtype and got.shape == (tokens, out)
            seen = fake_quantize_inputs(given, scheme).double()
            assert is_close(got, seen @ expected.T, dtype), tokens


def test_codes_stay_packed() -> None:
    for scheme, most in ((IntScheme(4, 128, False), 0.55), (IntScheme(8, -1, True), 1.1)):
        linear = prepare_quantized_linear(weight_of(scheme, 128, 256), torch.bfloat16)
        assert linear.weight_bytes < most * 128 * 256


def test_a_token_depends_on_no_neighbour() -> None:
    """Bit-identical among the batch sizes of the tensor-core path."""
    linear = prepare_quantized_linear(weight_of(IntScheme(4, 32, False), 64, 640), torch.float32)
    x = inputs_of(640, 16)
    together = linear(x)
    assert torch.equal(linear(x[3:6]), together[3:6])


def test_every_e4m3_code_is_read_from_its_bits() -> None:
    from llmopt.engine.kernels.linear.triton_dequantize import dequantize
    from llmopt.engine.kernels.linear.triton_packed_weight import pack_weight

    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 128)
    finite = torch.where(codes.float().isnan(), 0.0, codes.float()).to(codes.dtype)
    scale = torch.ones(2, 1)
    weight = Fp8Tensor(finite, scale, FloatScheme("channel")).to(DEVICE)
    tiles = pack_weight(weight, [])
    assert tiles is not None and tiles.grid.kind == "e4m3"
    assert torch.equal(dequantize(tiles, torch.float32), finite.to(DEVICE).float())


ROUNDED: list[tuple[Scheme, int, int]] = [
    (IntScheme(8, -1, True, Activations("int8")), 64, 160),
    (IntScheme(8, -1, True, Activations("int8")), 33, 1024),
    (IntScheme(8, -1, True, Activations("int8", "tensor", dynamic=False)), 33, 128),
    (IntScheme(8, 64, True, Activations("int8", "group128")), 33, 192),
    (IntScheme(4, 32, True, Activations("int8")), 65, 256),
    (IntScheme(5, -1, True, Activations("int8")), 65, 128),
    (FloatScheme("channel", Activations("fp8")), 130, 160),
    (FloatScheme("tensor", Activations("fp8", "tensor", dynamic=False)), 48, 96),
    (FloatScheme("block", Activations("fp8", "group128")), 200, 320),
    (FloatScheme("block", Activations("fp8")), 200, 256),
]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("case", ROUNDED, ids=str)
def test_quantized_inputs(case: tuple[Scheme, int, int]) -> None:
    """The product of the rounded inputs, whose rounding has a test of its own."""
    from llmopt.engine.kernels.elementwise.triton_rows import round_rows

    scheme, out, inputs = case
    weight, x = weight_of(scheme, out, inputs), inputs_of(inputs, 70)
    kernel_query = QuantizedLinearKernelQuery(DEVICE, torch.float32, out, inputs, scheme)
    assert QUANTIZED_LINEAR.select(kernel_query).name == "triton-8bit-inputs"
    assert scheme.activations is not None
    quant = ActivationQuant(scheme.activations, weight.parts().get("input_scale"))
    for dtype, counts in ((torch.float32, (1, 3, 70)), (torch.bfloat16, (2, 70))):
        linear = prepare_quantized_linear(weight, dtype)
        expected = weight.dequantize().double()
        assert linear(x[:0].to(dtype)).shape == (0, out)
        for tokens in counts:
            given = x[:tokens].to(dtype)
            got = linear(given)
            assert got.dtype is dtype and got.shape == (tokens, out)
            rows = round_rows(given, quant)
            run = RUN if scheme.activations.granularity == "group128" else inputs
            scales = rows.scales.double().repeat_interleave(run, dim=1)[:, :inputs]
            seen = rows.codes.double() * scales
            assert is_close(got, seen @ expected.T, dtype), tokens


@pytest.mark.parametrize("granularity", ["token", "group128", "static"])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("size", [1, 80, 320, 1000])
def test_quantized_rows_are_the_reference_up_to_rounding(
    size: int, kind: Any, granularity: str
) -> None:
    """CUDA divides by a number through its reciprocal, so the last bit of a scale may differ, and with it a
    code that lies between two."""
    from llmopt.engine.kernels.elementwise.triton_rows import round_rows

    dynamic, shared_by = granularity != "static", cast(Any, granularity)
    fixed = None if dynamic else torch.tensor([0.013], device=DEVICE)
    activations = Activations(kind, shared_by if dynamic else "tensor", dynamic)
    x = inputs_of(size + 5, 4)[:, 2 : size + 2] * 3
    x[1], x[2, ::3] = 0.0, 0.0195  # a token of zeros, and halves between two codes
    for dtype in (torch.float32, torch.bfloat16):
        given = x.to(dtype)
        rows = round_rows(given, ActivationQuant(activations, fixed))
        assert rows.codes.element_size() == 1
        wide = rows.scales.repeat_interleave(128 if granularity == "group128" else size, dim=1)
        got = rows.codes.float() * wide[:, :size]
        expected = fake_quantize_activations(given.float(), activations, fixed)
        differs = ~torch.isclose(got, expected, rtol=1e-6, atol=0.0)
        step = wide[:, :size]
        if kind == "fp8":  # e4m3: three bits of mantissa, subnormal steps of 2^-9
            step = torch.maximum(expected.abs() / 8, step * 2**-9)
        # The largest of an int8 scale lies between two codes: max|x| / (max|x| / 127.5).
        assert differs.sum() <= rows.scales.numel() + 0.01 * differs.numel()
        assert ((got - expected).abs() <= 1.001 * step)[differs].all()
    assert round_rows(x[:0], ActivationQuant(activations, fixed)).codes.shape == (0, size)


def test_a_delta_gets_the_input_as_it_is() -> None:
    """A LoRA adapter reads floats, so the input of a projection with one is not quantized upstream."""
    scheme = IntScheme(8, -1, True, Activations("int8"))
    projection = Projection([weight_of(scheme, 32, 64)], None, torch.float32)
    assert projection.activation_quant is not None
    projection.delta = lambda x, y, adapters: None
    assert projection.activation_quant is None


REFUSED: list[tuple[Scheme, int, str, str]] = [
    (CodebookScheme("nf4"), 96, "triton", "blocks of 64 weights cross the rows"),
    (LookupScheme(4), 64, "triton", "lookup4 has no scales of groups"),
    (IntScheme(4, 8, False), 256, "triton", "it has no groups of 8"),
    (IntScheme(4, -1, False), 48, "triton", "it needs rows of a multiple of 64"),
    (FloatScheme("channel"), 100, "triton", "it needs rows of a multiple of 16"),
    (IntScheme(8, -1, False, Activations("int8")), 96, "triton-8bit-inputs", "it is for symmetric"),
    (IntScheme(8, 16, True, Activations("int8")), 96, "triton-8bit-inputs", "an 8-bit GEMM"),
]


@pytest.mark.parametrize(("scheme", "inputs", "name", "reason"), REFUSED, ids=str)
def test_what_they_refuse(scheme: Scheme, inputs: int, name: str, reason: str) -> None:
    kernel_query = QuantizedLinearKernelQuery("cuda", torch.bfloat16, 64, inputs, scheme)
    choice = QUANTIZED_LINEAR.explain(kernel_query)
    assert choice.chosen in ("tiled-dequant", "triton") and choice.chosen != name
    assert str(dict(choice.reasons)[name]).startswith(reason)


def test_an_old_gpu_has_no_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(devices, "_launch_problem", lambda: None)  # nor a driver to load
    monkeypatch.setenv(TRIALS, "off")  # there is no GPU to try them on
    scheme = FloatScheme("channel", Activations("fp8"))
    choice = QUANTIZED_LINEAR.explain(
        QuantizedLinearKernelQuery("cuda", torch.bfloat16, 64, 128, scheme)
    )
    assert choice.chosen == "triton"
    reason = str(dict(choice.reasons)["triton-8bit-inputs"])
    assert reason == "a GPU of compute capability 8.0 has no FP8"


def test_splits_are_counted_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts are zeros between the launches of a stream alone; a capture's stream launches nothing."""
    from llmopt.engine.kernels.linear import triton_gemm

    device, counts, stream = torch.device("cuda:0"), torch.zeros(4), SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(triton_gemm, "_ARRIVALS", {device: (counts, 7)})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: stream.cuda_stream == 9)
    for stream.cuda_stream in (7, 9):
        assert triton_gemm._arrivals(device) is counts
    stream.cuda_stream = 8
    with pytest.raises(AssertionError, match="two streams"):
        triton_gemm._arrivals(device)


@pytest.mark.parametrize("inputs", [4096, 8192])
def test_e4m3_products_are_summed_fast_where_the_error_allows(
    inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmopt.engine.kernels.linear.triton_linear import QuantizedInputLinear
    from llmopt.engine.kernels.linear.triton_packed_weight import pack_weight

    monkeypatch.setenv(VARIABLE, "interpret")
    given: list[bool] = []

    def scaled_mm(x: torch.Tensor, *_: Any, use_fast_accum: bool, **__: Any) -> torch.Tensor:
        given.append(use_fast_accum)
        return x.new_zeros(len(x), 16, dtype=torch.bfloat16)

    monkeypatch.setattr(torch.ops.aten, "_scaled_mm", scaled_mm)
    weight = quantized(
        torch.ones(16, inputs), FloatScheme("channel", Activations("fp8")), torch.bfloat16
    )
    tiles = pack_weight(weight, [torch.float8_e4m3fn])
    assert tiles is not None
    linear = QuantizedInputLinear(weight, tiles, torch.bfloat16)
    assert linear(torch.zeros(65, inputs, dtype=torch.bfloat16)).shape == (65, 16)
    assert given == [inputs == 4096]
