from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import pack_to_int32, unpack_from_int32
from hypothesis import given, settings
from hypothesis import strategies as st
from llmopt.quant.errors import BadInput
from llmopt.quant.formats.base import pack_words, unpack_words
from llmopt.quant.formats.registry import FORMATS, format_of
from llmopt.quant.scheme import IntScheme
from llmopt.quant.tensors.integer import IntTensor

AWQ, CT = FORMATS["awq"], FORMATS["compressed-tensors"]


def random_tensor(scheme: IntScheme, out: int, inner: int, seed: int) -> IntTensor:
    generator = torch.Generator().manual_seed(seed)
    groups = scheme.num_groups(inner)

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, scheme.max_code + 1, shape, generator=generator, dtype=torch.uint8)

    middle = torch.full((out, groups), scheme.middle, dtype=torch.uint8)
    return IntTensor(
        codes=codes(out, inner),
        scales=torch.rand(out, groups, generator=generator).to(torch.float16),
        zeros=middle if scheme.symmetric else codes(out, groups),
        scheme=scheme,
    )


def assert_same(left: IntTensor, right: IntTensor) -> None:
    assert left.scheme == right.scheme
    for part in ("codes", "scales", "zeros"):
        assert torch.equal(getattr(left, part), getattr(right, part)), part
        assert getattr(right, part).is_contiguous()


WIDTHS = st.sampled_from([8, 16, 40, 64])
GROUPS = st.sampled_from([8, -1])
SEEDS = st.integers(0, 2**31)


@settings(max_examples=40, deadline=None)
@given(WIDTHS, WIDTHS, GROUPS, SEEDS)
def test_awq_round_trip(out: int, inner: int, group_size: int, seed: int) -> None:
    tensor = random_tensor(IntScheme(4, group_size, False), out, inner, seed)
    stored = AWQ.pack("m", tensor)
    assert stored["m.qweight"].shape == (inner, out // 8)
    assert stored["m.scales"].dtype == torch.float16
    assert_same(
        tensor, AWQ.unpack("m", stored.__getitem__, AWQ.scheme(AWQ.config(tensor.scheme, [])))
    )


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([4, 8]), st.booleans(), WIDTHS, WIDTHS, GROUPS, SEEDS)
def test_compressed_tensors_round_trip(
    bits: int, symmetric: bool, out: int, inner: int, group_size: int, seed: int
) -> None:
    tensor = random_tensor(IntScheme(bits, group_size, symmetric), out, inner, seed)
    stored = CT.pack("m", tensor)
    assert ("m.weight_zero_point" in stored) is not symmetric
    assert_same(tensor, CT.unpack("m", stored.__getitem__, CT.scheme(CT.config(tensor.scheme, []))))


def test_awq_nibble_order_by_an_explicit_word() -> None:
    """Eight output channels with codes 0..7 lie in one word as 7 5 3 1 6 4 2 0, highest nibble first."""
    tensor = IntTensor(
        codes=torch.arange(8, dtype=torch.uint8).view(8, 1),
        scales=torch.ones(8, 1, dtype=torch.float16),
        zeros=torch.arange(8, 16, dtype=torch.uint8).view(8, 1),
        scheme=IntScheme(4, 1, False),
    )
    stored = AWQ.pack("m", tensor)
    assert stored["m.qweight"].tolist() == [[0x75316420]]
    assert stored["m.qzeros"].tolist() == [[0xFDB9ECA8 - 2**32]]


def test_compressed_tensors_offset_by_explicit_words() -> None:
    """A weight of zero is the code 8 in four bits and 128 in eight."""
    for bits, word in ((4, 0x88888888), (8, 0x80808080)):
        scheme = IntScheme(bits, -1, True)
        zero = torch.full((1, 8), scheme.middle, dtype=torch.uint8)
        tensor = IntTensor(zero, torch.ones(1, 1), zero[:, :1].clone(), scheme)
        words = CT.pack("m", tensor)["m.weight_packed"]
        assert set(words.flatten().tolist()) == {word - 2**32}
    ramp = torch.arange(8, dtype=torch.uint8).view(1, 8)
    assert pack_words(ramp, 4).tolist() == [[0x76543210]]
    assert torch.equal(
        unpack_words(torch.tensor([[-1]], dtype=torch.int32), 8), ramp[:, :4] * 0 + 255
    )


