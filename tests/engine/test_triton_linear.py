"""Triton's products with integer weights against the floats that the codes stand for."""

from __future__ import annotations

import pytest
import torch
from llmopt.engine.kernels.quantized_linear import QUANTIZED_LINEAR, QuantizedLinearSituation
from llmopt.quant.methods.int_grid import round_to_nearest
from llmopt.quant.scheme import Activations, CodebookScheme, IntScheme
from triton_world import DEVICE

CASES = [
    (IntScheme(4, 128, False), 64, 256),
    (IntScheme(4, 128, True), 65, 512),
    (IntScheme(4, 64, False), 1, 128),
    (IntScheme(4, 32, False), 70, 192),
    (IntScheme(4, 16, True), 33, 96),
    (IntScheme(4, -1, False), 64, 640),
    (IntScheme(8, -1, True), 130, 160),
    (IntScheme(8, 32, False), 9, 96),
]


def weight_and_inputs(scheme: IntScheme, out: int, inputs: int, tokens: int):
    g = torch.Generator().manual_seed(out)
    weight = round_to_nearest(torch.randn(out, inputs, generator=g), scheme, torch.float32)
    assert type(weight).__name__ == "IntTensor"
    moved = {name: part.to(DEVICE) for name, part in weight.parts().items()}
    from dataclasses import replace

    return replace(weight, **moved), torch.randn(tokens, inputs, generator=g).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products(case: tuple[IntScheme, int, int], dtype: torch.dtype) -> None:
    from llmopt.engine.kernels.triton.integer_linear import IntegerLinear

    weight, x = weight_and_inputs(*case, tokens=70)
    linear = IntegerLinear(weight, dtype)
    expected = weight.dequantize(dtype)
    assert torch.equal(linear.dequantize(), expected)
    for tokens in (0, 1, 2, 17, 70):
        given = x[:tokens].to(dtype)
        got = linear(given)
        assert got.dtype is dtype and got.shape == (tokens, case[1])
        exact = given.float() @ expected.float().T
        if tokens:
            bound = 5e-3 if dtype is torch.bfloat16 else 1e-5
            assert (got.float() - exact).norm() < bound * exact.norm()


def test_it_holds_packed_codes() -> None:
    from llmopt.engine.kernels.triton.integer_linear import IntegerLinear

    for scheme, most in ((IntScheme(4, 128, False), 0.55), (IntScheme(8, -1, True), 1.1)):
        weight, _ = weight_and_inputs(scheme, 128, 256, 1)
        assert IntegerLinear(weight, torch.bfloat16).weight_bytes < most * 128 * 256


def test_a_token_depends_on_no_neighbour() -> None:
    """Bit for bit, among the widths that the matrix units serve."""
    from llmopt.engine.kernels.triton.integer_linear import IntegerLinear

    weight, x = weight_and_inputs(IntScheme(4, 32, False), 64, 640, 16)
    linear = IntegerLinear(weight, torch.float32)
    together = linear(x)
    assert torch.equal(linear(x[3:6]), together[3:6])
    assert torch.equal(linear(x[:, :]), together)


def test_rounded_inputs_are_rounded_as_the_scheme_says() -> None:
    from llmopt.engine.kernels.triton.integer_linear import IntegerLinear

    scheme = IntScheme(8, -1, True, Activations("int8"))
    weight, x = weight_and_inputs(scheme, 32, 64, 3)
    got, plain = IntegerLinear(weight, torch.float32)(x), x @ weight.dequantize().T
    assert 1e-4 < (got - plain).norm() / plain.norm() < 2e-2


@pytest.mark.parametrize(
    ("scheme", "inputs", "reason"),
    [
        (CodebookScheme("nf4"), 256, "it is for integers of 4 or 8 bits"),
        (IntScheme(4, 128, False, permuted=True), 256, "it is for integers of 4 or 8 bits"),
        (IntScheme(4, 8, False), 256, "it wants groups of a multiple of 16"),
    ],
    ids=str,
)
def test_what_it_refuses(scheme, inputs: int, reason: str) -> None:
    situation = QuantizedLinearSituation("cuda", torch.bfloat16, 64, inputs, scheme)
    choice = QUANTIZED_LINEAR.explain(situation)
    assert choice.chosen == "tiled-dequant"
    assert str(dict(choice.reasons)["triton-integer"]).startswith(reason)
