"""GEMMs with trellis codes: C and torch against the dequantized weight."""

from __future__ import annotations

import pytest
import torch
from llmopt.engine.kernels.linear.quantized_linear import (
    QUANTIZED_LINEAR,
    QuantizedLinearKernelQuery,
    prepare_quantized_linear,
)
from llmopt.engine.kernels.linear.trellis_linear import (
    NativeTrellisLinear,
    TransformedLinear,
    native_trellis,
)
from llmopt.engine.model.parallel.weight_slice import take
from llmopt.quant.base.errors import BadInput
from llmopt.quant.base.scheme import TRELLIS_CODEBOOKS, TrellisScheme
from llmopt.quant.native.processor import PATHS, VARIABLE, processor_flags
from llmopt.quant.tensors.trellis import TrellisTensor

from ...support.format_support import trellis_tensor

NATIVE = [path.name for path in PATHS if path.needs <= processor_flags()]
SCHEMES = [
    *(TrellisScheme(bits) for bits in range(1, 9)),
    *(TrellisScheme(3, name) for name in TRELLIS_CODEBOOKS[:2]),
]


def weight_of(scheme: TrellisScheme, out: int = 384, inner: int = 256) -> TrellisTensor:
    return trellis_tensor(scheme, out, inner, torch.Generator().manual_seed(scheme.bits))


def inputs_of(rows: int, inner: int = 256) -> torch.Tensor:
    return torch.randn(rows, inner, generator=torch.Generator().manual_seed(rows))


def distance(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.label)
@pytest.mark.parametrize("path", NATIVE)
def test_the_kernel_multiplies_with_the_dequantized_weight(
    path: str, scheme: TrellisScheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, path)
    if native_trellis().library is None:
        pytest.skip(str(native_trellis().reason))
    weight, x = weight_of(scheme), inputs_of(11)
    linear = prepare_quantized_linear(weight, torch.float32)
    assert isinstance(linear, NativeTrellisLinear)
    expected = x @ weight.dequantize().T
    assert distance(linear(x), expected) < 1e-5
    assert torch.equal(linear(x[3:4])[0], linear(x)[3])  # a row's sums do not depend on the others
    strided = torch.cat([x, x], dim=1)[:, :256]
    assert torch.equal(linear(strided), linear(x))
    bias = torch.randn(384)
    assert isinstance(linear, NativeTrellisLinear)
    linear.fuse_bias(bias)
    assert distance(linear(x.bfloat16()), expected + bias) < 0.02
    assert distance(linear.in_float32(x), expected + bias) < 1e-5
    assert linear(x[:0]).shape == (0, 384)


def test_torch_multiplies_where_there_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    weight, x = weight_of(TrellisScheme(2), 1152), inputs_of(3)
    linear = prepare_quantized_linear(weight, torch.float32)
    assert isinstance(linear, TransformedLinear)
    assert distance(linear(x), x @ weight.dequantize().T) < 1e-5
    assert linear(x.bfloat16()).dtype is torch.bfloat16


def test_a_gpu_has_the_torch_form() -> None:
    query = QuantizedLinearKernelQuery("cuda", torch.bfloat16, 256, 256, TrellisScheme(2))
    assert QUANTIZED_LINEAR.select(query).name == "torch-trellis"


def test_ranks_divide_at_whole_blocks() -> None:
    weight = weight_of(TrellisScheme(3), 384, 256)
    floats = weight.dequantize()
    rows, columns = (slice(0, 128), slice(256, 384)), slice(128, 256)
    part = take("a", weight, rows, columns)
    assert isinstance(part, TrellisTensor)
    chosen = torch.cat([floats[run] for run in rows])[:, columns]
    assert torch.allclose(part.dequantize(), chosen, atol=1e-6)
    for wrong in (((slice(0, 64),), None), ((), slice(64, 256))):
        with pytest.raises(BadInput, match="cannot be divided"):
            take("a", weight, *wrong)
