"""Tuning of the scales around a linear's transforms, for both kinds of codes."""

from __future__ import annotations

import pytest
import torch
from llmopt.quant.kinds.base.incoherence import TransformedTensor
from llmopt.quant.kinds.base.kind import kind_of
from llmopt.quant.kinds.e8p.scheme import E8pScheme
from llmopt.quant.kinds.trellis.scheme import TrellisScheme
from llmopt.quant.methods.autoround import TunedScales

from ...support.layer_problems import correlated_inputs, heavy_weight

SCHEMES = (TrellisScheme(2), E8pScheme(2))
each_kind = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.label)


def rounded(weight: torch.Tensor, scheme: TrellisScheme | E8pScheme) -> TransformedTensor:
    tensor = kind_of(scheme).round(weight, torch.float16, name="the weight")
    assert isinstance(tensor, TransformedTensor)
    return tensor


def tuned(scheme: TrellisScheme | E8pScheme) -> tuple[torch.Tensor, TunedScales]:
    weight = heavy_weight(128, 192 if isinstance(scheme, E8pScheme) else 256)
    weight[:, 7] = 0
    return weight, TunedScales(rounded(weight, scheme))


def written(scales: TunedScales) -> torch.Tensor:
    into = torch.empty(scales.tensor().shape)
    scales.write(into)
    return into


@each_kind
def test_the_written_weight_is_the_tensors(scheme: TrellisScheme | E8pScheme) -> None:
    _, scales = tuned(scheme)
    torch.testing.assert_close(written(scales), scales.tensor().dequantize(), rtol=1e-4, atol=1e-6)


@each_kind
def test_descent_lowers_the_output_error_and_leaves_codes_and_zeros(
    scheme: TrellisScheme | E8pScheme,
) -> None:
    weight, scales = tuned(scheme)
    inputs, before = correlated_inputs(512, weight.shape[1]), scales.tensor()

    def error() -> float:
        return float((inputs @ (written(scales) - weight).T).square().sum())

    plain = error()
    for step in range(40):
        scales.descend((written(scales) - weight) @ (inputs.T @ inputs), 0.02 * (1 - step / 40))
    assert error() < 0.9 * plain
    after = scales.tensor()
    assert torch.equal(after.inner(), before.inner())
    assert not after.transforms.inputs[7] and not after.dequantize()[:, 7].any()
    torch.testing.assert_close(after.dequantize(), written(scales), rtol=2e-3, atol=1e-5)
    scales.recall()
    assert error() == plain


@each_kind
def test_a_step_goes_along_the_gradient_of_both_sides(scheme: TrellisScheme | E8pScheme) -> None:
    """The first step of Adam is as long as its rate, against the sign of the gradient (by autograd)."""
    weight, scales = tuned(scheme)
    before = scales.tensor().transforms
    sides = [side.clone().requires_grad_() for side in (before.inputs, before.outputs)]
    codes = before.unscaled(scales.tensor().inner())
    gradient = correlated_inputs(*weight.shape)
    (codes * sides[0] * sides[1][:, None] * gradient).sum().backward()
    scales.descend(gradient, 0.01)
    after = scales.tensor().transforms
    for side, moved in zip(sides, (after.inputs, after.outputs), strict=True):
        assert side.grad is not None
        length = 0.01 * side.detach()[side != 0].abs().mean()
        expected = side.detach() - length * side.grad.sign() * (side != 0)
        torch.testing.assert_close(moved, expected.half().float(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("scheme", [TrellisScheme(1), TrellisScheme(3), E8pScheme(3)])
def test_a_weight_of_zeros_stays_so(scheme: TrellisScheme | E8pScheme) -> None:
    scales = TunedScales(rounded(torch.zeros(128, 128), scheme))
    scales.descend(torch.ones(128, 128), 0.1)
    assert not scales.tensor().dequantize().any()
