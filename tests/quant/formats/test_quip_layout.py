"""QuIP-for-all's layout: bytes against a decoder written from it, and what is refused by name."""

from __future__ import annotations

import struct
from fractions import Fraction

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.quant.formats.registry import FORMATS, format_of
from llmopt.quant.kinds.base.kind import kind_of
from llmopt.quant.kinds.e8p.kind import points, residual_points
from llmopt.quant.kinds.e8p.scheme import E8pScheme

from ...support.format_support import MODULE, Tensors, random_weight, stored

OUT, INNER = 24, 96  # each three times a power of two


def decoded(tensors: Tensors, bits: int) -> torch.Tensor:
    """The weight, from bytes and definitions: `diag(SV) (F ⊗ H) Q (F ⊗ H)ᵀ diag(SU)`."""
    octets = tensors[f"{MODULE}.Qidxs"].numpy().tobytes()
    step = {2: 0.0, 3: 1 / 2.04, 4: 1 / 3.45}[bits]
    rows = []
    for place in range(0, len(octets), bits):
        code = octets[place : place + bits]
        values = points()[struct.unpack("<H", code[-2:])[0]]
        if bits > 2:
            rest = int.from_bytes(code[:-2], "little")
            values = values + step * (residual_points() if bits == 3 else points())[rest]
        rows.append(values)
    inner = torch.stack(rows).view(OUT, INNER).double() * float(tensors[f"{MODULE}.Wscale"])
    turns = []
    for side, width in (("right", OUT), ("left", INNER)):
        order = range(width // 3)
        signs = [[(-1.0) ** (row & column).bit_count() for column in order] for row in order]
        power = torch.tensor(signs, dtype=torch.float64) / len(order) ** 0.5
        turns.append(torch.kron(tensors[f"{MODULE}.had_{side}"].double(), power))
    turned = turns[0] @ inner @ turns[1].T
    return turned * tensors[f"{MODULE}.SV"].double()[:, None] * tensors[f"{MODULE}.SU"].double()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_bytes_are_those_that_the_layouts_decoder_reads(bits: int) -> None:
    weight = random_weight(OUT, INNER, bits)
    tensor = kind_of(E8pScheme(bits)).round(weight, torch.float16, name="the weight")
    tensors, config = stored("quip", tensor)
    assert torch.allclose(decoded(tensors, bits).float(), tensor.dequantize(), atol=1e-5)
    names = {2: "E8P12", 3: "E8P12RVQ3B", 4: "E8P12RVQ4B"}
    words = {2: torch.int16, 3: torch.int32, 4: torch.int32}[bits]
    assert tensors[f"{MODULE}.Qidxs"].dtype is words
    assert tensors[f"{MODULE}.Qidxs"].nbytes == OUT * INNER * Fraction(bits, 8)
    assert (config["quant_method"], config["codebook"]) == ("QUiP", names[bits])
    assert (config["use_rand"], config["idx_dtype"]) == (True, str(words))
    assert format_of(config) is FORMATS["quip"]
    assert FORMATS["quip"].config_files(config) == {"quantization_config.json": config}
    assert sum(part.nbytes for part in tensors.values()) * 8 == pytest.approx(
        OUT * INNER * tensor.scheme.bits_per_weight(OUT, INNER)
    )


def test_a_scale_of_each_row_and_a_scalar_one_are_read() -> None:
    tensors, config = stored(
        "quip",
        kind_of(E8pScheme(3)).round(random_weight(OUT, INNER, 0), torch.float16, name="the weight"),
    )
    scales = torch.rand(OUT) + 0.5
    tensors[f"{MODULE}.Wscale"] = scales
    read = FORMATS["quip"].unpack(MODULE, tensors, config)
    tensors[f"{MODULE}.Wscale"] = torch.tensor(2.0)
    doubled = FORMATS["quip"].unpack(MODULE, tensors, config)
    assert torch.allclose(read.inner() * 2, doubled.inner() * scales[:, None])  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.allclose(doubled.dequantize().float(), decoded(tensors, 3).float(), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("had_left", None), "there is no .*had_left.*use_rand"),
        (
            ("had_right", torch.eye(5)),
            r"had_right has shape \(5, 5\), but 24 channels imply \(3, 3\)",
        ),
        (("Wscale", torch.ones(7)), r"Wscale has shape \(7,\)"),
        (("SU", torch.ones(64).half()), "imply"),
        (("SV", torch.ones(24, 1).half()), "has a vector"),
        (("Qidxs", torch.zeros(24, 12, dtype=torch.int32)), "int32"),
    ],
)
def test_what_contradicts_the_layout_is_refused(
    change: tuple[str, torch.Tensor | None], message: str
) -> None:
    tensors, config = stored(
        "quip",
        kind_of(E8pScheme(2)).round(random_weight(OUT, INNER, 0), torch.float16, name="the weight"),
    )
    name, part = change
    del tensors[f"{MODULE}.{name}"]
    if part is not None:
        tensors[f"{MODULE}.{name}"] = part
    with pytest.raises(BadInput, match=message):
        FORMATS["quip"].unpack(MODULE, tensors, config)


def test_other_codebooks_and_residual_scales_are_refused() -> None:
    config = {"quant_method": "QUiP", "codebook": "D4"}
    with pytest.raises(BadInput, match="'D4': this reads E8P12, E8P12RVQ3B, E8P12RVQ4B"):
        FORMATS["quip"].scheme(config, MODULE)
    config = {"quant_method": "QUiP", "codebook": "E8P12RVQ4B", "opt_resid_scale": -1}
    with pytest.raises(BadInput, match=r"opt_resid_scale -1: of E8P12RVQ4B this reads 0.289855"):
        FORMATS["quip"].scheme(config, MODULE)


def test_widths_that_the_words_do_not_divide_are_refused() -> None:
    with pytest.raises(BadInput, match="multiples of 32 and outputs of 8"):
        FORMATS["quip"].check(MODULE, 64, 48, E8pScheme(2))
