from __future__ import annotations

import pytest
import torch
from llmopt.quant.base.scheme import TrellisScheme
from llmopt.quant.grids.trellis_grid import round_to_trellis
from llmopt.quant.tuning.trellis_scales import TunedScales

from ...support.layer_problems import correlated_inputs, heavy_weight


def tuned() -> tuple[torch.Tensor, TunedScales]:
    weight = heavy_weight(128, 256)
    weight[:, 7] = 0
    return weight, TunedScales(round_to_trellis(weight, TrellisScheme(2)))


def written(scales: TunedScales) -> torch.Tensor:
    into = torch.empty(128, 256)
    scales.write(into)
    return into


def test_the_written_weight_is_the_tensors() -> None:
    _, scales = tuned()
    torch.testing.assert_close(written(scales), scales.tensor().dequantize())


def test_descent_lowers_the_output_error_and_leaves_codes_and_zeros() -> None:
    weight, scales = tuned()
    inputs, before = correlated_inputs(512, 256), scales.tensor()

    def error() -> float:
        return float((inputs @ (written(scales) - weight).T).square().sum())

    plain = error()
    for step in range(40):
        scales.descend((written(scales) - weight) @ (inputs.T @ inputs), 0.02 * (1 - step / 40))
    assert error() < 0.9 * plain
    after = scales.tensor()
    assert torch.equal(after.trellis, before.trellis)
    assert not after.suh[7] and not after.dequantize()[:, 7].any()
    torch.testing.assert_close(after.dequantize(), written(scales), rtol=2e-3, atol=1e-5)
    scales.recall()
    assert error() == plain


def test_a_step_goes_along_the_gradient_of_both_sides() -> None:
    """The first step of Adam is as long as its rate, against the sign of the gradient (by autograd)."""
    _, scales = tuned()
    before = scales.tensor()
    sides = [side.float().requires_grad_() for side in (before.suh, before.svh)]
    codes = written(scales) / before.svh.float()[:, None]
    codes = torch.where(before.suh == 0, 0.0, codes / before.suh.float())
    gradient = correlated_inputs(128, 256)
    (codes * sides[0] * sides[1][:, None] * gradient).sum().backward()
    scales.descend(gradient, 0.01)
    for side, moved in zip(sides, (scales.tensor().suh, scales.tensor().svh), strict=True):
        assert side.grad is not None
        length = 0.01 * side.detach()[side != 0].abs().mean()
        expected = side.detach() - length * side.grad.sign() * (side != 0)
        torch.testing.assert_close(moved, expected.half(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("bits", [1, 3])
def test_a_weight_of_zeros_stays_so(bits: int) -> None:
    scales = TunedScales(round_to_trellis(torch.zeros(128, 128), TrellisScheme(bits)))
    scales.descend(torch.ones(128, 128), 0.1)
    assert not scales.tensor().dequantize().any()
