"""GEMMs with E8P codes against the dequantized weight."""

from __future__ import annotations

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.engine.kernels.linear.hadamard_linear import TransformedLinear
from llmopt.engine.kernels.linear.quantized_linear import (
    QUANTIZED_LINEAR,
    QuantizedLinearKernelQuery,
    prepare_quantized_linear,
)
from llmopt.engine.model.layers.parallel import take
from llmopt.quant.kinds.base.incoherence import whole_width
from llmopt.quant.kinds.e8p.kind import E8pTensor
from llmopt.quant.kinds.e8p.scheme import E8pScheme

from ...support.format_support import make

# Odd factors 3, 9 and 7; inputs and outputs that fill no block of 128, no 16; more rows than a tile.
SHAPES = [(200, 96), (64, 576), (1536, 224), (256, 2048), (1088, 96)]


def weight_of(bits: int, out: int, inner: int) -> E8pTensor:
    """Every code in turn, with a scale for each row of them where `out` is no power of two."""
    generator = torch.Generator().manual_seed(bits + out)

    def sides(width: int) -> torch.Tensor:
        return torch.randn(width, generator=generator).half()

    count = out * inner // 8
    codes = (torch.arange(count) * 40503 % 65536).to(torch.int16).view(out, -1)
    residual = torch.randint(0, 65536, (out, inner // 8), generator=generator)
    left, right = whole_width(inner).factor, whole_width(out).factor
    return E8pTensor(
        codes,
        sides(inner),
        sides(out),
        torch.tensor(0.7) if right is None else torch.rand(out, generator=generator) + 0.5,
        E8pScheme(bits),
        {2: None, 3: residual.to(torch.uint8), 4: residual.to(torch.int16)}[bits],
        left,
        right,
    )


def inputs_of(rows: int, inner: int) -> torch.Tensor:
    return torch.randn(rows, inner, generator=torch.Generator().manual_seed(rows))


def distance(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_multiplies_with_the_dequantized_weight(bits: int, shape: tuple[int, int]) -> None:
    (out, inner), x = shape, inputs_of(3, shape[1])
    weight = weight_of(bits, out, inner)
    linear = prepare_quantized_linear(weight, torch.float32)
    assert isinstance(linear, TransformedLinear)
    expected = x @ weight.dequantize().T
    assert distance(linear(x), expected) < 1e-5
    assert distance(linear.in_float32(x.bfloat16()), expected) < 0.01
    assert linear(x.bfloat16()).dtype is torch.bfloat16
    assert linear(x[:0]).shape == (0, out)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_torch_alone_decodes_it(device: str) -> None:
    for input_bits in (8, 16):
        shape = device, torch.bfloat16, 256, 256
        query = QuantizedLinearKernelQuery(*shape, E8pScheme(2), input_bits)
        reasons = dict(QUANTIZED_LINEAR.explain(query).reasons)
        assert [name for name, reason in reasons.items() if reason is None] == ["torch-e8p"]


def test_ranks_cannot_divide_it() -> None:
    weight = make(E8pScheme(2), 256, 256)
    for rows, columns in (((slice(0, 128),), None), ((), slice(0, 128))):
        with pytest.raises(BadInput, match="e8p2 cannot be divided along its"):
            take("a", weight, rows, columns)
