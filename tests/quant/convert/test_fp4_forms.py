"""MXFP4 as NVFP4 and as ggml's blocks, and back: the same values, or none."""

from __future__ import annotations

import pytest
import torch
from llmopt.quant.base.scheme import Activations
from llmopt.quant.convert.convert import requantize
from llmopt.quant.formats.registry import FORMATS
from llmopt.quant.kinds.fp4.kind import MXFP4, NVFP4, Fp4Tensor
from llmopt.quant.kinds.fp4.scheme import Fp4Scheme
from llmopt.quant.kinds.ggml.scheme import GgufScheme
from llmopt.quant.kinds.ggml.tensor import fp4_to_gguf, gguf_to_fp4

from ...support.format_support import make


def mxfp4(exponents: list[list[int]], seed: int = 0) -> Fp4Tensor:
    """Blocks of random codes with these powers of two as scales."""
    scales = torch.tensor(exponents) + 127
    generator = torch.Generator().manual_seed(seed)
    rows, blocks = scales.shape
    codes = torch.randint(0, 16, (rows, 32 * blocks), generator=generator, dtype=torch.uint8)
    return Fp4Tensor(codes, scales.to(torch.uint8), MXFP4)


def other_form(tensor: Fp4Tensor) -> Fp4Tensor | None:
    first, *others = tensor.forms()
    assert first is tensor and len(others) < 2
    return others[0] if others else None


@pytest.mark.parametrize(
    ("exponents", "whole"),
    [([[0, -17], [-5, -5]], 2.0**8), ([[3, 0], [-14, 1]], 2.0**5), ([[-30, -28]], 2.0**36)],
)
def test_powers_within_e4m3s_are_nvfp4_and_lead_back(
    exponents: list[list[int]], whole: float
) -> None:
    tensor = mxfp4(exponents)
    other = other_form(tensor)
    assert other is not None and other.scheme == NVFP4 and other.global_scale is not None
    assert other.global_scale.tolist() == [whole]
    assert torch.equal(other.dequantize(), tensor.dequantize())
    back = other_form(other)
    assert back is not None and torch.equal(back.scales, tensor.scales)


def test_a_wider_span_of_powers_has_no_nvfp4_unless_its_blocks_are_zero() -> None:
    tensor = mxfp4([[0, -18]])
    assert other_form(tensor) is None
    tensor.codes[:, 32:] = 8  # zeros, negative ones
    other = other_form(tensor)
    assert other is not None and torch.equal(other.dequantize(), tensor.dequantize())


def test_nvfp4_of_other_scales_is_no_mxfp4() -> None:
    plain = make(NVFP4, 4, 64)
    assert isinstance(plain, Fp4Tensor)
    assert other_form(plain) is None
    other = other_form(mxfp4([[0, -3]]))
    assert other is not None
    other.scales[0, 1] = other.scales[0, 2]  # a power of two, but not its neighbour's
    assert other_form(other) is None


def test_quantized_inputs_stay_with_their_kind() -> None:
    assert other_form(make(Fp4Scheme("mxfp4", Activations("mxfp4", "group32")), 4, 64)) is None  # pyright: ignore[reportArgumentType]


def test_ggmls_blocks_hold_mxfp4_and_give_it_back() -> None:
    tensor = make(MXFP4, 16, 96)
    assert isinstance(tensor, Fp4Tensor)
    tensor.codes[0, :32], tensor.scales[1, 0], tensor.scales[1, 1] = 8, 0, 1
    blocks = fp4_to_gguf(tensor)
    assert blocks.scheme == GgufScheme("MXFP4") and blocks.shape == tensor.shape
    assert torch.equal(blocks.dequantize(), tensor.dequantize())
    back = gguf_to_fp4(blocks)
    assert torch.equal(back.scales, tensor.scales)
    assert torch.equal(back.dequantize(), tensor.dequantize())


@pytest.mark.parametrize("target", ["gguf", "modelopt", "compressed-tensors"])
def test_each_format_takes_what_another_holds(target: str) -> None:
    tensor = mxfp4([[-3, -4], [-6, -5]])
    for held in (tensor, other_form(tensor), fp4_to_gguf(tensor)):
        assert held is not None
        moved = requantize("linear", held, FORMATS[target])
        assert (moved.reason, moved.error) == ("", 0)
        assert torch.equal(moved.tensor.dequantize(), tensor.dequantize())
        assert FORMATS[target].pack("linear", moved.tensor)


def test_nvfp4_in_a_gguf_file_takes_the_type_that_errs_least_at_its_width() -> None:
    moved = requantize("linear", make(NVFP4, 16, 256), FORMATS["gguf"])
    assert moved.tensor.scheme == GgufScheme("IQ4_NL")
    assert 0 < moved.error < 0.01 and "cannot hold nvfp4" in moved.reason
