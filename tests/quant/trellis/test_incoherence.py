"""Incoherence processing: orthogonal transforms that leave a linear's outputs as they are."""

from __future__ import annotations

import torch
from llmopt.quant.kinds.base.incoherence import HadamardBlocks, fitted_scales, spread_evenly

from ...support.layer_problems import correlated_inputs, heavy_weight

hadamard_blocks = HadamardBlocks().forward


def test_the_transform_is_orthogonal() -> None:
    matrix = hadamard_blocks(torch.eye(256))
    assert (matrix @ matrix.T - torch.eye(256)).abs().max() < 1e-6
    assert torch.equal(matrix.abs()[:128, :128].unique().round(decimals=5), torch.tensor([0.08839]))
    assert not bool(matrix[:128, 128:].any())


def test_outputs_of_the_float_weight_stay() -> None:
    weight = heavy_weight(256, 384)
    weight[:, 7] = 0
    weight[100:228] = 0
    sides = spread_evenly(weight, 0.98, seed=1)
    inner = sides.forward(weight)
    assert float(inner.square().mean().sqrt()) > 0.3
    x = torch.randn(5, 384, generator=torch.Generator().manual_seed(2))
    assert torch.allclose(x @ sides.backward(inner).T, x @ weight.T, atol=1e-5)
    through = hadamard_blocks(hadamard_blocks(x * sides.inputs) @ inner.T) * sides.outputs
    assert torch.allclose(through, x @ weight.T, atol=1e-5)
    gram = sides.of_inputs(x.T @ x)
    inputs = hadamard_blocks(x * sides.inputs)
    assert torch.allclose(gram, inputs.T @ inputs, atol=1e-5)


def test_what_is_left_is_near_normal() -> None:
    weight = heavy_weight(128, 256)
    weight[:, 3] *= 30
    weight[5] *= 30
    inner = spread_evenly(weight, 0.98, seed=0).forward(weight)
    spread = inner / inner.square().mean().sqrt()
    assert float(spread.pow(4).mean()) < 3.5 < float((weight / weight.std()).pow(4).mean())


def test_zero_weights_stay_zero() -> None:
    sides = spread_evenly(torch.zeros(128, 128), 0.91, seed=0)
    assert not bool(sides.forward(torch.zeros(128, 128)).any())
    assert not bool(sides.backward(torch.randn(128, 128)).any())


def test_fitted_scales_have_less_error() -> None:
    weight = heavy_weight(128, 128)
    inputs = correlated_inputs(512, 128)
    gram = inputs.T @ inputs
    sides = spread_evenly(weight, 0.98, seed=0)
    values = sides.forward(weight)
    values = values + 0.4 * torch.randn(values.shape, generator=torch.Generator().manual_seed(4))

    def error(transforms: object) -> float:
        delta = transforms.backward(values) - weight  # pyright: ignore[reportAttributeAccessIssue]
        return float((delta @ gram * delta).sum())

    assert error(fitted_scales(sides, values, weight, gram, 0.01)) < 0.9 * error(sides)
