"""ggml blocks: the bytes of its own quantizers, the floats of its own readers, and errors worth the search."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llmopt.base.errors import BadInput
from llmopt.base.processor import VARIABLE
from llmopt.quant.formats.registry import FORMATS
from llmopt.quant.kinds.base.kind import kind_of
from llmopt.quant.kinds.ggml.fit import native_search
from llmopt.quant.kinds.ggml.k_blocks import pack_affine
from llmopt.quant.kinds.ggml.scheme import GGUF_BLOCKS, GgufScheme
from llmopt.quant.kinds.ggml.tensor import (
    GgufTensor,
    dequantize_blocks,
    gguf_to_int,
    int_to_gguf,
    quantize_blocks,
)
from llmopt.quant.kinds.integer.kind import round_to_nearest
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.methods.rounding import quantize_layer, round_plain, round_weight

from ...support.layer_problems import one_linear
from ...support.native_paths import native_paths

SIMPLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
K_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def sample(rows: int = 40, columns: int = 512) -> torch.Tensor:
    """Normal weights of several scales, with rows that are all that can go wrong."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(rows, columns, generator=generator)
    weight *= torch.logspace(-3, 1, rows).unsqueeze(-1)
    weight[0] = 0
    weight[1, :32] = 0
    weight[2] = 0.5
    weight[3] = -0.25
    weight[4, ::2] = 0
    weight[5] = weight[5].abs() + 1
    weight[6] = 1e-9
    weight[7, 5] = 300.0
    return weight


def relative_error(weight: torch.Tensor, type_name: str, importance: Any = None) -> float:
    """Squared error over squared norm, each channel weighed by its importance."""
    found = dequantize_blocks(quantize_blocks(weight, type_name, importance), type_name)
    weigh = torch.ones(weight.shape[1]) if importance is None else importance
    return float(((found - weight).square() * weigh).sum() / (weight.square() * weigh).sum())


@pytest.mark.parametrize("type_name", SIMPLE)
def test_simple_blocks_are_the_owners_bytes(type_name):
    quants = pytest.importorskip("gguf.quants")
    kind = pytest.importorskip("gguf").GGMLQuantizationType[type_name]
    weight = sample()
    packed = quantize_blocks(weight, type_name)
    assert np.array_equal(packed.numpy(), quants.quantize(weight.numpy(), kind))


# Of `gguf` 0.19.0's bytes for the block (i - 16) / 7, i in 0 .. 31: what holds where it is not installed.
DIGESTS = {
    "Q4_0": "9c338a8cd5f58f02d002ddd05ed2388655b92c0e5c36de423f81cda4ae0683cf",
    "Q4_1": "7862d559b4d357e2c06c814c3c7231a22f1213a9171c74f54f1f63eeb0749e0a",
    "Q5_0": "e311d1c8dee70183b6d5cc53c21310b7ae6e2f6e61f24bedcfbfc282d15b5b47",
    "Q5_1": "d4aad0af9b5ae7e171e8df39f4458d875b0ac2c773249349c94af6eeec5efd4f",
    "Q8_0": "38454276b4051d1e3f6dd73189c92ec75f30f3d98e45c024b3cd7460daac930e",
}


def test_golden_bytes_of_a_block():
    block = ((torch.arange(32) - 16) / 7).view(1, 32)
    data = quantize_blocks(block, "Q8_0")[0]
    assert data[:2].view(torch.float16).item() == pytest.approx(16 / 7 / 127, rel=1e-3)
    assert data[2:].view(torch.int8).tolist()[:4] == [-127, -119, -111, -103]
    digests = {
        t: hashlib.sha256(quantize_blocks(block, t).numpy().tobytes()).hexdigest() for t in SIMPLE
    }
    assert digests == DIGESTS


@pytest.mark.parametrize("type_name", GGUF_BLOCKS)
def test_the_owner_reads_our_values(type_name):
    quants = pytest.importorskip("gguf.quants")
    kind = pytest.importorskip("gguf").GGMLQuantizationType[type_name]
    packed = quantize_blocks(sample(), type_name)
    ours = dequantize_blocks(packed, type_name)
    assert np.array_equal(ours.numpy(), quants.dequantize(packed.numpy(), kind))


