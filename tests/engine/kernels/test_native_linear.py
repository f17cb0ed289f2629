"""The C kernels of linear layers on every path that this processor has, against torch in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llmopt.base.build import Native
from llmopt.base.processor import VARIABLE
from llmopt.engine.kernels.elementwise.reference import (
    fake_quantize_activations,
    fake_quantize_inputs,
    split_outliers,
)
from llmopt.engine.kernels.linear.grid import (
    TABLE_BLOCKS,
    WHOLE_BLOCKS,
    grid_of,
    lattice_grid,
    refuses_grid,
)
from llmopt.engine.kernels.linear.native_linear import (
    PackedLinear,
    PackedOutlierLinear,
    native_linear,
)
from llmopt.engine.kernels.linear.native_pack import (
    SCALE_TABLE,
    pack_codes,
    packed_scales,
)
from llmopt.engine.kernels.linear.quantized_linear import (
    QUANTIZED_LINEAR,
    QuantizedLinearKernelQuery,
    TiledDequantLinear,
    prepare_quantized_linear,
)
from llmopt.engine.model.layers.projection import Projection
from llmopt.quant.base.scheme import Activations, Scheme
from llmopt.quant.kinds.base.tensor import QuantizedTensor
from llmopt.quant.kinds.codebook.scheme import CodebookScheme
from llmopt.quant.kinds.fp4.scheme import Fp4Scheme
from llmopt.quant.kinds.fp8.scheme import FloatScheme
from llmopt.quant.kinds.ggml.lattice import LATTICES
from llmopt.quant.kinds.ggml.scheme import GgufScheme
from llmopt.quant.kinds.ggml.tensor import GgufTensor, quantize_blocks
from llmopt.quant.kinds.integer.kind import IntTensor
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.kinds.lookup.scheme import LookupScheme
from llmopt.quant.kinds.vectorwise.kind import VectorwiseTensor
from llmopt.quant.kinds.vectorwise.scheme import VectorwiseScheme
from torch.nn import functional

from ...support.native_paths import native_paths
from ...support.packed_codes import pack_codes_torch
from ...support.quantized_world import quantized

INT8 = Activations("int8")
HERE = native_paths()
pytestmark = pytest.mark.skipif(not HERE, reason="the C kernels want AVX2 or NEON, and a compiler")


@pytest.fixture(params=HERE or ["off"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every path, forced; the test runs on it and on no other."""
    monkeypatch.setenv(VARIABLE, request.param)
    found = native_linear()
    if found.library is None:
        pytest.skip(str(found.reason))
    assert found.path == request.param
    yield request.param


def weight_of(scheme: Scheme, out: int, inputs: int, seed: int = 0) -> QuantizedTensor:
    weight = torch.randn(out, inputs, generator=torch.Generator().manual_seed(seed)) / inputs**0.5
    if isinstance(scheme, GgufScheme):
        return GgufTensor(quantize_blocks(weight, scheme.type), scheme)
    return quantized(weight, scheme, torch.float16)


def inputs_of(rows: int, width: int, seed: int = 1) -> torch.Tensor:
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    return x * torch.logspace(-2, 2, rows).unsqueeze(1)


def error(got: torch.Tensor, x: torch.Tensor, weight: QuantizedTensor) -> float:
    """The worst row's error against the float64 GEMM, relative to the product of the norms."""
    exact = x.double() @ weight.dequantize().double().T
    scale = x.double().norm(dim=1) * weight.dequantize().double().norm(dim=1).mean()
    return float(((got.double() - exact).norm(dim=1) / (scale * exact.shape[1] ** 0.5)).max())


integers = st.builds(
    lambda bits, group, symmetric: IntScheme(bits, group, symmetric),
    st.sampled_from([2, 3, 4, 5, 6, 8]),
    st.sampled_from([-1, 16, 32, 64, 96, 128, 384]),
    st.booleans(),
)
padded = st.builds(
    lambda group, symmetric: IntScheme(4, group, symmetric),
    st.sampled_from([7, 24, 48, 60]),
    st.booleans(),
)
OTHERS = (
    *(GgufScheme(kind) for kind in WHOLE_BLOCKS + TABLE_BLOCKS),
    CodebookScheme("nf4"),
    CodebookScheme("fp4", 32, double_quant=True),
    Fp4Scheme("nvfp4"),
    Fp4Scheme("mxfp4"),
    FloatScheme("tensor"),
    FloatScheme("channel"),
    FloatScheme("block"),
    IntScheme(4, 32, False, permuted=True),
    IntScheme(4, 40, False, permuted=True),
)


