from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llmopt.base.errors import BadInput
from llmopt.quant.kinds.integer.kind import IntTensor, round_to_nearest
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.methods.hqq import fit_grid
from llmopt.quant.methods.registry import METHODS

from ...support.layer_problems import heavy_weight, llama_layer, one_linear


def group_errors(weight: torch.Tensor, tensor: IntTensor) -> torch.Tensor:
    lost = (weight - tensor.dequantize()).square()
    return lost.view(*tensor.scales.shape, -1).sum(dim=-1)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([2, 3, 4, 8]),
    st.sampled_from([4, 16, 48, -1]),
    st.booleans(),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    st.integers(0, 2**31),
    st.sampled_from([1e-4, 1.0, 30.0]),
)
def test_no_group_is_worse_than_rounding(
    bits: int, group_size: int, symmetric: bool, dtype: torch.dtype, seed: int, spread: float
) -> None:
    weight = torch.randn(7, 48, generator=torch.Generator().manual_seed(seed)) ** 3 * spread
    scheme = IntScheme(bits, group_size, symmetric)
    fitted, plain = fit_grid(weight, scheme, dtype), round_to_nearest(weight, scheme, dtype)
    assert fitted.scales.dtype == dtype and bool((fitted.scales > 0).all())
    assert int(fitted.codes.max()) <= scheme.max_code
    assert int(fitted.zeros.max()) <= scheme.max_code
    if symmetric:
        assert bool((fitted.zeros == scheme.middle).all())
    before, after = group_errors(weight, plain), group_errors(weight, fitted)
    assert bool((after <= before * (1 + 1e-5) + 1e-12).all())


@pytest.mark.parametrize(("bits", "gain"), [(2, 0.75), (3, 0.92), (4, 0.98), (8, 1.0)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_narrow_grids_gain_most(bits: int, gain: float, symmetric: bool) -> None:
    weight, scheme = heavy_weight(64, 256), IntScheme(bits, 64, symmetric)
    fitted = group_errors(weight, fit_grid(weight, scheme, torch.float16)).sum()
    plain = group_errors(weight, round_to_nearest(weight, scheme, torch.float16)).sum()
    assert float(fitted) < gain * float(plain)


def test_output_error_falls_with_bits_and_against_rounding() -> None:
    totals = []
    for bits in (2, 3, 4, 8):
        problem = llama_layer(IntScheme(bits, 32, False))
        reports: Any = METHODS["hqq"].quantize_layer(problem).reports
        plain: Any = METHODS["rtn"].quantize_layer(problem).reports
        assert [r.rtn_error for r in reports] == pytest.approx([r.rtn_error for r in plain])
        totals.append(sum(r.error for r in reports))
        assert totals[-1] < sum(r.rtn_error for r in plain)
        assert all(r.held_out_error is not None for r in reports)
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize("symmetric", [True, False])
def test_groups_without_a_slope(symmetric: bool) -> None:
    """Zeros, one value, and a single weight among zeros."""
    weight = torch.zeros(4, 16)
    weight[1], weight[2, 5], weight[3] = 0.25, -3.0, -1e-9
    tensor = fit_grid(weight, IntScheme(4, 16, symmetric), torch.float16)
    restored = tensor.dequantize()
    assert float(restored[0].abs().max()) == 0
    assert torch.allclose(restored, weight, atol=0.25 / 14)
    assert bool(torch.isfinite(tensor.scales).all())


def test_chunks_of_rows_do_not_change_the_result() -> None:
    weight, scheme = heavy_weight(300, 32), IntScheme(3, 16, False)
    whole = fit_grid(weight, scheme, torch.float16)
    part = fit_grid(weight[290:].contiguous(), scheme, torch.float16)
    assert torch.equal(whole.codes[290:], part.codes)
    assert torch.equal(whole.scales[290:], part.scales)


def test_damaged_weights_and_odd_widths_are_refused() -> None:
    weight = heavy_weight(4, 48)
    with pytest.raises(BadInput, match="32 does not divide 48"):
        fit_grid(weight, IntScheme(4, 32, False), torch.float16)
    weight[0, 0] = torch.nan
    with pytest.raises(BadInput, match=r"layers\.0\.linear holds NaN"):
        METHODS["hqq"].quantize_layer(one_linear(weight, IntScheme(4, 16, False)))