@pytest.mark.parametrize("type_name", GGUF_BLOCKS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_bytes_read_as_the_owner_reads_them(type_name, seed):
    quants = pytest.importorskip("gguf.quants")
    kind = pytest.importorskip("gguf").GGMLQuantizationType[type_name]
    data = np.random.default_rng(seed).integers(0, 256, (2, GGUF_BLOCKS[type_name][1]), np.uint8)
    # Any float16 may come out of random bytes, NaN too; those are equal as NaN.
    with np.errstate(all="ignore"):
        expected = quants.dequantize(data, kind)
    ours = dequantize_blocks(torch.from_numpy(data), type_name).numpy()
    assert np.array_equal(ours, expected, equal_nan=True)


def test_more_bits_are_closer():
    weight = sample()[8:]
    errors = [relative_error(weight, name) for name in ("Q4_K", "Q5_K", "Q6_K", "Q8_0")]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] < 0.01 and errors[-1] < 5e-5
    assert relative_error(weight, "Q4_K") < relative_error(weight, "Q4_1")


@pytest.mark.parametrize("bits", [4, 5])
def test_the_search_beats_scales_from_the_range(bits):
    weight = sample()[8:]
    runs = weight.view(-1, 8, 32)
    low = (-runs.amin(dim=-1)).clamp(min=0)
    steps = (runs.amax(dim=-1) + low) / (2**bits - 1)
    heads = torch.stack([steps.amax(dim=-1) / 63, low.amax(dim=-1) / 63], dim=-1).half()
    scale_codes = (steps / heads[:, :1].float()).round().clamp(1, 63)
    low_codes = (low / heads[:, 1:].float()).round().clamp(0, 63)
    step, offset = heads[:, :1].float() * scale_codes, heads[:, 1:].float() * low_codes
    codes = (runs + offset.unsqueeze(-1)) / step.unsqueeze(-1)
    codes = codes.round().clamp(0, 2**bits - 1).to(torch.uint8)
    plain = pack_affine(scale_codes.byte(), codes, low_codes.byte(), heads, bits)
    found = dequantize_blocks(plain.view(weight.shape[0], -1), f"Q{bits}_K")
    plain_error = float((found - weight).square().sum() / weight.square().sum())
    assert relative_error(weight, f"Q{bits}_K") < 0.9 * plain_error