def width_for(scheme: Scheme, around: int) -> int:
    """A width near `around` that the scheme allows, odd where possible."""
    unit = 1
    if isinstance(scheme, IntScheme) and scheme.group_size > 0:
        unit = scheme.group_size
    elif isinstance(scheme, CodebookScheme | Fp4Scheme):
        unit = scheme.block_size
    elif isinstance(scheme, GgufScheme):
        unit = scheme.block[0]
    return max(1, around // unit) * unit


def test_sixteen_bit_inputs_give_the_weights_numbers(path: str) -> None:
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(
        st.one_of(integers, padded, st.sampled_from(OTHERS)),
        st.integers(1, 140),
        st.integers(1, 900),
        st.integers(1, 20),
    )
    def sweep(scheme: Scheme, out: int, around: int, rows: int) -> None:
        weight = weight_of(scheme, out, width_for(scheme, around))
        assert refuses_grid(scheme, weight.in_features) is None
        grid = grid_of(weight)
        assert grid is not None
        x = inputs_of(rows, weight.in_features)
        assert error(PackedLinear(grid, "float32")(x), x, weight) < 2e-6
        half = x.bfloat16()
        assert error(PackedLinear(grid, "bfloat16")(half), half, weight) < 6e-3

    sweep()


def test_eight_bit_inputs_are_the_reference_s(path: str) -> None:
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(
        st.one_of(integers, padded, st.sampled_from([GgufScheme(kind) for kind in WHOLE_BLOCKS])),
        st.integers(1, 140),
        st.integers(1, 900),
        st.integers(2, 20),
    )
    def sweep(scheme: Scheme, out: int, around: int, rows: int) -> None:
        weight = weight_of(scheme, out, width_for(scheme, around))
        grid = grid_of(weight)
        assert grid is not None
        x = inputs_of(rows, weight.in_features)
        x[0] = 0
        got = PackedLinear(grid, "int8")(x)
        assert error(got[1:], fake_quantize_activations(x, INT8)[1:], weight) < 2e-6
        assert not got[0].any()

    sweep()


def rounded_in_blocks(x: torch.Tensor, block: int, levels: float) -> torch.Tensor:
    """`x [rows, in]` through int8, a scale for every `block` channels."""
    values = functional.pad(x, (0, -x.shape[1] % block)).unflatten(1, (-1, block))
    scale = values.abs().amax(dim=-1, keepdim=True) / levels
    codes = (values / scale.where(scale > 0, 1.0)).round().clamp(-128, 127)
    return (codes * scale).flatten(1)[:, : x.shape[1]]


def random_lattice(kind: str, out: int, width: int) -> GgufTensor:
    """A weight of random bytes, with float16 scales that are small numbers."""
    scheme = GgufScheme(kind)
    size = scheme.block[1]
    g = torch.Generator().manual_seed(out)
    blocks = torch.randint(0, 256, (out * width // 256, size), dtype=torch.uint8, generator=g)
    if kind == "IQ1_M":  # its float16 is in the highest four bits of four words
        words = blocks[:, 48:56].view(torch.int16)
        parts = torch.tensor([0, 0, 0, 2], dtype=torch.int16) << 12  # 2 ** -7
        words.copy_((words & 0x0FFF) | parts)
    else:
        heads = 2.0 ** torch.randint(-9, -3, (len(blocks), 1), generator=g)
        blocks[:, :2] = heads.to(torch.float16).view(torch.uint8)
    return GgufTensor(blocks.view(out, -1), scheme)


@pytest.mark.parametrize("kind", LATTICES)
def test_lattices_are_decoded_in_the_kernel(path: str, kind: str) -> None:
    pytest.importorskip("gguf")
    for out, width, rows in ((70, 512, 5), (32, 256, 1)):
        weight = random_lattice(kind, out, width)
        x = inputs_of(rows, width)
        grid = lattice_grid(weight)
        assert error(PackedLinear(grid, "float32")(x), x, weight) < 2e-6
        linear = PackedLinear(grid, "int8", input_block=32, levels=127.0)
        assert error(linear(x), rounded_in_blocks(x, 32, 127.0), weight) < 2e-6
        half = x.bfloat16()
        assert error(PackedLinear(grid, "bfloat16")(half), half, weight) < 6e-3
        ids = torch.tensor([3, out - 1, 3])
        torch.testing.assert_close(linear.lookup(ids, torch.float32), weight.dequantize()[ids])
    whole = random_lattice(kind, 64, 512)
    assert PackedLinear(lattice_grid(whole), "int8").weight_bytes < 1.25 * whole.nbytes


@pytest.mark.parametrize(
    "scheme",
    [*(GgufScheme(kind) for kind in TABLE_BLOCKS), Fp4Scheme("nvfp4"), Fp4Scheme("mxfp4")],
    ids=lambda scheme: scheme.label,
)
def test_tables_of_whole_numbers_take_8_bit_inputs(path: str, scheme: Scheme) -> None:
    for out, width, rows in ((70, 512, 5), (32, 256, 1), (9, 768, 20)):
        weight, x = weight_of(scheme, out, width), inputs_of(rows, width)
        grid = grid_of(weight)
        assert grid is not None
        linear = PackedLinear(grid, "int8", input_block=32, levels=127.0)
        assert error(linear(x), rounded_in_blocks(x, 32, 127.0), weight) < 2e-6
        ids = torch.tensor([3, out - 1])
        torch.testing.assert_close(linear.lookup(ids, torch.float32), weight.dequantize()[ids])


def test_blocks_of_inputs_have_scales_of_their_own(path: str) -> None:
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(
        st.one_of(integers, st.sampled_from([GgufScheme(kind) for kind in WHOLE_BLOCKS])),
        st.integers(1, 140),
        st.integers(1, 900),
        st.integers(2, 20),
        st.sampled_from([32, 64, 128]),
    )
    def sweep(scheme: Scheme, out: int, around: int, rows: int, most: int) -> None:
        weight = weight_of(scheme, out, width_for(scheme, around))
        grid = grid_of(weight)
        assert grid is not None
        x = inputs_of(rows, weight.in_features)
        x[:, weight.in_features // 2] *= 100  # an outlier, which the other blocks do not see
        x[0] = 0
        linear = PackedLinear(grid, "int8", input_block=most, levels=127.0)
        assert 32 <= linear.input_block <= most and linear.input_block % 32 == 0
        got = linear(x)
        assert error(got[1:], rounded_in_blocks(x, linear.input_block, 127.0)[1:], weight) < 2e-6
        assert not got[0].any()

    sweep()


@pytest.mark.sweep(6)
@pytest.mark.parametrize("way", ["int8", "blocks of 32", "blocks of 64", "bfloat16", "float32"])
def test_a_row_never_depends_on_its_neighbours(path: str, way: Any) -> None:
    for scheme in (
        IntScheme(4, 32, False),
        IntScheme(4, 64, False),
        IntScheme(4, 128, True),
        IntScheme(8, -1, True),
        # One row has a kernel of its own where each 32 codes have a scale.
        *(IntScheme(bits, 32, bits % 2 > 0) for bits in (2, 3, 5, 6, 8)),
        *(GgufScheme(kind) for kind in ("Q4_0", "Q8_0", "Q4_K", "Q5_K")),
        *(OTHERS[:-1] if way in ("bfloat16", "float32") else ()),
    ):
        grid = grid_of(weight_of(scheme, 70, 768))
        assert grid is not None
        linear = (
            PackedLinear(grid, "int8", input_block=int(way.removeprefix("blocks of ")))
            if way.startswith("blocks")
            else PackedLinear(grid, way)
        )
        x = inputs_of(300, 768)
        x = x.bfloat16() if way == "bfloat16" else x
        together = linear(x)
        # Few rows, a whole tile of 16 rows, tiles that overlap, and the end of what is multiplied at once.
        ends = (0, 1), (3, 8), (5, 21), (60, 77), (8, 43), (127, 140), (250, 300)
        for rows in (slice(*part) for part in ends):
            assert torch.equal(linear(x[rows]), together[rows])
        torch.set_num_threads(2)
        try:
            assert torch.equal(linear(x), together)
        finally:
            torch.set_num_threads(1)


def test_float32_results_are_the_unrounded_ones(path: str) -> None:
    weight = weight_of(GgufScheme("Q8_0"), 70, 768)
    x = inputs_of(5, 768).bfloat16()
    for bits in (8, 16):
        kernel = Projection([weight], None, torch.bfloat16, bits)
        exact = kernel.in_float32(x)
        assert exact.dtype is torch.float32
        assert torch.equal(exact.bfloat16(), kernel(x))
        assert not torch.equal(exact, kernel(x).float())


def test_every_path_gives_the_same_bits_for_8_bit_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs_of(9, 1280)
    for scheme, block in (
        (IntScheme(4, 128, False), 0),
        (IntScheme(8, -1, True), 0),
        (GgufScheme("Q4_0"), 32),
        (GgufScheme("Q4_K"), 32),
        (GgufScheme("Q6_K"), 32),
    ):
        results = []
        for name in HERE:
            monkeypatch.setenv(VARIABLE, name)
            if native_linear().library is None:
                pytest.skip(str(native_linear().reason))
            grid = grid_of(weight_of(scheme, 50, 1280))
            assert grid is not None
            results.append(PackedLinear(grid, "int8", input_block=block)(x))
        assert all(torch.equal(result, results[0]) for result in results)


def test_the_largest_codes_do_not_saturate(path: str) -> None:
    """255 x -128 twice overflows the 16 bits in which AVX2 adds pairs of bytes."""
    scheme = IntScheme(8, -1, False)
    extreme = IntTensor(
        torch.full((32, 256), 255, dtype=torch.uint8),
        torch.ones(32, 1),
        torch.zeros(32, 1, dtype=torch.uint8),
        scheme,
    )
    grid = grid_of(extreme)
    assert grid is not None
    for sign in (-1.0, 1.0):
        got = PackedLinear(grid, "int8", fixed_scale=1.0)(torch.full((2, 256), sign * 500))
        assert torch.equal(got, torch.full((2, 32), (127.0 if sign > 0 else -128.0) * 255 * 256))


@pytest.mark.parametrize("rounded", [False, True], ids=["any scales", "few scales"])
def test_outliers_are_multiplied_as_floats(path: str, rounded: bool) -> None:
    """Also with scales in a table, as those of thousands of rows that were bfloat16 are."""
    scheme = VectorwiseScheme(3.0)
    weight = weight_of(scheme, 4100 if rounded else 50, 200)
    assert isinstance(weight, VectorwiseTensor)
    if rounded:
        weight = replace(weight, absmax=weight.absmax.bfloat16().float())
    grid = grid_of(weight)
    assert grid is not None
    assert (packed_scales(grid).kind == SCALE_TABLE) is rounded
    x = torch.randn(6, 200, generator=torch.Generator().manual_seed(2))
    x[2, 11], x[4, 150] = 50.0, -3.0
    got = PackedOutlierLinear(weight, grid)(x)
    assert split_outliers(x, 3.0)[2].count_nonzero() >= 2
    assert error(got, fake_quantize_inputs(x, scheme), weight) < 2e-6


def test_static_scales_and_biases(path: str) -> None:
    scheme = IntScheme(8, -1, True, Activations("int8", "tensor", dynamic=False))
    weight, x = weight_of(scheme, 50, 200), inputs_of(6, 200)
    bias = torch.randn(50, generator=torch.Generator().manual_seed(3))
    got = Projection([weight], bias, torch.float32)(x)
    rounded = fake_quantize_inputs(x, scheme, weight.parts()["input_scale"])
    assert error(got - bias, rounded, weight) < 1e-5
    assert torch.equal(Projection([weight], bias, torch.float32)(x[::2]), got[::2])


def test_slices_of_a_wider_input_are_read_where_they_lie(path: str) -> None:
    weight, wide = weight_of(IntScheme(4, 32, True), 40, 64), inputs_of(5, 200)
    kernel = prepare_quantized_linear(weight, torch.float32)
    x = wide[:, 70:134]
    assert torch.equal(kernel(x), kernel(x.contiguous()))
    assert torch.equal(kernel(x.T.contiguous().T), kernel(x.contiguous()))
    assert kernel(x[:0]).shape == (0, 40)


@pytest.mark.parametrize(
    ("scheme", "input_bits", "chosen"),
    [
        (IntScheme(4, 128, True), 16, "native-16bit-inputs"),
        (IntScheme(4, 128, True), 8, "native-8bit-inputs"),
        (IntScheme(8, -1, True, INT8), 16, "native-8bit-inputs"),
        (IntScheme(8, -1, True, Activations("int8", "group128")), 16, "native-16bit-inputs"),
        (VectorwiseScheme(), 16, "native-8bit-inputs"),
        (GgufScheme("Q4_K"), 8, "native-8bit-inputs"),
        (GgufScheme("IQ4_XS"), 8, "native-8bit-inputs"),
        (GgufScheme("IQ2_XS"), 8, "native-8bit-inputs"),
        (GgufScheme("IQ3_S"), 16, "native-16bit-inputs"),
        (CodebookScheme("nf4"), 8, "native-16bit-inputs"),
        (FloatScheme("block", Activations("fp8", "group128")), 8, "native-16bit-inputs"),
        (Fp4Scheme("nvfp4"), 8, "native-8bit-inputs"),
        (Fp4Scheme("mxfp4", Activations("mxfp4", "group32")), 16, "native-16bit-inputs"),
        (LookupScheme(4), 8, "tiled-dequant"),
        (LookupScheme(4, 0.01), 16, "tiled-dequant"),
        (IntScheme(4, 24, True), 16, "native-16bit-inputs"),
    ],
    ids=lambda x: getattr(x, "label", str(x)),
)
def test_the_kernel_follows_the_scheme_and_the_wish(
    path: str, scheme: Scheme, input_bits: int, chosen: str
) -> None:
    kernel_query = QuantizedLinearKernelQuery("cpu", torch.bfloat16, 64, 768, scheme, input_bits)
    assert QUANTIZED_LINEAR.select(kernel_query).name == chosen


def test_inputs_of_padded_groups_are_quantized_in_the_kernel(path: str) -> None:
    """In blocks of the padded channels, which a norm does not know; else once, for all that read them."""
    whole = prepare_quantized_linear(
        weight_of(IntScheme(4, 32, True), 40, 256), torch.float32, input_bits=8
    )
    assert hasattr(whole, "activation_quant")
    weight, x = weight_of(IntScheme(4, 24, True), 40, 240), inputs_of(3, 240)
    kernel = prepare_quantized_linear(weight, torch.float32, input_bits=8)
    assert not hasattr(kernel, "activation_quant")
    assert error(kernel(x), x, weight) < 2e-2


def test_unequal_groups_of_a_permuted_weight_are_dequantized(path: str) -> None:
    weight: Any = weight_of(IntScheme(4, 32, True, permuted=True), 40, 128)
    weight.group_index[weight.group_index == 1] = 0
    kernel = prepare_quantized_linear(weight, torch.float32)
    assert isinstance(kernel, TiledDequantLinear)
    x = inputs_of(3, 128)
    assert error(kernel(x), x, weight) < 2e-6


def test_packed_weights_take_the_bits_of_their_codes(path: str) -> None:
    for scheme, most in [
        (IntScheme(4, 128, True), 4.13),
        (IntScheme(3, 128, False), 3.2),
        (IntScheme(8, -1, True), 8.05),
        (GgufScheme("Q4_K"), 4.65),
        (GgufScheme("Q6_K"), 6.6),
        (CodebookScheme("nf4"), 4.51),
        (Fp4Scheme("mxfp4"), 4.51),
        (Fp4Scheme("nvfp4"), 6.01),  # block and global scales as one float32
    ]:
        weight = weight_of(scheme, 256, 1024)
        kernel = prepare_quantized_linear(weight, torch.bfloat16)
        assert kernel.weight_bytes * 8 / (256 * 1024) < most


def test_off_is_reported_and_served_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    assert native_linear() == Native(None, None, f"{VARIABLE}=off")
    kernel_query = QuantizedLinearKernelQuery(
        "cpu", torch.float32, 64, 768, IntScheme(4, 128, True)
    )
    choice = QUANTIZED_LINEAR.explain(kernel_query)
    assert choice.chosen == "tiled-dequant"
    assert dict(choice.reasons)["native-16bit-inputs"] == f"{VARIABLE}=off"


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_packing_in_c_is_packing_in_torch(path: str, bits: int) -> None:
    g = torch.Generator().manual_seed(bits)
    for out, inputs in ((1, 1), (33, 31), (64, 96), (95, 1000)):
        codes = torch.randint(0, 2**bits, (out, inputs), dtype=torch.uint8, generator=g)
        assert torch.equal(pack_codes(codes, bits), pack_codes_torch(codes, bits))
        wide = torch.randint(0, 2**bits, (out, 2 * inputs), dtype=torch.uint8, generator=g)
        assert torch.equal(pack_codes(wide[:, ::2], bits), pack_codes_torch(wide[:, ::2], bits))
