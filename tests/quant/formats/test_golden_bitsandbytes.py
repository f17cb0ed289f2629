"""Our bytes against those of bitsandbytes itself, which `make_bitsandbytes_golden.py` wrote down."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
import torch
from llmopt.quant.kinds.base.kind import Rounding
from llmopt.quant.kinds.codebook.kind import CodebookKind, codebook, dynamic_map
from llmopt.quant.kinds.codebook.scheme import CodebookScheme
from llmopt.quant.kinds.vectorwise.kind import VectorwiseKind
from llmopt.quant.kinds.vectorwise.scheme import VectorwiseScheme

from tools.make_bitsandbytes_golden import GOLDEN, golden_weight

CASES: list[dict[str, Any]] = json.loads(GOLDEN.read_text())["cases"]
HOW = Rounding(torch.float32)
EACH_CASE = pytest.mark.parametrize("case", CASES, ids=[str(case["shape"]) for case in CASES])


def stored(text: str, dtype: torch.dtype) -> torch.Tensor:
    data = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
    return data.view(dtype)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Two codes to a byte, the first in the high half."""
    flat = codes.flatten()
    return flat[0::2] << 4 | flat[1::2]


@EACH_CASE
def test_nf4_bytes(case: dict[str, Any]) -> None:
    tensor = CodebookKind(CodebookScheme("nf4")).rounded(golden_weight(*case["shape"]), HOW)
    expected = case["nf4"]
    assert torch.equal(packed(tensor.codes), stored(expected["weight"], torch.uint8))
    assert torch.equal(tensor.absmax, stored(expected["absmax"], torch.float32))
    assert torch.equal(
        tensor.dequantize()[:2].flatten(), stored(expected["dequantized"], torch.float32)
    )


@EACH_CASE
def test_fp4_bytes(case: dict[str, Any]) -> None:
    """bitsandbytes compares with 0.6667 for 2/3 on a CPU: only beside a midpoint may codes differ."""
    weight = golden_weight(*case["shape"])
    tensor = CodebookKind(CodebookScheme("fp4")).rounded(weight, HOW)
    data = stored(case["fp4"]["weight"], torch.uint8)
    expected = torch.stack([data >> 4, data & 15], dim=1).view(weight.shape)
    differ = tensor.codes != expected
    assert int(differ.sum()) <= 3
    magnitudes = tensor.absmax.repeat_interleave(64)[: weight.numel()].view(weight.shape)
    middles = codebook("fp4").unique()
    middles = (middles[1:] + middles[:-1]) / 2
    distance = ((weight / magnitudes)[differ].unsqueeze(-1) - middles).abs().amin(dim=-1)
    assert bool((distance < 5e-5).all())
    assert torch.equal(tensor.absmax, stored(case["fp4"]["absmax"], torch.float32))


@EACH_CASE
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_double_quantization_bytes(case: dict[str, Any], kind: Any) -> None:
    weight, expected = golden_weight(*case["shape"]), case[kind]
    tensor = CodebookKind(CodebookScheme(kind, double_quant=True)).rounded(weight, HOW)
    assert torch.equal(tensor.absmax, stored(expected["double_absmax"], torch.uint8))
    for name in ("nested_absmax", "nested_map", "nested_offset"):
        part = getattr(tensor, name)
        assert torch.equal(part, stored(expected[name], torch.float32)), name


@EACH_CASE
def test_int8_bytes(case: dict[str, Any]) -> None:
    tensor = VectorwiseKind(VectorwiseScheme()).rounded(golden_weight(*case["shape"])[:24], HOW)
    assert torch.equal(tensor.codes.flatten(), stored(case["int8"]["weight"], torch.int8))
    assert torch.equal(tensor.absmax, stored(case["int8"]["absmax"], torch.float32))


def test_the_data_exercises_what_it_is_for() -> None:
    """Every code occurs, a block is zero, and the magnitudes fill more than one nested block."""
    data = stored(CASES[0]["nf4"]["weight"], torch.uint8)
    assert set(torch.cat([data >> 4, data & 15]).tolist()) == set(range(16))
    assert float(stored(CASES[0]["nf4"]["absmax"], torch.float32).min()) == 0
    assert stored(CASES[0]["nf4"]["nested_absmax"], torch.float32).numel() == 2


def test_dynamic_map() -> None:
    values = dynamic_map()
    assert values.shape == (256,)
    assert bool((values.diff() > 0).all())
    assert values[[0, 127, 128, 255]].tolist() == pytest.approx([-1, 0, 5.5e-7, 1])


def test_the_map_of_one_device_is_not_kept_for_another() -> None:
    with torch.device("meta"):  # as where layers are solved on a device
        assert dynamic_map(torch.device("meta")).is_meta
        assert not dynamic_map(torch.device("cpu")).is_meta