@pytest.mark.sweep(2)
@pytest.mark.parametrize("type_name", (*K_TYPES, "IQ4_NL", "IQ4_XS"))
@pytest.mark.parametrize("path", native_paths())
def test_the_search_in_c_finds_the_bytes_of_torch(
    path: str, type_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the instructions: of weights down to subnormals, of ties, and with importance."""
    monkeypatch.setenv(VARIABLE, path)
    if native_search().library is None:
        pytest.skip(str(native_search().reason))
    weight = sample(40, 512)
    weight[8] *= 1e-36
    weight[9] = weight[9].round()
    weight[10, 0] = 65504
    importance = torch.rand(512, generator=torch.Generator().manual_seed(5)) ** 4
    found = [quantize_blocks(weight, type_name, one) for one in (None, importance)]
    monkeypatch.setenv(VARIABLE, "off")
    assert native_search().library is None
    for one, data in zip((None, importance), found, strict=True):
        assert torch.equal(quantize_blocks(weight, type_name, one), data)


@pytest.mark.sweep(7)
@pytest.mark.parametrize("type_name", [name for name in GGUF_BLOCKS if name != "Q8_0"])
def test_importance_moves_the_error_to_where_it_costs_least(type_name):
    weight = sample()[8:]
    importance = torch.logspace(-2, 2, weight.shape[1])[torch.randperm(weight.shape[1])]
    data = quantize_blocks(weight, type_name)
    blind = (dequantize_blocks(data, type_name) - weight).square() * importance
    blind_error = float(blind.sum() / (weight.square() * importance).sum())
    assert relative_error(weight, type_name, importance) < blind_error
    dead = torch.zeros(weight.shape[1])
    assert torch.equal(quantize_blocks(weight, type_name, dead), data)


@pytest.mark.parametrize("type_name", GGUF_BLOCKS)
def test_zeros_stay_zeros_and_damage_is_named(type_name):
    zeros = torch.zeros(2, 256)
    assert torch.equal(dequantize_blocks(quantize_blocks(zeros, type_name), type_name), zeros)
    for bad, word in ((float("nan"), "NaN"), (float("inf"), "infinite"), (1e30, "too large")):
        broken = zeros.clone()
        broken[1, 3] = bad
        with pytest.raises(BadInput, match=f"q_proj.*{word}"):
            quantize_blocks(broken, type_name, name="q_proj")
    with pytest.raises(BadInput, match="blocks of"):
        quantize_blocks(torch.zeros(2, 40), type_name)


@pytest.mark.parametrize("type_name", GGUF_BLOCKS)
def test_rows_of_a_tensor_are_rows_of_its_weight(type_name):
    weight = sample()
    tensor = GgufTensor(quantize_blocks(weight, type_name), GgufScheme(type_name))
    assert tensor.shape == tuple(weight.shape)
    assert torch.equal(tensor.rows(slice(8, 24)).dequantize(), tensor.dequantize()[8:24])
    bits = tensor.scheme.bits_per_weight(*tensor.shape)
    assert tensor.nbytes * 8 == bits * weight.numel()
    with pytest.raises(ValueError, match="blocks"):
        GgufTensor(tensor.data[:, 1:], tensor.scheme)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 128, -1])
def test_integer_grids_go_over_and_back_without_loss(bits, group_size):
    tensor = round_to_nearest(sample(), IntScheme(bits, group_size, True), torch.float16)
    packed = int_to_gguf(tensor)
    assert packed.scheme.type == f"Q{bits}_0"
    assert torch.equal(packed.dequantize(), tensor.dequantize())
    back = gguf_to_int(packed)
    assert back.scheme == IntScheme(bits, 32, True)
    assert torch.equal(back.codes, tensor.codes)
    assert torch.equal(back.dequantize(), tensor.dequantize())
    assert torch.equal(int_to_gguf(back).data, packed.data)


@pytest.mark.parametrize("type_name", ["Q4_0", "Q8_0"])
def test_ggmls_own_blocks_as_integers(type_name):
    tensor = GgufTensor(quantize_blocks(sample(), type_name), GgufScheme(type_name))
    assert torch.equal(gguf_to_int(tensor).dequantize(), tensor.dequantize())


def test_what_does_not_fit_is_refused():
    for scheme in (IntScheme(4, 32, False), IntScheme(3, 32, True), IntScheme(4, 16, True)):
        assert scheme.ggml_type is None
        with pytest.raises(BadInput, match="format gguf cannot hold int"):
            FORMATS["gguf"].check("v_proj", 8, 64, scheme)
    with pytest.raises(BadInput, match=r"v_proj has 48 inputs, no multiple of the 32"):
        FORMATS["gguf"].check("v_proj", 8, 48, IntScheme(4, -1, True))


@pytest.mark.parametrize("name", ["Q4_K", "Q4_0", "Q5_1"])
def test_rounding_takes_its_importance_from_the_inputs(name: str):
    """Scaled columns see inputs that are divided by the scales."""
    weight, inputs = sample()[8:], torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    weight, inputs = weight[:, :512], inputs * torch.logspace(-2, 1, 512)
    problem = one_linear(weight, GgufScheme(name), inputs)
    record = problem.statistics["linear"]
    blind: Any = round_plain(problem, "linear", weight)
    assert torch.equal(blind.data, quantize_blocks(weight, name))
    squares = record.gram.diagonal()
    seen = round_weight(problem, "linear", weight).dequantize()
    lost = [float(((one - weight).square() * squares).sum()) for one in (seen, blind.dequantize())]
    assert lost[0] < 0.97 * lost[1]
    columns = 2.0 ** torch.arange(512).remainder(3)
    scaled: Any = round_weight(problem, "linear", weight * columns, columns)
    squares = record.gram.diagonal() / columns.square()
    importance = (squares / squares.mean()).clamp(min=1e-4)
    expected = kind_of(GgufScheme(name)).round(
        weight * columns, torch.float16, importance=importance, name="q"
    )
    assert torch.equal(scaled.data, expected.parts()["data"])


def test_rounding_without_errors_dequantizes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(one_linear(sample(8, 256), GgufScheme("Q4_K")), statistics={})
    monkeypatch.delattr(GgufTensor, "dequantize")
    result = quantize_layer(problem)
    assert [report.error for report in result.reports] == [None]
