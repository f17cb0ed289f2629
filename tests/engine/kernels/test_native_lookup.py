"""The C lookup of rows in packed weights on every path that this processor has, against dequantization."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from llmopt.base.processor import VARIABLE
from llmopt.engine.kernels.linear.grid import TABLE_BLOCKS, WHOLE_BLOCKS, grid_of
from llmopt.engine.kernels.linear.native_linear import PackedLinear, native_lookup
from llmopt.quant.base.scheme import Scheme
from llmopt.quant.kinds.base.tensor import QuantizedTensor
from llmopt.quant.kinds.ggml.scheme import GgufScheme
from llmopt.quant.kinds.ggml.tensor import GgufTensor, quantize_blocks
from llmopt.quant.kinds.integer.scheme import IntScheme

from ...support.native_paths import native_paths
from ...support.quantized_world import quantized

HERE = native_paths()
pytestmark = pytest.mark.skipif(not HERE, reason="the C kernels want AVX2 or NEON, and a compiler")
BLOCKS = [GgufScheme(kind) for kind in WHOLE_BLOCKS + TABLE_BLOCKS]
INTEGERS = [IntScheme(bits, 32, symmetric) for bits in (3, 4, 8) for symmetric in (True, False)]


@pytest.fixture(params=HERE or ["off"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every path, forced."""
    monkeypatch.setenv(VARIABLE, request.param)
    if (reason := native_lookup().reason) is not None:
        pytest.skip(reason)
    yield request.param


def weight_of(scheme: Scheme, out: int, inputs: int) -> QuantizedTensor:
    weight = torch.randn(out, inputs, generator=torch.Generator().manual_seed(0)) / inputs**0.5
    if isinstance(scheme, GgufScheme):
        return GgufTensor(quantize_blocks(weight, scheme.type), scheme)
    return quantized(weight, scheme, torch.float16)


def lookup(weight: QuantizedTensor, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    grid = grid_of(weight)
    assert grid is not None
    return PackedLinear(grid, "int8").lookup(ids, dtype)


@pytest.mark.parametrize("scheme", [*BLOCKS, *INTEGERS], ids=lambda scheme: scheme.label)
def test_rows_are_those_of_the_dequantized_weight(path: str, scheme: Scheme) -> None:
    weight = weight_of(scheme, 70, 512)
    ids = torch.tensor([69, 0, 31, 32, 33, 0])
    expected = weight.dequantize()[ids]
    got = lookup(weight, ids, torch.float32)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(lookup(weight, ids, torch.bfloat16), got.bfloat16())
    if scheme in (GgufScheme("Q8_0"), GgufScheme("Q4_0")):
        assert torch.equal(got, expected)


def test_many_rows_are_the_single_ones_whatever_the_threads(path: str) -> None:
    weight = weight_of(GgufScheme("Q5_1"), 40, 96)
    ids = torch.randint(0, 40, (200,), generator=torch.Generator().manual_seed(1))
    together = lookup(weight, ids, torch.float32)
    torch.set_num_threads(2)
    try:
        assert torch.equal(lookup(weight, ids, torch.float32), together)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(lookup(weight, ids[7:8], torch.float32), together[7:8])
    assert lookup(weight, ids[:0], torch.float32).shape == (0, 96)
