"""GEMMs with E8P codes against the dequantized weight."""

from __future__ import annotations

import pytest
import torch
from llmopt.engine.kernels.hadamard.e8p_linear import E8pLinear
from llmopt.engine.kernels.linear.quantized_linear import (
    QUANTIZED_LINEAR,
    QuantizedLinearKernelQuery,
    prepare_quantized_linear,
)
from llmopt.engine.model.parallel.weight_slice import take
from llmopt.quant.base.errors import BadInput
from llmopt.quant.base.scheme import E8pScheme

from ...support.format_support import make


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(("out", "inner"), [(1088, 96), (64, 576)])
def test_the_kernel_multiplies_with_the_dequantized_weight(bits: int, out: int, inner: int) -> None:
    weight = make(E8pScheme(bits), out, inner)
    linear = prepare_quantized_linear(weight, torch.float32)
    assert isinstance(linear, E8pLinear)
    x = torch.randn(3, inner, generator=torch.Generator().manual_seed(bits))
    expected = x @ weight.dequantize().T
    assert (linear(x) - expected).norm() < 1e-5 * expected.norm()
    assert (linear.in_float32(x.bfloat16()) - expected).norm() < 0.01 * expected.norm()
    assert linear(x.bfloat16()).dtype is torch.bfloat16
    assert linear(x[:0]).shape == (0, out)


def test_a_gpu_has_the_torch_form_and_no_other() -> None:
    query = QuantizedLinearKernelQuery("cuda", torch.bfloat16, 256, 256, E8pScheme(2))
    assert QUANTIZED_LINEAR.select(query).name == "torch-e8p"
    reasons = dict(QUANTIZED_LINEAR.explain(query).reasons)
    assert [name for name, reason in reasons.items() if reason is None] == ["torch-e8p"]


def test_ranks_cannot_divide_it() -> None:
    weight = make(E8pScheme(2), 256, 256)
    for rows, columns in (((slice(0, 128),), None), ((), slice(0, 128))):
        with pytest.raises(BadInput, match="e8p2 cannot be divided along its"):
            take("a", weight, rows, columns)
