"""fp8 inputs that the C GEMM rounds as it prepares them: bit-equal to torch's rounding, on every path."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from llmopt.base.processor import VARIABLE
from llmopt.engine.kernels.elementwise.reference import fake_quantize_inputs
from llmopt.engine.kernels.linear.grid import native_grid_of
from llmopt.engine.kernels.linear.native_linear import (
    Packed16Linear,
    PackedLinear,
    native_linear,
    packed_of,
)
from llmopt.quant.base.scheme import Activations
from llmopt.quant.kinds.fp8.scheme import FloatScheme

from ...support.native_paths import native_paths
from ...support.quantized_world import quantized

HERE = native_paths()
pytestmark = pytest.mark.skipif(not HERE, reason="the C kernels want AVX2 or NEON, and a compiler")
TOKEN = Activations("fp8")
GROUPS = Activations("fp8", "group128")
STATIC = Activations("fp8", "tensor", dynamic=False)


@pytest.fixture(params=HERE or ["off"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every path, forced."""
    monkeypatch.setenv(VARIABLE, request.param)
    yield request.param


def inputs(rows: int, width: int) -> torch.Tensor:
    """Values over the whole range of e4m3 and past both ends, halves between neighbours, and zeros."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, width, generator=generator)
    x *= torch.exp2(torch.randint(-14, 12, x.shape, generator=generator))
    x[:, ::3] = (x[:, ::3] * 32).round() / 32
    x[0, 5:9] = torch.tensor([448.0, -464.0, 0.0, -0.0])
    x[1] = 0
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activations", [TOKEN, GROUPS, STATIC], ids=lambda a: a.label)
@pytest.mark.parametrize("rows", [1, 2, 19])
def test_inputs_are_rounded_as_torch_rounds_them(
    path: str, rows: int, activations: Activations, dtype: torch.dtype
) -> None:
    width = 296  # the last group of 128 is shorter, the last chunk of 32 too
    scheme = FloatScheme("channel", activations)
    weight = torch.randn(40, width, generator=torch.Generator().manual_seed(4))
    held = quantized(weight, scheme, torch.float32)
    x = inputs(max(rows, 2), width)[:rows].to(dtype)
    grid = native_grid_of(held)
    assert grid is not None and native_linear().path == path
    fused = Packed16Linear(held, grid, dtype)
    plain = PackedLinear(grid, "bfloat16" if dtype is torch.bfloat16 else "float32")
    assert not fused.quantizes_inputs and (packed_of(fused) is None) != activations.dynamic
    expected = plain(fake_quantize_inputs(x, scheme, held.parts().get("input_scale")))
    assert torch.equal(fused(x), expected)
    assert not torch.equal(fused(x), plain(x))
