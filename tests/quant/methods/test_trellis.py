"""The method `trellis`: block LDLQ on tiles, its fallback, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.quant.kinds.base.kind import kind_of
from llmopt.quant.kinds.integer.kind import round_to_nearest
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.kinds.trellis.scheme import TrellisScheme
from llmopt.quant.methods.base import InputStatistics
from llmopt.quant.methods.options import SchemeOptions
from llmopt.quant.methods.registry import METHODS

from ...support.layer_problems import heavy_weight, one_linear, output_error
from ...support.native_paths import needs_compiler

pytestmark = needs_compiler  # the search of trellis codes


def test_feedback_beats_the_nearest_path_and_rounding_to_integers() -> None:
    weight, scheme = heavy_weight(128, 256), TrellisScheme(2)
    problem = one_linear(weight, scheme, scale_dtype=torch.float16)
    result = METHODS["trellis"].quantize_layer(problem)
    nearest = (
        kind_of(scheme).round(weight, torch.float16, name="model.layers.0.linear").dequantize()
    )
    report = result.reports[0]
    assert report.error is not None and report.rtn_error is not None
    assert report.error < 0.7 * output_error(problem, "linear", nearest)
    integers = round_to_nearest(weight, IntScheme(2, 128, False), torch.float16).dequantize()
    assert (
        report.error
        < 0.1 * report.rtn_error
        == pytest.approx(0.1 * output_error(problem, "linear", integers))
    )
    assert output_error(problem, "linear", result.weights["linear"].dequantize()) == pytest.approx(
        report.error
    )
    again = METHODS["trellis"].quantize_layer(problem).weights["linear"]
    for name, part in again.parts().items():
        assert torch.equal(part, result.weights["linear"].parts()[name])


def test_more_bits_have_less_error() -> None:
    weight = heavy_weight(128, 128)
    errors = [
        METHODS["trellis"].quantize_layer(one_linear(weight, TrellisScheme(bits))).reports[0].error
        or 0
        for bits in (1, 2, 3, 4)
    ]
    assert all(more < 0.5 * fewer for fewer, more in pairwise(errors))


def test_a_linear_that_no_token_reached_has_the_nearest_path() -> None:
    problem = one_linear(heavy_weight(128, 128), TrellisScheme(3))
    problem = replace(problem, statistics={"linear": InputStatistics(128)})
    result = METHODS["trellis"].quantize_layer(problem)
    assert result.reports[0].fallback == "no calibration token reached it"
    expected = kind_of(TrellisScheme(3)).round(
        problem.weights["linear"], torch.float16, name="model.layers.0.linear"
    )
    assert torch.equal(result.weights["linear"].parts()["trellis"], expected.parts()["trellis"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 9}, "--bits 9: method trellis has 1, 2, 3, 4, 5, 6, 7, 8"),
        ({"group_size": 64}, "--group-size 64"),
        ({"symmetric": False}, "--asymmetric"),
    ],
)
def test_options_of_other_grids_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        METHODS["trellis"].scheme(SchemeOptions(**options))


def test_bad_weights_are_refused_by_name() -> None:
    weight = heavy_weight(128, 128)
    weight[3, 4] = float("nan")
    with pytest.raises(BadInput, match=r"model\.layers\.0\.linear holds NaN"):
        METHODS["trellis"].quantize_layer(one_linear(weight, TrellisScheme(2)))
    with pytest.raises(BadInput, match="linear is 64 × 128: trellis codes"):
        METHODS["trellis"].quantize_layer(one_linear(heavy_weight(64, 128), TrellisScheme(2)))
