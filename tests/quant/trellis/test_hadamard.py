"""Hadamard transforms of any width: orthogonal, fast ones as their definition, and logits that stay."""

from __future__ import annotations

import pytest
import torch
from llmopt.quant.kinds.base.incoherence import cosine_factor, spread_evenly, sylvester, whole_width

from ...support.layer_problems import heavy_weight

CPU = torch.device("cpu")


@pytest.mark.parametrize("order", [3, 9, 11, 43, 231])
def test_factors_of_odd_orders_are_orthogonal(order: int) -> None:
    factor = cosine_factor(order).double()
    assert (factor @ factor.T - torch.eye(order)).abs().max() < 1e-6
    assert float(factor.abs().max()) <= (2 / order) ** 0.5 + 1e-6


@pytest.mark.parametrize("width", [576, 1536, 2048, 24, 7])
def test_a_width_has_the_product_of_its_factors(width: int) -> None:
    power = width & -width
    factor = torch.eye(1) if width == power else cosine_factor(width // power)
    matrix = torch.kron(factor, sylvester(power, CPU))
    exact = matrix.double()
    turn = whole_width(width)
    assert (exact @ exact.T - torch.eye(width)).abs().max() < 1e-6
    values = torch.randn(3, 2, width, generator=torch.Generator().manual_seed(width))
    assert torch.allclose(turn.forward(values), values @ matrix, atol=1e-5)
    assert torch.allclose(turn.backward(values), values @ matrix.T, atol=1e-5)


def test_outputs_of_the_float_weight_stay_at_576() -> None:
    weight = heavy_weight(192, 576)
    weight[:, 7] = 0
    sides = spread_evenly(weight, 1.03, 1, whole_width(576), whole_width(192))
    inner = sides.forward(weight)
    assert float(inner.square().mean().sqrt()) == pytest.approx(1.03, rel=0.01)
    x = torch.randn(5, 576, generator=torch.Generator().manual_seed(2))
    inputs = sides.turn_inputs.forward(x * sides.inputs)
    through = sides.turn_outputs.backward(inputs @ inner.T) * sides.outputs
    assert torch.allclose(through, x @ weight.T, atol=1e-5)
    assert torch.allclose(sides.of_inputs(x.T @ x), inputs.T @ inputs, atol=1e-4)
