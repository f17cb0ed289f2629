"""Checkpoints in these formats, as compressed-tensors and transformers themselves read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam
from llmopt.base.errors import BadInput
from llmopt.quant.base.scheme import Activations, Scheme
from llmopt.quant.formats.registry import FORMATS, quantized_modules, read_quantized
from llmopt.quant.kinds.base.kind import kind_of
from llmopt.quant.kinds.base.tensor import QuantizedTensor
from llmopt.quant.kinds.fp4.kind import global_scale_of
from llmopt.quant.kinds.fp4.scheme import Fp4Scheme
from llmopt.quant.kinds.fp8.scheme import FloatScheme
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.model.checkpoint import Checkpoint
from safetensors.torch import load_file, save_file

from ...support.format_support import (
    CASES,
    HELD,
    MODULE,
    Tensors,
    assert_same,
    case_id,
    make,
    same_bits,
    stored,
)

CT = FORMATS["compressed-tensors"]


@pytest.mark.parametrize("scheme", HELD["compressed-tensors"], ids=case_id)
def test_the_library_decompresses_to_our_values(scheme: Scheme) -> None:
    tensor = make(scheme, 40, 256, scale_dtype=torch.float32)
    tensors, config = stored("compressed-tensors", tensor)
    parsed = QuantizationConfig.model_validate(config)
    group: Any = parsed.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(parsed.format)
    local: dict[str, torch.Tensor | None] = {
        name.removeprefix(f"{MODULE}."): part for name, part in tensors.items()
    }
    assert {"weight_scale"} < set(compressor.compression_param_names(group)) <= set(local)
    weight = compressor.decompress(local, group)["weight"]
    # 4-bit floats are decompressed to bfloat16, everything else to float32.
    assert weight is not None and torch.equal(weight, tensor.dequantize(weight.dtype))


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_the_library_rounds_to_the_same_4_bit_floats(kind: Any) -> None:
    """Its own scales, codes and bytes, from the same weights in bfloat16."""
    scheme = Fp4Scheme(kind)
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(7)) * 0.02
    weight[7] *= 1e-2
    weight = weight.to(torch.bfloat16).float()
    ours = CT.pack("m", kind_of(scheme).round(weight, torch.float32))
    config = CT.config({"m": scheme}, [])
    group: Any = QuantizationConfig.model_validate(config).config_groups["group_0"]
    whole = generate_gparam(weight.min(), weight.max()) if kind == "nvfp4" else None
    blocks = weight.view(24, -1, scheme.block_size)
    scale, _ = calculate_qparams(
        blocks.amin(dim=-1), blocks.amax(dim=-1), group.weights, global_scale=whole
    )
    state = {"weight": weight, "weight_scale": scale}
    if whole is not None:
        torch.testing.assert_close(ours["m.weight_global_scale"], whole, rtol=2.4e-7, atol=0)
        state["weight_global_scale"] = ours["m.weight_global_scale"]
    theirs = BaseCompressor.get_value_from_registry(config["format"]).compress(state, group)
    for name in ("weight_packed", "weight_scale"):
        assert same_bits(ours[f"m.{name}"], theirs[name].detach()), name


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_the_library_packs_the_same_words(bits: int) -> None:
    tensor = make(IntScheme(bits, 8, False), 24, 40)
    middle, parts = 2 ** (bits - 1), tensor.parts()
    words, zero_words = (
        CT.pack("m", tensor)[f"m.{name}"] for name in ("weight_packed", "weight_zero_point")
    )
    signed = (parts["codes"].int() - middle).to(torch.int8)
    assert torch.equal(pack_to_int32(signed, bits), words)
    assert torch.equal(unpack_from_int32(words, bits, torch.Size(tensor.shape)), signed)
    zeros = (parts["zeros"].int() - middle).to(torch.int8)
    assert torch.equal(pack_to_int32(zeros, bits, packed_dim=0), zero_words)


def test_words_of_the_library_before_its_dense_packing_are_read() -> None:
    """Ten 3-bit codes to a word, the last two bits empty, as compressed-tensors did before 0.20."""
    tensor = make(IntScheme(3, 32, True), 8, 64)
    tensors, config = stored("compressed-tensors", tensor)
    codes = torch.nn.functional.pad(tensor.parts()["codes"].int(), (0, 6)).view(8, 7, 10)
    words = sum(codes[..., index] << (3 * index) for index in range(10))
    assert isinstance(words, torch.Tensor)
    tensors[f"{MODULE}.weight_packed"] = words.to(torch.int32)
    assert_same(tensor, CT.unpack(MODULE, tensors, config))


def round_to(scheme: Scheme, weight: torch.Tensor) -> QuantizedTensor:
    static = isinstance(scheme, Fp4Scheme) and scheme.has_static_inputs
    whole = global_scale_of(torch.tensor(6.0)) if static else None
    return kind_of(scheme).round(weight, torch.float32, input_scale=whole)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        tie_word_embeddings=False,
        dtype="float32",
    )
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def quantize_tiny(tiny: Path, folder: Path, name: str, schemes: list[Scheme]) -> Checkpoint:
    """Write the tiny model with the given schemes taken in turn; what does not fit stays as it is."""
    weight_format, tensors = FORMATS[name], Tensors(load_file(tiny / "model.safetensors"))
    used: dict[str, Scheme] = {}
    ignored = ["lm_head"]
    linears = [key.removesuffix(".weight") for key in tensors if "_proj" in key]
    for index, module in enumerate(sorted(linears)):
        scheme, weight = schemes[index % len(schemes)], tensors[f"{module}.weight"]
        try:
            weight_format.check(module, weight.shape[0], weight.shape[1], scheme)
        except BadInput:
            ignored.append(module)
            continue
        used[module] = scheme
        del tensors[f"{module}.weight"]
        tensors |= weight_format.pack(module, round_to(scheme, weight))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((tiny / "config.json").read_text())
    config["quantization_config"] = weight_format.config(used, ignored)
    (folder / "config.json").write_text(json.dumps(config))
    return Checkpoint(folder)


def expected_logits(checkpoint: Checkpoint, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Logits of the plain model whose linears are what our reader makes of the files."""
    from transformers import LlamaConfig, LlamaForCausalLM

    plain = {key: value for key, value in checkpoint.config.items() if "quant" not in key}
    model: Any = LlamaForCausalLM(LlamaConfig(**plain))
    model.to(dtype)
    modules = quantized_modules(checkpoint)
    state = {
        f"{module}.weight": read_quantized(checkpoint, module).dequantize() for module in modules
    }
    state |= {
        name: tensor
        for name, tensor in checkpoint.tensors()
        if name in model.state_dict().keys() - state
    }
    model.load_state_dict(state)
    with torch.no_grad():
        return model(ids).logits.float()


