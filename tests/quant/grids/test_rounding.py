"""Round-to-nearest on every grid but the integer one, which `test_rtn.py` covers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llmopt.base.errors import BadInput
from llmopt.quant.base.scheme import Activations, Scheme
from llmopt.quant.kinds.base.kind import Rounding
from llmopt.quant.kinds.codebook.kind import CodebookKind, codebook, nearest
from llmopt.quant.kinds.codebook.scheme import CodebookScheme
from llmopt.quant.kinds.fp8.kind import FloatKind, Fp8Tensor
from llmopt.quant.kinds.fp8.scheme import FloatScheme
from llmopt.quant.kinds.ggml.scheme import GgufScheme
from llmopt.quant.kinds.integer.kind import IntTensor
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.kinds.lookup.kind import LookupKind, largest_weights
from llmopt.quant.kinds.lookup.scheme import LookupScheme
from llmopt.quant.kinds.vectorwise.kind import VectorwiseKind
from llmopt.quant.kinds.vectorwise.scheme import VectorwiseScheme
from llmopt.quant.methods.rounding import input_scale, quantize_layer, round_weight

from ...support.layer_problems import heavy_weight, one_linear, statistics_of


def round_to_fp8(weight: torch.Tensor, scheme: FloatScheme, dtype: torch.dtype) -> Any:
    return FloatKind(scheme).round(weight, dtype)


HOW = Rounding(torch.float32)
FLOATS = [FloatScheme("tensor"), FloatScheme("channel"), FloatScheme("block")]
KINDS: list[Scheme] = [
    *FLOATS,
    IntScheme(8, -1, True, Activations("int8")),
    CodebookScheme("nf4"),
    CodebookScheme("fp4"),
    CodebookScheme("nf4", double_quant=True),
    VectorwiseScheme(),
    LookupScheme(4),
    LookupScheme(3, 0.01),
]
EACH_KIND = pytest.mark.parametrize("scheme", KINDS, ids=lambda scheme: scheme.label)


@EACH_KIND
@pytest.mark.parametrize("shape", [(8, 64), (130, 192), (5, 30)], ids=str)
def test_rounding_keeps_the_shape_and_most_of_the_weight(
    scheme: Scheme, shape: tuple[int, int]
) -> None:
    weight = heavy_weight(*shape)
    rounded = round_weight(one_linear(weight, scheme), "linear", weight)
    assert rounded.scheme == scheme
    assert rounded.shape == shape
    restored = rounded.dequantize()
    assert restored.dtype == torch.float32
    assert float((restored - weight).norm() / weight.norm()) < (0.2 if scheme.bits > 3 else 0.3)


@EACH_KIND
def test_rounding_again_changes_nothing(scheme: Scheme) -> None:
    """The values that are stored lie on their own grid, within the last bits of a scale."""
    weight = heavy_weight(64, 128)
    problem = one_linear(weight, scheme)
    once = round_weight(problem, "linear", weight).dequantize()
    twice = round_weight(problem, "linear", once).dequantize()
    assert float((twice - once).norm() / once.norm()) < 5e-3


@EACH_KIND
def test_zero_rows_stay_zero(scheme: Scheme) -> None:
    weight = heavy_weight(192, 64)
    weight[1] = 0
    weight[128:] = 0
    restored = round_weight(one_linear(weight, scheme), "linear", weight).dequantize()
    assert bool(torch.isfinite(restored).all())
    # Magnitudes in 8 bits are not exact, those of bitsandbytes included; a uniform table needs no zero.
    if not (isinstance(scheme, CodebookScheme) and scheme.double_quant):
        assert float(restored[1].abs().max()) == 0
        assert float(restored[128:].abs().max()) == 0


@EACH_KIND
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_damaged_weights_are_named(scheme: Scheme, value: float) -> None:
    weight = heavy_weight(8, 64)
    weight[2, 3] = value
    with pytest.raises(BadInput, match=r"model\.layers\.0\.linear holds NaN or infinite"):
        quantize_layer(one_linear(weight, scheme))


@pytest.mark.parametrize(
    "scheme", [VectorwiseScheme(), LookupScheme(4), FLOATS[1]], ids=lambda scheme: scheme.label
)
def test_weights_beyond_float16_are_refused(scheme: Scheme) -> None:
    weight = heavy_weight(8, 64)
    weight[0, 0] = 1e9
    with pytest.raises(BadInput, match="too large"):
        quantize_layer(one_linear(weight, scheme, scale_dtype=torch.float16))


def test_gguf_blocks_are_quantized_too() -> None:
    weight = heavy_weight(8, 64)
    rounded = round_weight(one_linear(weight, GgufScheme("Q8_0")), "linear", weight)
    assert float((rounded.dequantize() - weight).norm() / weight.norm()) < 0.01


def test_fp8_by_hand() -> None:
    weight = torch.tensor([[448.0, -224.0, 1.0, 0.0], [2.0, 1.0, -0.5, 0.25]])
    whole = round_to_fp8(weight, FloatScheme("tensor"), torch.float32)
    assert whole.scales.tolist() == [[1.0]]
    assert torch.equal(whole.dequantize(), weight)
    rows = round_to_fp8(weight, FloatScheme("channel"), torch.float32)
    assert rows.scales.flatten().tolist() == pytest.approx([1.0, 2 / 448])
    assert rows.values[1].float().tolist() == [448.0, 224.0, -112.0, 56.0]


def test_fp8_rounds_half_to_even() -> None:
    """Between 16 and 18 the neighbours are 16 (even mantissa) and 18; 17 and 19 are ties."""
    weight = torch.tensor([[448.0, 17.0, 19.0, -17.0]])
    values = round_to_fp8(weight, FloatScheme("channel"), torch.float32).values
    assert values.float().tolist() == [[448.0, 16.0, 20.0, -16.0]]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(FLOATS),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(1, 200),
    st.integers(1, 200),
    st.integers(0, 2**31),
)
def test_fp8_errs_by_a_sixteenth_at_most(
    scheme: FloatScheme, dtype: torch.dtype, rows: int, columns: int, seed: int
) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    tensor = round_to_fp8(weight, scheme, dtype)
    assert tensor.scales.dtype == dtype
    assert bool(torch.isfinite(tensor.values.float()).all())
    # Half a step is 1/16 of a normal value; below 2**-6 it is 2**-10 of the scale. The largest value
    # may be clamped by as much as its scale was rounded down.
    bound = weight.abs() / 16 * 1.001 + float(tensor.scales.float().max()) * 2**-10
    bound += weight.abs() * torch.finfo(dtype).eps
    assert bool(((tensor.dequantize() - weight).abs() <= bound).all())


def test_fp8_of_a_scale_that_its_dtype_rounds_far_down() -> None:
    """A float16 scale below the normal range may lose a third: e4m3 would turn what is beyond into NaN."""
    weight = torch.tensor([[448 * 8.5e-8, 448 * 1e-8]])
    tensor = round_to_fp8(weight, FloatScheme("channel"), torch.float16)
    assert float(tensor.scales) == pytest.approx(5.96e-8, rel=1e-3)
    assert tensor.values.float().tolist() == [[448.0, 72.0]]


def test_fp8_blocks_do_not_look_at_each_other() -> None:
    weight = heavy_weight(200, 150)
    alone = round_to_fp8(weight[128:, 128:].contiguous(), FloatScheme("tensor"), torch.float32)
    blocks = round_to_fp8(weight, FloatScheme("block"), torch.float32)
    assert blocks.scales.shape == (2, 2)
    assert float(blocks.scales[1, 1]) == float(alone.scales)
    assert torch.equal(blocks.values[128:, 128:].float(), alone.values.float())


@pytest.mark.parametrize(
    ("kind", "divisor", "scheme"),
    [
        ("fp8", 448, FloatScheme("channel", Activations("fp8", "tensor", dynamic=False))),
        ("int8", 127.5, IntScheme(8, -1, True, Activations("int8", "tensor", dynamic=False))),
    ],
)
def test_static_scales_cover_the_largest_input(kind: str, divisor: float, scheme: Scheme) -> None:
    weight, inputs = heavy_weight(8, 64), torch.randn(100, 64)
    inputs[17, 5] = -44.8
    problem = one_linear(weight, scheme, inputs)
    tensor = round_weight(problem, "linear", weight)
    assert isinstance(tensor, Fp8Tensor | IntTensor)
    assert tensor.input_scale is not None
    assert tensor.input_scale.shape == (1,) and tensor.input_scale.dtype == torch.float32
    assert float(tensor.input_scale) == pytest.approx(44.8 / divisor)
    silent = one_linear(weight, scheme, torch.zeros(4, 64))
    assert input_scale(silent, "linear") == torch.ones(1)
    with pytest.raises(BadInput, match=r"no calibration token reached model\.layers\.0\.linear"):
        quantize_layer(one_linear(weight, scheme, torch.zeros(0, 64)))


def test_static_scales_of_idle_experts_are_those_of_their_like() -> None:
    scheme = FloatScheme("tensor", Activations("fp8", "tensor", dynamic=False))
    problem = one_linear(heavy_weight(8, 64), scheme, torch.zeros(0, 64))
    loud, other = statistics_of(torch.full((4, 64), 8.96)), statistics_of(torch.full((4, 64), 99.0))
    statistics = {
        "experts.0.linear": problem.statistics["linear"],
        "experts.1.linear": loud,
        "experts.1.other": other,
    }
    problem = replace(
        problem,
        statistics=statistics,
        schemes=dict.fromkeys(statistics, scheme),
    )
    scale = input_scale(problem, "experts.0.linear")
    assert scale is not None
    assert float(scale) == pytest.approx(8.96 / 448)


def test_the_output_projection_is_named_without_a_layer() -> None:
    weight = heavy_weight(8, 64)
    weight[0, 0] = torch.nan
    problem = replace(one_linear(weight, CodebookScheme("nf4")), prefix="")
    with pytest.raises(BadInput, match=r"^linear holds NaN"):
        quantize_layer(problem)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["nf4", "fp4"]), st.integers(1, 9), st.integers(1, 150), st.integers(0, 2**31)
)
def test_codes_are_the_nearest_of_the_table(kind: Any, rows: int, columns: int, seed: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    tensor = CodebookKind(CodebookScheme(kind)).rounded(weight, HOW)
    assert tensor.absmax.numel() == -(-rows * columns // 64)
    magnitudes = tensor.absmax.repeat_interleave(64)[: weight.numel()].view(weight.shape)
    distances = (codebook(kind) - (weight / magnitudes).unsqueeze(-1)).abs()
    chosen = distances.gather(-1, tensor.codes.long().unsqueeze(-1)).squeeze(-1)
    assert bool((chosen <= distances.amin(dim=-1) + 1e-6).all())


def test_of_two_equally_near_values_the_lower_code_is_taken() -> None:
    table = torch.tensor([3.0, 1.0, -1.0, 4.0, 1.0])
    values = torch.tensor([2.0, 0.0, 3.5, 1.0, -9.0, 9.0, torch.nan])
    assert nearest(values, table).tolist() == [0, 1, 0, 1, 2, 3, 0]


def test_double_quantization_costs_little() -> None:
    weight = heavy_weight(256, 256)
    plain = CodebookKind(CodebookScheme("nf4")).rounded(weight, HOW)
    double = CodebookKind(CodebookScheme("nf4", double_quant=True)).rounded(weight, HOW)
    assert torch.equal(plain.codes, double.codes)
    assert double.absmax.dtype == torch.uint8
    assert double.nested_absmax is not None
    assert double.nested_absmax.shape == (4,)
    difference = (double.magnitudes() - plain.absmax).abs() / plain.absmax
    assert float(difference.max()) < 0.03
    assert float(difference.max()) > 0


def test_codebook_blocks_run_on_across_rows() -> None:
    weight = heavy_weight(4, 96)
    tensor = CodebookKind(CodebookScheme("nf4")).rounded(weight, HOW)
    assert tensor.absmax.tolist() == [float(block.abs().max()) for block in weight.view(-1, 64)]
    assert torch.equal(tensor.rows(slice(2, 4)).dequantize(), tensor.dequantize()[2:])


def test_int8_rows_by_hand() -> None:
    weight = torch.tensor([[1.0, -0.5, 0.25, 0.0], [0.0, 0.0, 0.0, 0.0]])
    tensor = VectorwiseKind(VectorwiseScheme()).rounded(weight, HOW)
    assert tensor.codes.tolist() == [[127, -64, 32, 0], [0, 0, 0, 0]]
    assert tensor.absmax.tolist() == [1.0, 0.0]
    assert tensor.dequantize()[0].tolist() == pytest.approx([1.0, -64 / 127, 32 / 127, 0.0])


def test_uniform_tables_by_hand() -> None:
    weight = torch.tensor([[0.0, 1.0, 2.0, 3.0, 1.4], [-6.0, 3.0, 0.0, 0.0, -3.1]])
    tensor = LookupKind(LookupScheme(2)).rounded(weight, HOW)
    expected = torch.tensor([[0.0, 1.0, 2.0, 3.0], [-6.0, -3.0, 0.0, 3.0]])
    assert torch.allclose(tensor.table.float(), expected, atol=1e-6)
    assert tensor.codes.tolist() == [[0, 1, 2, 3, 1], [0, 3, 2, 2, 1]]


def test_sparse_weights_are_what_the_tables_miss() -> None:
    weight = heavy_weight(16, 50)
    weight[3, 7], weight[9, 0] = 40.0, -30.0
    tensor = LookupKind(LookupScheme(3, 2 / 800)).rounded(weight, HOW)
    assert tensor.sparse_rows is not None and tensor.sparse_columns is not None
    assert tensor.sparse_rows.diff().nonzero().flatten().tolist() == [3, 9]
    assert tensor.sparse_columns.tolist() == [7, 0]
    restored = tensor.dequantize()
    assert float(restored[3, 7]) == pytest.approx(40.0, rel=1e-3)
    assert float(restored[9, 0]) == pytest.approx(-30.0, rel=1e-3)
    assert float(tensor.table.abs().max()) < 1  # the outliers did not stretch the tables
    assert torch.equal(tensor.rows(slice(8, 16)).dequantize(), restored[8:])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.floats(0, 0.49))
def test_the_share_of_largest_weights_is_exact(values: list[int], fraction: float) -> None:
    scores = torch.tensor([values], dtype=torch.float32)
    mask = largest_weights(scores, fraction)
    assert int(mask.sum()) == round(fraction * len(values))
    if bool(mask.any()) and not bool(mask.all()):
        assert float(scores.abs()[mask].min()) >= float(scores.abs()[~mask].max())