@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_tensors_library_packs_and_unpacks_the_same(bits: int) -> None:
    tensor = random_tensor(IntScheme(bits, 8, False), 24, 40, seed=3)
    middle = tensor.scheme.middle
    signed = (tensor.codes.int() - middle).to(torch.int8)
    stored = CT.pack("m", tensor)
    assert torch.equal(pack_to_int32(signed, bits), stored["m.weight_packed"])
    assert torch.equal(
        unpack_from_int32(stored["m.weight_packed"], bits, torch.Size(tensor.shape)), signed
    )
    zeros = (tensor.zeros.int() - middle).to(torch.int8)
    assert torch.equal(pack_to_int32(zeros, bits, packed_dim=0), stored["m.weight_zero_point"])


def test_rows_that_another_tool_padded_are_read() -> None:
    """The library pads 12 four-bit codes to two words; we refuse to write that, but read it."""
    signed = torch.randint(-8, 8, (4, 12), dtype=torch.int8)
    stored = {
        "m.weight_packed": pack_to_int32(signed, 4),
        "m.weight_scale": torch.ones(4, 1),
        "m.weight_shape": torch.tensor([4, 12]),
    }
    tensor = CT.unpack("m", stored.__getitem__, IntScheme(4, -1, True))
    assert torch.equal(tensor.codes.int() - 8, signed.int())


def test_widths_that_do_not_pack_are_refused_by_name() -> None:
    with pytest.raises(BadInput, match=r"layers\.1\.gate.*172 outputs"):
        AWQ.check("layers.1.gate", 172, 64, IntScheme(4, 64, False))
    with pytest.raises(BadInput, match=r"layers\.1\.down.*172 inputs"):
        CT.check("layers.1.down", 64, 172, IntScheme(4, -1, True))
    with pytest.raises(BadInput, match="172 outputs"):
        CT.check("layers.1.gate", 172, 64, IntScheme(4, -1, False))
    CT.check("layers.1.gate", 172, 64, IntScheme(4, -1, True))
    CT.check("layers.1.down", 64, 172, IntScheme(8, -1, True))
    with pytest.raises(BadInput, match=r"128 does not divide the 192 inputs of layers\.1\.up"):
        AWQ.check("layers.1.up", 64, 192, IntScheme(4, 128, False))


@pytest.mark.parametrize(("bits", "symmetric"), [(8, False), (4, True)])
def test_awq_holds_four_asymmetric_bits_only(bits: int, symmetric: bool) -> None:
    with pytest.raises(BadInput, match="compressed-tensors"):
        AWQ.check_scheme(IntScheme(bits, 128, symmetric))


def weights_config(**changes: Any) -> dict[str, Any]:
    config = CT.config(IntScheme(4, 128, True), ["lm_head"])
    config["config_groups"]["group_0"]["weights"] |= changes
    return config


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"bits": 4}, "None"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
        ({"quant_method": "awq", "bits": 3}, "3 bits"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero points"),
        (weights_config() | {"format": "float-quantized"}, "float-quantized"),
        (weights_config() | {"kv_cache_scheme": {"num_bits": 8}}, "KV cache"),
        (weights_config(num_bits=3), "3-bit"),
        (weights_config(type="float"), "float"),
        (weights_config(strategy="tensor"), "tensor"),
        (weights_config(actorder="group"), "actorder"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups"),
    ],
)
def test_what_cannot_be_read_is_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        format_of(config).scheme(config)


def test_configs_of_other_tools_are_read() -> None:
    autoawq = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "GEMM",
        "modules_to_not_convert": None,
    }
    assert format_of(autoawq).scheme(autoawq) == IntScheme(4, 128, False)
    channel = weights_config(strategy="channel", group_size=None, num_bits=8)
    assert format_of(channel).scheme(channel) == IntScheme(8, -1, True)


def test_tensors_that_contradict_the_config_are_refused() -> None:
    stored = AWQ.pack("m", random_tensor(IntScheme(4, 8, False), 16, 32, seed=1))
    with pytest.raises(BadInput, match=r"m\.qzeros has shape \(4, 2\)"):
        AWQ.unpack("m", stored.__getitem__, IntScheme(4, 16, False))