def loaded_logits(folder: Path, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options)
    with torch.no_grad():
        return model(ids).logits.float()


IDS = torch.arange(1, 33).view(1, 32)
INT8 = Activations("int8")
EXACT: dict[str, list[Scheme]] = {
    "pack4": [IntScheme(4, 64, True)],
    "pack8": [IntScheme(8, -1, True)],
    "pack3": [IntScheme(3, 64, True)],
    "fp8-tensor": [FloatScheme("tensor")],
    "fp8-channel": [FloatScheme("channel")],
    "fp8-block": [FloatScheme("block")],
    "mixed": [IntScheme(4, 64, True), FloatScheme("channel"), IntScheme(8, -1, True)],
    "mixed-groups": [IntScheme(4, size, True) for size in (64, 32, 128)],
}
ROUNDED_INPUTS: dict[str, list[Scheme]] = {
    "w8a8": [IntScheme(8, -1, True, INT8)],
    "fp8-token": [FloatScheme("channel", Activations("fp8"))],
    "fp8-block-group": [FloatScheme("block", Activations("fp8", "group128"))],
}


@pytest.mark.parametrize("name", EXACT)
def test_transformers_loads_compressed_tensors(tiny: Path, tmp_path: Path, name: str) -> None:
    checkpoint = quantize_tiny(tiny, tmp_path, "compressed-tensors", EXACT[name])
    expected = expected_logits(checkpoint, IDS, torch.float32)
    assert torch.equal(loaded_logits(tmp_path, IDS), expected)


