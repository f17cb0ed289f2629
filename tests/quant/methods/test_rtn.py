from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llmopt.base.errors import BadInput
from llmopt.quant.kinds.integer.kind import round_to_nearest
from llmopt.quant.kinds.integer.scheme import IntScheme

SCHEMES = st.builds(
    IntScheme, st.sampled_from([4, 8]), st.sampled_from([8, 16, 32, -1]), st.booleans()
)
DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32])


@settings(max_examples=60, deadline=None)
@given(SCHEMES, DTYPES, st.integers(0, 2**31), st.sampled_from([1e-3, 1.0, 50.0]))
def test_no_weight_moves_by_more_than_half_a_step(
    scheme: IntScheme, dtype: torch.dtype, seed: int, spread: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(6, 64, generator=generator) * spread
    quantized = round_to_nearest(weight, scheme, dtype)
    scales = quantized.scales.float().repeat_interleave(64 // quantized.num_groups, dim=1)
    # A scale rounded down in its stored dtype loses up to that much at the end of the range.
    end_of_range = scheme.max_code * torch.finfo(dtype).eps * scales
    subnormal = scheme.max_code * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    error = (quantized.dequantize() - weight).abs()
    assert bool((error <= scales / 2 * 1.0001 + end_of_range + subnormal).all())
    assert quantized.scales.dtype == dtype
    assert int(quantized.codes.max()) <= scheme.max_code


def test_codes_suit_the_scale_that_is_stored() -> None:
    """In bfloat16 the scale moves by up to 1/256, enough to change int8 codes chosen before rounding."""
    weight = torch.linspace(-1, 0.9937, 256).view(1, 256)
    quantized = round_to_nearest(weight, IntScheme(8, -1, True), torch.bfloat16)
    scale = float(quantized.scales)
    expected = torch.round(weight / scale).clamp(-128, 127) + 128
    assert torch.equal(quantized.codes.float(), expected)
    unrounded = torch.round(weight / (1.0 / 127.5)).clamp(-128, 127) + 128
    assert not torch.equal(quantized.codes.float(), unrounded)


@pytest.mark.parametrize("symmetric", [True, False])
def test_zero_groups_stay_zero(symmetric: bool) -> None:
    weight = torch.cat([torch.zeros(4, 16), torch.randn(4, 16)], dim=1)
    quantized = round_to_nearest(weight, IntScheme(4, 16, symmetric), torch.float16)
    assert torch.equal(quantized.dequantize()[:, :16], torch.zeros(4, 16))
    assert bool((quantized.scales > 0).all())


def test_zero_is_exact_when_all_weights_are_positive() -> None:
    weight = torch.tensor([[5.0, 6.0, 0.0, 7.5]])
    quantized = round_to_nearest(weight, IntScheme(4, 4, False), torch.float16)
    assert float(quantized.dequantize()[0, 2]) == 0.0
    assert int(quantized.zeros) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_damaged_weights_are_named(value: float) -> None:
    weight = torch.randn(4, 16)
    weight[1, 2] = value
    with pytest.raises(BadInput, match=r"layers\.3\.mlp"):
        round_to_nearest(weight, IntScheme(4, 16, True), torch.float16, name="layers.3.mlp")


def test_scales_that_overflow_are_refused() -> None:
    with pytest.raises(BadInput, match="too large"):
        round_to_nearest(torch.full((1, 16), 1e7), IntScheme(4, 16, True), torch.float16)
