from __future__ import annotations

import pytest
import torch
from llmopt.base.processor import VARIABLE
from llmopt.quant.base.scheme import PER_CHANNEL
from llmopt.quant.kinds.base.kind import Rounding, kind_of
from llmopt.quant.kinds.integer.kind import IntTensor, round_to_nearest
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.methods.int_rounding import IntRounding, native_rounding

from ...support.layer_problems import heavy_weight
from ...support.native_paths import native_paths

SCHEMES = [
    IntScheme(bits, size, symmetric)
    for bits, size in ((2, 16), (3, 32), (4, PER_CHANNEL), (8, 32))
    for symmetric in (True, False)
]


def written(rounding: IntRounding, weight: torch.Tensor) -> torch.Tensor:
    result = torch.empty_like(weight)
    rounding.write(result)
    return result


def straight_through(values: torch.Tensor) -> torch.Tensor:
    return values + (values.round() - values).detach()


def clamp(values: torch.Tensor, least: int, most: int) -> torch.Tensor:
    """Clamp with gradient 1 at the bounds: `Tensor.clamp` has 0 there from torch 2.14 on."""
    inside = (values >= least) & (values <= most)
    return torch.where(inside, values, values.detach().clamp(least, most))


def reference(
    weight: torch.Tensor, scheme: IntScheme, parameters: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """The rounded weight with a graph, as auto-round has it."""
    offset, low_share, high_share = parameters
    groups = weight.view(offset.shape)
    low = groups.amin(1).clamp(max=0) * low_share
    high = groups.amax(1).clamp(min=0) * high_share
    if scheme.symmetric:
        step = torch.where(-low > high, -low, -high) / scheme.middle
        zero = torch.full_like(step, scheme.middle)
    else:
        step = (high - low) / scheme.max_code
        zero = straight_through(-low / step)
    step, zero = step[:, None], zero[:, None]
    codes = clamp(straight_through(groups / step + offset) + zero, 0, scheme.max_code)
    return (step * (codes - zero)).view(weight.shape)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.label)
def test_steps_follow_the_signs_of_the_gradients(scheme: IntScheme) -> None:
    """Several steps, each with another gradient, against autograd's straight-through estimator."""
    weight = heavy_weight(8, 64)
    rounding = IntRounding(weight, scheme, torch.float32)
    size = 64 // scheme.num_groups(64)
    shapes = [(weight.numel() // size, size), (weight.numel() // size,), (weight.numel() // size,)]
    parameters = tuple(
        torch.full(shape, value, requires_grad=True)
        for shape, value in zip(shapes, (0.0, 1.0, 1.0), strict=True)
    )
    generator = torch.Generator().manual_seed(4)
    for rate in (0.3, 0.2, 0.1):
        gradient = torch.randn(weight.shape, generator=generator)
        rounding.descend(gradient.clone(), rate)
        graph = (reference(weight, scheme, parameters) * gradient).sum()
        slopes = torch.autograd.grad(graph, parameters)
        with torch.no_grad():
            for parameter, slope, bounds in zip(
                parameters, slopes, ((-0.5, 0.5), (0, 1), (0, 1)), strict=True
            ):
                parameter.sub_(rate * slope.sign()).clamp_(*bounds)
            expected = reference(weight, scheme, parameters)
        torch.testing.assert_close(written(rounding, weight), expected, rtol=1e-5, atol=1e-7)
    assert not torch.equal(
        written(rounding, weight), written(IntRounding(weight, scheme, torch.float32), weight)
    )


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.label)
def test_the_codes_are_those_of_the_weight_that_was_tuned(scheme: IntScheme) -> None:
    weight = heavy_weight(8, 64)
    weight[3] = 0
    rounding = IntRounding(weight, scheme, torch.float16)
    rounding.descend(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)), 0.4)
    assert torch.equal(rounding.tensor().dequantize(), written(rounding, weight))


def test_untuned_and_asymmetric_it_is_round_to_nearest() -> None:
    weight, scheme = heavy_weight(8, 64), IntScheme(4, 32, False)
    plain = round_to_nearest(weight, scheme, torch.bfloat16)
    tuned = IntRounding(weight, scheme, torch.bfloat16).tensor()
    assert torch.equal(tuned.codes, plain.codes)
    assert torch.equal(tuned.scales, plain.scales) and torch.equal(tuned.zeros, plain.zeros)


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_descent_begins_in_the_ranges_of_rounding_to_nearest(symmetric: bool) -> None:
    """Those that a search narrowed; an end that it moved beyond the weights' stays at theirs."""
    torch.manual_seed(0)
    scheme, weight = IntScheme(3, 32, symmetric), heavy_weight(64, 64)
    weight[5] = 0
    grid = kind_of(scheme).grid_for(weight.shape, Rounding(torch.float32))
    start = grid.nearest(weight, torch.rand(64) + 0.1)
    assert isinstance(start, IntTensor)
    begun = IntRounding(weight, scheme, torch.float32, start).tensor()
    plain = IntRounding(weight, scheme, torch.float32).tensor()
    narrow = start.scales < 0.9 * plain.scales.abs()
    assert narrow.sum() > 20
    scales = begun.scales.abs()
    assert (scales <= start.scales * (1 + 1e-5)).all()
    assert (scales >= start.scales * (1 - 1e-5))[narrow].float().mean() > 0.9
    assert torch.equal(begun.scales.sign(), plain.scales.sign())


def test_symmetric_ranges_reach_the_largest_weight_of_either_sign() -> None:
    """The code 0 is a step farther than the largest one: it belongs to the larger end, by the scale's sign."""
    weight = torch.tensor([[-1.0, 0.2, 0.3, 0.4], [1.0, -0.2, -0.3, -0.4]])
    tensor = IntRounding(weight, IntScheme(3, 4, True), torch.float32).tensor()
    assert tensor.scales.flatten().tolist() == [0.25, -0.25]
    assert tensor.dequantize()[:, 0].tolist() == [-1.0, 1.0]


def test_what_was_kept_is_recalled() -> None:
    weight = heavy_weight(4, 32)
    rounding = IntRounding(weight, IntScheme(3, 16, True), torch.float32)
    gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(2))
    rounding.descend(gradient.clone(), 0.3)
    rounding.keep()
    kept = written(rounding, weight)
    rounding.descend(gradient.clone(), 0.4)
    assert not torch.equal(written(rounding, weight), kept)
    rounding.recall()
    assert torch.equal(written(rounding, weight), kept)


@pytest.mark.skipif(not native_paths(), reason="C wants AVX2 or NEON, and a compiler")
@pytest.mark.parametrize("path", native_paths() or ["off"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.label)
def test_c_finds_the_bits_of_torch(
    scheme: IntScheme, dtype: torch.dtype, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, shares and offsets after some steps; a row of one channel is of odd width."""
    width = 93 if scheme.group_size == PER_CHANNEL else 96
    weight = heavy_weight(40, width)
    weight[3], weight[4] = 0, weight[4].abs()
    found: list[list[torch.Tensor]] = []
    for name in ("off", path):
        monkeypatch.setenv(VARIABLE, name)
        assert (native_rounding().library is None) == (name == "off")
        rounding = IntRounding(weight.clone(), scheme, torch.float16)
        generator = torch.Generator().manual_seed(5)
        result = torch.empty(weight.shape, dtype=dtype)
        for rate in (0.3, 0.25, 0.2, 0.15):
            rounding.descend(torch.randn(weight.shape, generator=generator).to(dtype), rate)
        rounding.write(result)
        found.append([result, rounding.tensor().scales, rounding.tensor().codes])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