@pytest.mark.parametrize("name", ROUNDED_INPUTS)
def test_transformers_loads_weights_with_quantized_activations(
    tiny: Path, tmp_path: Path, name: str
) -> None:
    """It quantizes activations too, so the logits are near those of the weights alone, not equal."""
    checkpoint = quantize_tiny(tiny, tmp_path, "compressed-tensors", ROUNDED_INPUTS[name])
    expected = expected_logits(checkpoint, IDS, torch.float32)
    found = loaded_logits(tmp_path, IDS)
    assert 0 < float((found - expected).norm() / expected.norm()) < 0.06


@pytest.mark.parametrize(
    "scheme", [s for s in HELD["compressed-tensors"] if isinstance(s, Fp4Scheme)], ids=case_id
)
def test_transformers_loads_4_bit_floats_in_bfloat16(
    tiny: Path, tmp_path: Path, scheme: Fp4Scheme
) -> None:
    """The library decompresses them to bfloat16, whatever the dtype of the model."""
    from transformers import AutoModelForCausalLM

    checkpoint = quantize_tiny(tiny, tmp_path, "compressed-tensors", [scheme])
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.no_grad():
        found = model(IDS).logits.float()  # the first call decompresses
    for module in quantized_modules(checkpoint):
        ours = read_quantized(checkpoint, module).dequantize(torch.bfloat16)
        assert torch.equal(model.get_submodule(module).weight, ours), module
    expected = expected_logits(checkpoint, IDS, torch.bfloat16)
    rounded = float((found - expected).norm() / expected.norm())
    assert rounded < 0.02 if scheme.activations is None else 0.02 < rounded < 0.4
    with pytest.raises(RuntimeError, match="same dtype"):
        loaded_logits(tmp_path, IDS)


def test_transformers_loads_asymmetric_codes_when_asked(tiny: Path, tmp_path: Path) -> None:
    from transformers import CompressedTensorsConfig

    checkpoint = quantize_tiny(tiny, tmp_path, "compressed-tensors", [IntScheme(4, 64, False)])
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    expected = expected_logits(checkpoint, IDS, torch.float32)
    assert torch.equal(loaded_logits(tmp_path, IDS, **options), expected)


def test_transformers_loads_fp8(tiny: Path, tmp_path: Path) -> None:
    """Without a GPU for it, transformers dequantizes the weights to bfloat16, and computes in that."""
    pytest.importorskip("accelerate")
    scheme = FloatScheme("block", Activations("fp8", "group128"))
    checkpoint = quantize_tiny(tiny, tmp_path, "fp8", [scheme])
    expected = expected_logits(checkpoint, IDS, torch.bfloat16)
    found = loaded_logits(tmp_path, IDS)
    assert float((found - expected).norm() / expected.norm()) < 0.02


@pytest.mark.parametrize(
    "scheme",
    [scheme for name, scheme in CASES if name == "bitsandbytes"],
    ids=case_id,
)
def test_transformers_loads_bitsandbytes(tiny: Path, tmp_path: Path, scheme: Scheme) -> None:
    pytest.importorskip("bitsandbytes")
    checkpoint = quantize_tiny(tiny, tmp_path, "bitsandbytes", [scheme])
    expected = expected_logits(checkpoint, IDS, torch.float32)
    found = loaded_logits(tmp_path, IDS)
    assert float((found - expected).norm() / expected.norm()) < 0.03
