"""Rounding to NVFP4 and MXFP4: nearest values, ties, scales, the shared global scale, weighted ranges."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.quant.base.scheme import Activations
from llmopt.quant.kinds.base.kind import Rounding
from llmopt.quant.kinds.fp4.kind import (
    Fp4Grid,
    Fp4Kind,
    Fp4Tensor,
    block_scales,
    e2m1_codes,
    e2m1_table,
    fp4_factors,
    global_scale_of,
)
from llmopt.quant.kinds.fp4.scheme import Fp4Scheme
from llmopt.quant.methods.registry import METHODS
from llmopt.quant.methods.rounding import round_weight

from ...support.format_support import same_bits
from ...support.layer_problems import heavy_weight, one_linear

Kind = Literal["nvfp4", "mxfp4"]
KINDS = pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
NVFP4, MXFP4 = Fp4Scheme("nvfp4"), Fp4Scheme("mxfp4")


def test_codes_are_of_the_nearest_value_and_ties_go_to_the_even_one() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert e2m1_codes(ties).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert e2m1_codes(-ties).tolist() == [8, 10, 10, 12, 12, 14, 14]
    assert e2m1_codes(torch.tensor([6.0, 7.9, 1e30, -1e30])).tolist() == [7, 7, 7, 15]
    values = torch.linspace(-7, 7, 9001)
    table = e2m1_table()
    chosen = table[e2m1_codes(values).int()]
    least = (values.unsqueeze(1) - table).abs().amin(dim=1)
    assert torch.equal((values - chosen).abs(), least)


def test_the_solvers_levels_are_those_of_the_codes() -> None:
    grid = Fp4Grid(MXFP4)
    values = torch.cat([torch.linspace(-7, 7, 2801), torch.tensor([0.75, -0.75, 5.0, -5.0])])
    levels = values.clone()
    grid.snap(levels, grid.affine((torch.full((1, 1), 127, dtype=torch.uint8),)))
    assert torch.equal(levels, e2m1_table()[e2m1_codes(values).int()])


def test_every_exponent_is_its_power_of_two() -> None:
    exponents = torch.arange(255, dtype=torch.uint8)
    powers = [2.0 ** (exponent - 127) for exponent in range(255)]
    assert fp4_factors(exponents, None).tolist() == powers


@pytest.mark.parametrize(
    ("largest", "exponent"),
    [(6.0, 127), (4.0, 127), (3.999, 127), (3.5, 127), (3.499, 126), (6.999, 127), (7.0, 128)],
)
def test_the_power_of_two_maps_the_largest_below_seven(largest: float, exponent: int) -> None:
    """7 is in the middle of 6 and 8, which a power more maps to 4: compressed-tensors' rule."""
    assert block_scales(torch.tensor([largest]), MXFP4, None).tolist() == [exponent]


def test_extreme_blocks_have_finite_scales() -> None:
    largest = torch.tensor([0.0, 1e-38, 1e-45, 2e38])
    for scheme, whole in ((NVFP4, global_scale_of(largest.max())), (MXFP4, None)):
        factors = fp4_factors(block_scales(largest, scheme, whole), whole)
        assert torch.isfinite(factors).all() and (factors > 0).all()
        weight = torch.zeros(1, 64)
        weight[0, 0], weight[0, 40] = 2e38, 1e-38
        rounded = Fp4Kind(scheme).round(weight, torch.float32).dequantize()
        assert torch.isfinite(rounded).all() and float(rounded[0, 0]) == pytest.approx(
            2e38, rel=0.2
        )
    for scheme in (NVFP4, MXFP4):
        assert not Fp4Kind(scheme).round(torch.zeros(2, 32), torch.float32).dequantize().any()


def test_the_global_scale_and_its_reciprocal_lead_back_to_each_other() -> None:
    """compressed-tensors stores one, ModelOpt the other."""
    largest = torch.rand(10_000, generator=torch.Generator().manual_seed(0)) * 8
    for value in largest[:200]:
        scale = global_scale_of(value)
        assert torch.equal(1 / (1 / scale), scale)
        assert float(scale) == pytest.approx(448 * 6 / float(value), rel=2.4e-7)


def test_fused_linears_share_the_global_scale() -> None:
    problem = one_linear(heavy_weight(32, 64), NVFP4)
    (linear,) = problem.weights
    names = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.o_proj")
    weights = {
        name: problem.weights[linear] * size for name, size in zip(names, (1, 4, 2, 9), strict=True)
    }
    problem = replace(
        problem,
        weights=weights,
        schemes=dict.fromkeys(names, NVFP4) | {"attn.v_proj": MXFP4},
        scale_dtypes=dict.fromkeys(names, torch.float32),
        statistics={},
    )
    scales = {}
    for name in names:
        tensor = round_weight(problem, name, weights[name])
        assert isinstance(tensor, Fp4Tensor)
        scales[name] = tensor.global_scale
    whole = global_scale_of(4 * weights["attn.q_proj"].abs().max())
    assert scales["attn.q_proj"] == scales["attn.k_proj"] == whole
    assert scales["attn.v_proj"] is None and scales["attn.o_proj"] != whole


@KINDS
def test_weighted_scales_lose_less(kind: Kind) -> None:
    weight = heavy_weight(64, 256)
    grid = Fp4Grid(Fp4Scheme(kind), weight.abs().max())
    importance = torch.rand(256, generator=torch.Generator().manual_seed(1)) ** 4 + 1e-3
    lost = [
        float((grid.nearest(weight, given).dequantize() - weight).square().mul(importance).sum())
        for given in (None, importance)
    ]
    assert lost[1] < 0.95 * lost[0]


@KINDS
def test_the_grid_rounds_as_the_kind_does(kind: Kind) -> None:
    weight = heavy_weight(24, 96)
    scheme = Fp4Scheme(kind)
    plain = Fp4Kind(scheme).rounded(weight, Rounding(torch.float32))
    nearest = Fp4Grid(scheme, weight.abs().max()).nearest(weight)
    assert torch.equal(plain.dequantize(), nearest.dequantize())
    assert same_bits(plain.scales, nearest.parts()["scales"])


@KINDS
def test_rows_that_are_no_whole_blocks_are_named(kind: Kind) -> None:
    with pytest.raises(BadInput, match=f"layers.0.down has 40 inputs, and {kind} takes multiples"):
        Fp4Kind(Fp4Scheme(kind)).round(torch.ones(4, 40), torch.float32, name="layers.0.down")


def test_inputs_get_a_global_scale_from_calibration() -> None:
    scheme = Fp4Scheme("nvfp4", Activations("nvfp4", "group16", dynamic=False))
    problem = one_linear(heavy_weight(32, 64), scheme)
    (name,) = problem.weights
    result = METHODS["nvfp4"].quantize_layer(problem).weights[name]
    assert isinstance(result, Fp4Tensor) and result.input_scale is not None
    assert torch.equal(result.input_scale, global_scale_of(problem.statistics[name].abs_max.max()))
