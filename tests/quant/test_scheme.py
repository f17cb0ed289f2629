from __future__ import annotations

import pytest
import torch
from llmopt.quant.errors import BadInput
from llmopt.quant.methods.rtn import round_to_nearest
from llmopt.quant.scheme import IntScheme
from llmopt.quant.tensors.integer import IntTensor


@pytest.mark.parametrize("bits", [0, 3, 16])
def test_other_widths_are_refused(bits: int) -> None:
    with pytest.raises(BadInput, match=str(bits)):
        IntScheme(bits, 128, True)


@pytest.mark.parametrize("group_size", [0, -2])
def test_meaningless_group_sizes_are_refused(group_size: int) -> None:
    with pytest.raises(BadInput, match="group size"):
        IntScheme(4, group_size, True)


def test_groups_of_a_row() -> None:
    assert IntScheme(4, 64, True).num_groups(256) == 4
    assert IntScheme(8, -1, False).num_groups(172) == 1
    with pytest.raises(BadInput, match="128 does not divide 172"):
        IntScheme(4, 128, True).num_groups(172)


def test_labels() -> None:
    assert IntScheme(4, 128, False).label == "int4 g128 asym"
    assert IntScheme(8, -1, True).label == "int8 channel sym"


def test_dequantize_by_hand() -> None:
    tensor = IntTensor(
        codes=torch.tensor([[0, 8, 15, 9]], dtype=torch.uint8),
        scales=torch.tensor([[0.5, 2.0]], dtype=torch.float16),
        zeros=torch.tensor([[8, 7]], dtype=torch.uint8),
        scheme=IntScheme(4, 2, False),
    )
    assert tensor.dequantize().tolist() == [[-4.0, 0.0, 16.0, 4.0]]


def test_parts_that_do_not_fit_are_refused() -> None:
    codes = torch.zeros(2, 4, dtype=torch.uint8)
    zeros = torch.zeros(2, 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match="scales have shape"):
        IntTensor(codes, torch.ones(2, 1), zeros, IntScheme(4, 2, False))
    with pytest.raises(ValueError, match="uint8"):
        IntTensor(codes.int(), torch.ones(2, 2), zeros, IntScheme(4, 2, False))


def test_concat_is_the_fused_weight() -> None:
    scheme = IntScheme(4, 16, False)
    weights = [torch.randn(rows, 32) for rows in (8, 4)]
    parts = [round_to_nearest(weight, scheme, torch.float16) for weight in weights]
    fused = IntTensor.concat(parts)
    assert fused.shape == (12, 32)
    expected = round_to_nearest(torch.cat(weights), scheme, torch.float16)
    assert torch.equal(fused.dequantize(), expected.dequantize())
    other = round_to_nearest(weights[0], IntScheme(4, 32, False), torch.float16)
    with pytest.raises(ValueError, match="one scheme"):
        IntTensor.concat([parts[0], other])
