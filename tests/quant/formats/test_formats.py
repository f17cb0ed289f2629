"""Every format with every scheme that it holds: round trips, both readers, golden words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llmopt.base.atomic_io import raw_bytes
from llmopt.base.errors import BadInput
from llmopt.quant.base.scheme import Activations, Scheme
from llmopt.quant.convert.verify import UNPROVEN, verify
from llmopt.quant.formats.registry import (
    FORMATS,
    format_of,
    quantized_modules,
    read_quantized,
    tensor_names,
)
from llmopt.quant.kinds.base.format import pack_words, unpack_words
from llmopt.quant.kinds.base.raw import read_headers
from llmopt.quant.kinds.codebook.scheme import CodebookScheme
from llmopt.quant.kinds.fp4.scheme import Fp4Scheme
from llmopt.quant.kinds.fp8.scheme import FloatScheme
from llmopt.quant.kinds.integer.kind import IntTensor
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.kinds.lookup.scheme import LookupScheme
from llmopt.quant.kinds.registry import format_names
from llmopt.quant.kinds.vectorwise.scheme import VectorwiseScheme

from ...support.format_support import (
    CASES,
    HELD,
    MODULE,
    Tensors,
    assert_same,
    case_id,
    make,
    stored,
    write_checkpoint,
)

AWQ, CT, GPTQ = FORMATS["awq"], FORMATS["compressed-tensors"], FORMATS["gptq"]


def test_every_format_has_cases() -> None:
    assert {*HELD, "gguf"} == {*format_names()}, "tests/quant/gguf has those of GGUF"


@pytest.mark.parametrize(("name", "scheme"), CASES, ids=case_id)
def test_both_readers_give_back_every_part(tmp_path: Path, name: str, scheme: Scheme) -> None:
    """Through a file: what is written, what our reader reads, what the independent one reads."""
    tensor = make(scheme, 64, 1024 if isinstance(scheme, LookupScheme) else 256)
    tensors, config = stored(name, tensor)
    tensors[f"{MODULE}.bias"] = torch.ones(64)
    checkpoint = write_checkpoint(tmp_path, tensors, config)
    assert quantized_modules(checkpoint) == {MODULE}
    assert tensor_names(checkpoint, MODULE) == tensors.keys() - {f"{MODULE}.bias"}
    assert_same(tensor, read_quantized(checkpoint, MODULE))
    raw = FORMATS[name].read_raw(read_headers([tmp_path / "model.safetensors"]), MODULE, config)
    assert raw.shape == tensor.shape
    for part, expected in tensor.parts().items():
        assert raw.parts[part].tobytes() == raw_bytes(expected), part
    report = verify(tmp_path)
    assert (report.failures, report.status) == ([], UNPROVEN)


# Widths that the format can pack: GPTQ wants whole words on both sides, AWQ along the outputs.
MULTIPLES = {"gptq": (32, 32), "awq": (8, 1)}


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(CASES), st.integers(1, 12), st.integers(1, 40), st.integers(0, 2**31))
def test_round_trips_of_odd_shapes(
    case: tuple[str, Scheme], height: int, width: int, seed: int
) -> None:
    name, scheme = case
    rows, columns = MULTIPLES.get(name, (1, 1))
    group = getattr(scheme, "group_size", -1)
    if isinstance(scheme, Fp4Scheme):
        group = scheme.block_size
    inner = width * max(columns, group)
    out = height * rows
    if scheme.activations is not None and scheme.activations.granularity == "group128":
        inner *= 128  # readers quantize activations in whole groups only
    if isinstance(scheme, CodebookScheme) and out * inner % 2:
        inner += 1  # two codes to a byte
    tensor = make(scheme, out, inner, seed, torch.float32 if name == "fp8" else torch.float16)
    tensors, config = stored(name, tensor)
    read = FORMATS[name].unpack(MODULE, tensors, config)
    if getattr(scheme, "permuted", False) and not read.scheme.permuted:
        return  # a random order that left every channel in its group
    assert_same(tensor, read)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([2, 3, 4, 5, 6, 8]), st.integers(1, 100), st.integers(0, 2**31))
def test_words_are_one_stream_of_bits(bits: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (3, count), generator=generator, dtype=torch.uint8)
    words = pack_words(codes, bits)
    for row, packed in zip(codes.tolist(), words.tolist(), strict=True):
        stream = sum(code << (bits * index) for index, code in enumerate(row))
        assert sum((word % 2**32) << (32 * index) for index, word in enumerate(packed)) == stream
    assert torch.equal(unpack_words(words, bits)[:, :count], codes)


@pytest.mark.parametrize(
    ("bits", "first", "second"),
    [
        (2, 0x55555555, 0xAAAAAAAA),
        (4, 0x77777777, 0x88888888),
        (8, 0x7F7F7F7F, 0x80808080),
    ],
)
def test_golden_zero_words_of_gptq(bits: int, first: int, second: int) -> None:
    """Symmetric weights are written as version 1; both versions are read, whatever the label says."""
    tensor = make(IntScheme(bits, 32, True), 32, 64)
    tensors, config = stored("gptq", tensor)
    assert config["checkpoint_format"] == "gptq"
    words = tensors[f"{MODULE}.qzeros"]
    assert {word % 2**32 for word in words.flatten().tolist()} == {first}
    tensors[f"{MODULE}.qzeros"] = torch.full_like(words, second - 2**32)
    assert_same(tensor, GPTQ.unpack(MODULE, tensors, config))
    assert_same(tensor, GPTQ.unpack(MODULE, tensors, config | {"checkpoint_format": "gptq_v2"}))


def test_three_bit_zero_codes_of_gptq_in_both_versions() -> None:
    """A dense stream of 3s, or of 4s, has words of three kinds."""
    tensor = make(IntScheme(3, 32, True), 32, 64)
    tensors, config = stored("gptq", tensor)
    for version, code in (("gptq", 3), ("gptq_v2", 4)):
        stream = sum(code << (3 * index) for index in range(32))
        expected = [(stream >> shift) % 2**32 for shift in (0, 32, 64)]
        if version == "gptq":
            assert [word % 2**32 for word in tensors[f"{MODULE}.qzeros"][0].tolist()] == expected
        signed = [word - 2**32 if word >= 2**31 else word for word in expected]
        tensors[f"{MODULE}.qzeros"] = torch.tensor([signed, signed], dtype=torch.int32)
        assert_same(tensor, GPTQ.unpack(MODULE, tensors, config))


def test_asymmetric_zero_codes_of_gptq_follow_the_label() -> None:
    tensor = make(IntScheme(4, 32, False), 32, 64)
    tensors, config = stored("gptq", tensor)
    assert config["checkpoint_format"] == "gptq_v2"
    assert_same(tensor, GPTQ.unpack(MODULE, tensors, config))
    read = GPTQ.unpack(MODULE, tensors, config | {"checkpoint_format": "gptq"})
    assert isinstance(read, IntTensor) and isinstance(tensor, IntTensor)
    assert torch.equal(read.zeros, (tensor.zeros + 1) & 15)


def test_gptq_lies_transposed_with_the_first_channel_in_the_lowest_bits() -> None:
    tensor = IntTensor(
        codes=torch.arange(8, dtype=torch.uint8).repeat(4).view(1, 32).repeat(32, 1),
        scales=torch.ones(32, 1, dtype=torch.float16),
        zeros=torch.full((32, 1), 8, dtype=torch.uint8),
        scheme=IntScheme(4, -1, True),
    )
    tensors, _ = stored("gptq", tensor)
    assert tensors[f"{MODULE}.qweight"].shape == (4, 32)
    assert set(tensors[f"{MODULE}.qweight"].flatten().tolist()) == {0x76543210}
    assert tensors[f"{MODULE}.g_idx"].tolist() == [0] * 32


def test_awq_nibble_order_by_an_explicit_word() -> None:
    """Eight output channels with codes 0..7 lie in one word as 7 5 3 1 6 4 2 0, highest nibble first."""
    tensor = IntTensor(
        codes=torch.arange(8, dtype=torch.uint8).view(8, 1),
        scales=torch.ones(8, 1, dtype=torch.float16),
        zeros=torch.arange(8, 16, dtype=torch.uint8).view(8, 1),
        scheme=IntScheme(4, 1, False),
    )
    tensors = AWQ.pack("m", tensor)
    assert tensors["m.qweight"].tolist() == [[0x75316420]]
    assert tensors["m.qzeros"].tolist() == [[0xFDB9ECA8 - 2**32]]


def test_compressed_tensors_offset_by_explicit_words() -> None:
    """A weight of zero is the code 8 in four bits and 128 in eight."""
    for bits, word in ((4, 0x88888888), (8, 0x80808080)):
        scheme = IntScheme(bits, -1, True)
        zero = torch.full((1, 8), scheme.middle, dtype=torch.uint8)
        tensor = IntTensor(zero, torch.ones(1, 1), zero[:, :1].clone(), scheme)
        words = CT.pack("m", tensor)["m.weight_packed"]
        assert set(words.flatten().tolist()) == {word - 2**32}


def test_bitsandbytes_puts_the_first_code_into_the_high_nibble() -> None:
    tensor = make(CodebookScheme("nf4"), 2, 64)
    tensors, _ = stored("bitsandbytes", tensor)
    first = tensor.parts()["codes"].flatten().tolist()
    assert tensors[f"{MODULE}.weight"].shape == (64, 1)
    assert int(tensors[f"{MODULE}.weight"][0]) == first[0] * 16 + first[1]
    # The table of bitsandbytes.functional.get_4bit_type("nf4").
    assert [round(value, 7) for value in tensors[f"{MODULE}.weight.quant_map"].tolist()] == [
        *(-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.09105, 0.0),
        *(0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.562617, 0.7229568, 1.0),
    ]


@pytest.mark.parametrize(
    ("name", "scheme", "words"),
    [
        ("awq", IntScheme(8, 128, False), "4-bit weights only"),
        ("awq", IntScheme(4, 128, True), "no symmetric form"),
        ("awq", IntScheme(4, 128, False, Activations("int8")), "cannot hold"),
        ("gptq", IntScheme(5, 128, True), "2, 3, 4 or 8 bits"),
        ("gptq", IntScheme(8, -1, True, Activations("int8")), "does not quantize activations"),
        ("compressed-tensors", IntScheme(4, 32, True, permuted=True), "permuted"),
        ("compressed-tensors", IntScheme(4, 32, True, Activations("int8")), "cannot hold"),
        ("fp8", FloatScheme("channel"), "use --format compressed-tensors"),
        *((name, CodebookScheme("nf4"), "cannot hold|only") for name in HELD if name[0] != "b"),
        ("bitsandbytes", IntScheme(4, 64, True), "only nf4, fp4"),
        ("squeezellm", VectorwiseScheme(), "only look-up tables"),
    ],
)
def test_schemes_that_a_format_cannot_hold(name: str, scheme: Scheme, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        FORMATS[name].check_scheme(scheme)


def test_widths_that_do_not_pack_are_refused_by_name() -> None:
    with pytest.raises(BadInput, match=r"layers\.1\.gate.*172 outputs"):
        AWQ.check("layers.1.gate", 172, 64, IntScheme(4, 64, False))
    with pytest.raises(BadInput, match=r"layers\.1\.gate.*172 outputs"):
        GPTQ.check("layers.1.gate", 172, 64, IntScheme(4, 64, True))
    with pytest.raises(BadInput, match=r"layers\.1\.down.*172 inputs"):
        GPTQ.check("layers.1.down", 64, 172, IntScheme(4, -1, True))
    with pytest.raises(BadInput, match=r"7 × 3 weights"):
        FORMATS["bitsandbytes"].check("m", 7, 3, CodebookScheme("nf4"))
    for name, symmetric in (("awq", False), ("gptq", True), ("compressed-tensors", True)):
        with pytest.raises(BadInput, match=r"128 does not divide the 192 inputs of layers\.1\.up"):
            FORMATS[name].check("layers.1.up", 64, 192, IntScheme(4, 128, symmetric))


def weights_config(**changes: Any) -> dict[str, Any]:
    config = CT.config({MODULE: IntScheme(4, 128, True)}, ["lm_head"])
    config["config_groups"]["group_0"]["weights"] |= changes
    return config


def group_config(**changes: Any) -> dict[str, Any]:
    config = weights_config()
    config["config_groups"]["group_0"] |= changes
    return config


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "hqq", "bits": 4}, "hqq"),
        ({"bits": 4}, "None"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv_fast"}, "gemv_fast"),
        ({"quant_method": "awq", "bits": 3}, "3 bits"),
        ({"quant_method": "gptq", "bits": 5}, "5 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:(": {}}}, "no regular expression"),
        (weights_config() | {"format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
        (weights_config(num_bits=7), "7-bit"),
        (weights_config(type="float"), "float"),
        (weights_config(strategy="tensor"), "tensor"),
        (weights_config() | {"format": "int-quantized"}, "4-bit int weights"),
        (group_config(input_activations={"num_bits": 4, "strategy": "token"}), "activations"),
        (group_config(output_activations={"num_bits": 8}), "quantized outputs"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "64"),
        ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "int4"}, "int4"),
        ({"quant_method": "bitsandbytes", "bnb_4bit_quant_storage": "bfloat16"}, "as floats"),
        ({"quant_method": "squeezellm"}, "without bits"),
    ],
)
def test_what_cannot_be_read_is_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words) as error:
        format_of(config).scheme(config, MODULE)
    assert "\n" not in str(error.value)


def test_mixed_schemes_of_gptq() -> None:
    base, other = IntScheme(4, 32, True), IntScheme(8, -1, True)
    schemes: dict[str, Scheme] = {
        f"model.layers.{layer}.self_attn.{name}_proj": other if (layer, name) == (1, "q") else base
        for layer in range(12)
        for name in "qkvo"
    }
    skipped = "model.layers.1.mlp.down_proj"
    config = GPTQ.config(schemes, ["lm_head", skipped])
    assert config["bits"] == 4
    assert {name: GPTQ.scheme(config, name) for name in schemes} == schemes
    assert next(iter(config["dynamic"])) == r"-:^model\.layers\.1\.mlp\.down_proj$"
    # vLLM asks for the fused name.
    assert GPTQ.scheme(config, "model.layers.1.self_attn.qkv_proj") == other
    with pytest.raises(BadInput, match="symmetric or none"):
        GPTQ.config({"a": base, "b": IntScheme(4, 32, False)}, [])


def test_mixed_schemes_of_compressed_tensors() -> None:
    schemes: dict[str, Scheme] = {
        f"model.layers.0.mlp.{index}": scheme for index, scheme in enumerate(HELD[CT.name])
    }
    config = CT.config(schemes, ["lm_head"])
    assert config["format"] == "mixed-precision"
    assert {name: CT.scheme(config, name) for name in schemes} == schemes
    one_layout = CT.config({"a": IntScheme(4, 32, True), "b": IntScheme(8, 32, True)}, [])
    assert one_layout["format"] == "pack-quantized"
    assert all("format" not in group for group in one_layout["config_groups"].values())
    with pytest.raises(BadInput, match="no entry of config_groups is for c"):
        CT.scheme(one_layout, "c")


@pytest.mark.parametrize("name", ["awq", "fp8", "bitsandbytes", "squeezellm"])
def test_other_formats_hold_one_scheme(name: str) -> None:
    schemes: dict[str, Scheme] = {
        str(index): scheme for index, scheme in enumerate([*HELD[name], LookupScheme(2)])
    }
    with pytest.raises(BadInput):
        FORMATS[name].config(schemes, [])


def test_scales_of_a_cache_are_reported_and_tolerated() -> None:
    config = CT.full_config({MODULE: IntScheme(4, 128, True)}, [], "fp8")
    assert config["kv_cache_scheme"]["type"] == "float"
    assert CT.scheme(config, MODULE) == IntScheme(4, 128, True)


def test_groups_by_an_index_are_read_from_older_compressed_tensors() -> None:
    tensor = make(IntScheme(4, 32, True, permuted=True), 8, 64)
    assert isinstance(tensor, IntTensor) and tensor.group_index is not None
    plain = IntTensor(tensor.codes, tensor.scales, tensor.zeros, IntScheme(4, 32, True))
    tensors = Tensors(CT.pack(MODULE, plain)) | {f"{MODULE}.weight_g_idx": tensor.group_index}
    config = weights_config(group_size=32, actorder="group")
    assert_same(tensor, CT.unpack(MODULE, Tensors(tensors), config))
