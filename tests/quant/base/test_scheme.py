from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.quant.base.scheme import Activations, Scheme
from llmopt.quant.kinds.codebook.scheme import CodebookScheme
from llmopt.quant.kinds.fp4.scheme import Fp4Scheme
from llmopt.quant.kinds.fp8.scheme import FloatScheme
from llmopt.quant.kinds.ggml.scheme import GGUF_BLOCKS, GgufScheme
from llmopt.quant.kinds.integer.kind import IntTensor
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.kinds.lookup.scheme import LookupScheme
from llmopt.quant.kinds.registry import scheme_record
from llmopt.quant.kinds.vectorwise.scheme import VectorwiseScheme

# A scheme of each kind, its label, and its bits per weight in a [128, 256] linear, counted by hand.
SCHEMES: list[tuple[Scheme, str, float]] = [
    (IntScheme(4, 128, False), "int4 g128 asym", 4 + 2 * (16 + 4) / 256),
    (IntScheme(3, 32, False, permuted=True), "int3 g32 asym act-order", 3 + (16 + 3) / 32),
    (IntScheme(8, -1, True), "int8 channel sym", 8 + 16 / 256),
    (
        IntScheme(8, -1, True, Activations("int8")),
        "int8 channel sym a-int8-token",
        8 + 16 / 256,
    ),
    (FloatScheme("tensor"), "fp8 tensor", 8 + 32 / (128 * 256)),
    (
        FloatScheme("channel", Activations("fp8", "tensor", dynamic=False)),
        "fp8 channel a-fp8-tensor-static",
        8 + 32 / 256,
    ),
    (
        FloatScheme("block", Activations("fp8", "group128")),
        "fp8 block a-fp8-group128",
        8 + 64 / (128 * 256),
    ),
    (CodebookScheme("nf4"), "nf4 b64", 4.5),
    (CodebookScheme("fp4", double_quant=True), "fp4 b64 double", 4 + (8 + 32 / 256) / 64),
    (Fp4Scheme("nvfp4"), "nvfp4", 4.5 + 32 / (128 * 256)),
    (
        Fp4Scheme("nvfp4", Activations("nvfp4", "group16", dynamic=False)),
        "nvfp4 a-nvfp4-group16-static",
        4.5 + 32 / (128 * 256),
    ),
    (
        Fp4Scheme("mxfp4", Activations("mxfp4", "group32")),
        "mxfp4 a-mxfp4-group32",
        4.25,
    ),
    (VectorwiseScheme(5.0), "llm.int8 t5", 8 + 32 / 256),
    (LookupScheme(3), "lookup3", 3 + 16 * 8 / 256),
    (LookupScheme(4, 0.0045), "lookup4 s0.45%", 4 + 16 * 16 / 256 + 48 * 0.0045),
    (GgufScheme("Q4_K"), "Q4_K", 4.5),
    (GgufScheme("Q6_K"), "Q6_K", 6.5625),
]


@pytest.mark.parametrize(("scheme", "label", "bits"), SCHEMES, ids=[s[1] for s in SCHEMES])
def test_labels_and_bits_per_weight(scheme: Scheme, label: str, bits: float) -> None:
    assert scheme.label == label
    assert scheme.bits_per_weight(128, 256) == pytest.approx(bits, abs=1e-12)


def test_records_of_schemes_differ() -> None:
    records = [json.dumps(scheme_record(scheme), sort_keys=True) for scheme, _, _ in SCHEMES]
    assert len(set(records)) == len(SCHEMES)


@pytest.mark.parametrize(
    ("make", "parts", "why"),
    [
        (FloatScheme, ("row",), "row"),
        (CodebookScheme, ("af4",), "'af4'"),
        (CodebookScheme, ("nf4", 48), "48"),
        (Fp4Scheme, ("mxfp8",), "'mxfp8'"),
        (Fp4Scheme, ("mxfp4", Activations("fp8")), "fp8"),
        (Activations, ("nvfp4", "group32", False), "group32"),
        (Activations, ("int4",), "int4"),
    ],
)
def test_parts_that_no_scheme_has_are_refused(
    make: Callable[..., object], parts: tuple[object, ...], why: str
) -> None:
    with pytest.raises(BadInput, match=why):
        make(*parts)


@pytest.mark.parametrize("bits", [0, 1, 7, 16])
def test_other_widths_are_refused(bits: int) -> None:
    with pytest.raises(BadInput, match=str(bits)):
        IntScheme(bits, 128, True)


@pytest.mark.parametrize("bits", [0, 5, 6])
def test_other_widths_of_tables_are_refused(bits: int) -> None:
    with pytest.raises(BadInput, match=str(bits)):
        LookupScheme(bits)


@pytest.mark.parametrize("fraction", [-0.1, 0.5, 2.0])
def test_meaningless_sparse_fractions_are_refused(fraction: float) -> None:
    with pytest.raises(BadInput, match="sparse fraction"):
        LookupScheme(4, fraction)


def test_unknown_gguf_types_are_refused() -> None:
    with pytest.raises(BadInput, match="Q9_K"):
        GgufScheme("Q9_K")
    assert all(GgufScheme(name).bits in range(1, 9) for name in GGUF_BLOCKS)


def test_a_static_scale_is_one_for_the_whole_input() -> None:
    with pytest.raises(BadInput, match="static"):
        Activations("int8", "token", dynamic=False)


@pytest.mark.parametrize("group_size", [0, -2])
def test_meaningless_group_sizes_are_refused(group_size: int) -> None:
    with pytest.raises(BadInput, match="group size"):
        IntScheme(4, group_size, True)


def test_groups_of_a_row() -> None:
    assert IntScheme(4, 64, True).num_groups(256) == 4
    assert IntScheme(8, -1, False).num_groups(172) == 1
    with pytest.raises(BadInput, match="128 does not divide 172"):
        IntScheme(4, 128, True).num_groups(172)


def test_scales_of_fp8_blocks_at_the_edge() -> None:
    assert FloatScheme("tensor").scale_shape(200, 130) == (1, 1)
    assert FloatScheme("channel").scale_shape(200, 130) == (200, 1)
    assert FloatScheme("block").scale_shape(200, 130) == (2, 2)


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
