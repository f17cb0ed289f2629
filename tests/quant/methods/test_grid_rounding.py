from __future__ import annotations

import pytest
import torch
from llmopt.quant.base.scheme import Scheme
from llmopt.quant.kinds.base.kind import Rounding, kind_of
from llmopt.quant.kinds.codebook.scheme import CodebookScheme
from llmopt.quant.kinds.fp4.scheme import Fp4Scheme
from llmopt.quant.kinds.fp8.scheme import FloatScheme
from llmopt.quant.kinds.ggml.scheme import GgufScheme
from llmopt.quant.methods.autoround import GridRounding

from ...support.layer_problems import correlated_inputs, heavy_weight, statistics_of

SCHEMES: list[Scheme] = [
    CodebookScheme("nf4"),
    Fp4Scheme("mxfp4"),
    FloatScheme("channel"),
    GgufScheme("Q4_0"),
    GgufScheme("Q4_K"),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.label)
def test_descent_lowers_the_output_error_and_ends_on_the_grid(scheme: Scheme) -> None:
    weight = heavy_weight(16, 256)
    statistics = statistics_of(correlated_inputs(512, 256))
    gram = statistics.gram / statistics.gram.diagonal().mean()
    grid = kind_of(scheme).grid_for((16, 256), Rounding(torch.float32))
    rounding = GridRounding(weight, grid, statistics.gram.diagonal())
    present = torch.empty_like(weight)

    def error() -> float:
        rounding.write(present)
        return float((((present - weight) @ gram) * (present - weight)).sum())

    plain = least = error()
    for step in range(60):
        rounding.descend(2 * (present - weight) @ gram, (1 - step / 60) / 60)
        if error() < least:
            least = error()
            rounding.keep()
    assert least < 0.95 * plain
    rounding.recall()
    assert error() == pytest.approx(least)
    torch.testing.assert_close(rounding.tensor().dequantize(), present, rtol=1e-5, atol=1e-7)
