"""`--revert-worse` on codes between transforms: the nearest codes, where those have less error."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from llmopt.quant.kinds.e8p.scheme import E8pScheme
from llmopt.quant.kinds.trellis.scheme import TrellisScheme
from llmopt.quant.methods.registry import METHODS
from llmopt.quant.methods.rounding import round_plain
from llmopt.quant.pipeline.quantized_layer import reverted

from ...support.layer_problems import heavy_weight, one_linear
from ...support.native_paths import needs_compiler


@needs_compiler
@pytest.mark.parametrize(
    ("method", "scheme"), [("trellis", TrellisScheme(2)), ("quip", E8pScheme(2))]
)
def test_the_nearest_codes_are_taken_where_they_have_less_error(
    method: str, scheme: TrellisScheme | E8pScheme
) -> None:
    problem = one_linear(heavy_weight(128, 128), scheme, scale_dtype=torch.float16)
    result = METHODS[method].quantize_layer(problem)
    (report,) = result.reports
    assert report.error is not None
    # The yardstick of trellis codes, integers, can be better where the nearest path is not.
    judged = replace(result, reports=[replace(report, rtn_error=report.error / 2)])
    assert reverted(problem, judged).weights["linear"] is result.weights["linear"]
    taken = reverted(problem, replace(judged, reports=[replace(report, error=1e3)]))
    nearest = round_plain(problem, "linear", problem.weights["linear"])
    assert torch.equal(taken.weights["linear"].dequantize(), nearest.dequantize())
    assert taken.reports[0].fallback is not None and taken.reports[0].damp is None
