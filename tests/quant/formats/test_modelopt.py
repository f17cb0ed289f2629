"""ModelOpt's checkpoints: explicit bytes, its two configs, foreign spellings, and conversion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.quant.base.scheme import Activations
from llmopt.quant.check.coverage import skipped_by
from llmopt.quant.convert.convert import convert
from llmopt.quant.convert.verify import PROVEN, verify
from llmopt.quant.formats.modelopt import ALGORITHMS, HF_QUANT_CONFIG, hf_quant_config
from llmopt.quant.formats.registry import FORMATS, read_quantized
from llmopt.quant.kinds.codebook.scheme import CodebookScheme
from llmopt.quant.kinds.fp4.kind import Fp4Tensor
from llmopt.quant.kinds.fp4.scheme import Fp4Scheme
from llmopt.quant.kinds.fp8.scheme import FloatScheme
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest
from llmopt.recipes import MODELS

from ...support.format_support import MODULE, assert_same, make, stored, write_checkpoint

MODELOPT: Any = FORMATS["modelopt"]


def test_explicit_bytes_of_nvfp4() -> None:
    """The even column is in the low nibble, and the scale of the weight is a multiplier."""
    tensor = Fp4Tensor(
        codes=torch.arange(16, dtype=torch.uint8).view(1, 16),
        scales=torch.tensor([[3.5]]).to(torch.float8_e4m3fn),
        scheme=ALGORITHMS["NVFP4"],  # pyright: ignore[reportArgumentType]
        global_scale=torch.tensor([8.0]),
        input_scale=torch.tensor([0.25]),
    )
    packed = MODELOPT.pack("m", tensor)
    assert packed["m.weight"].tolist() == [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]]
    assert float(packed["m.weight_scale_2"]) == 0.125 and packed["m.weight_scale_2"].dim() == 0
    assert float(packed["m.input_scale"]) == 4 and float(packed["m.weight_scale"]) == 3.5
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = [value * 3.5 / 8 for value in (*values, *(-value for value in values))]
    assert tensor.dequantize()[0].tolist() == expected


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_both_configs_say_the_same(algorithm: str) -> None:
    scheme = ALGORITHMS[algorithm]
    config = MODELOPT.full_config({MODULE: scheme}, ["lm_head"], "fp8")
    legacy = hf_quant_config(config)
    assert config["quant_algo"] == legacy["quantization"]["quant_algo"] == algorithm
    assert config["ignore"] == legacy["quantization"]["exclude_modules"] == ["lm_head"]
    assert legacy["quantization"]["kv_cache_quant_algo"] == "FP8"
    for given in (config, {"quant_method": "modelopt", **legacy}):
        assert MODELOPT.scheme(given, MODULE) == scheme


def test_mixed_algorithms_are_found_by_module_or_what_it_lies_in() -> None:
    schemes = {"a.mlp.up": ALGORITHMS["NVFP4"], "a.attn.o": ALGORITHMS["FP8"]}
    config = MODELOPT.config(schemes, [])
    assert config["quant_algo"] == "MIXED_PRECISION"
    for given in (config, hf_quant_config(config)):
        assert {name: MODELOPT.scheme(given, name) for name in schemes} == schemes
    layers = {"a.mlp.experts": {"quant_algo": "nvfp4", "group_size": 16}}
    given = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    assert MODELOPT.scheme(given, "a.mlp.experts.3.w1") == ALGORITHMS["NVFP4"]
    with pytest.raises(BadInput, match=r"no entry of quantized_layers is for a\.attn\.o"):
        MODELOPT.scheme(given, "a.attn.o")


def test_weight_only_groups_of_nvfp4_are_w4a16() -> None:
    config = MODELOPT.config({MODULE: Fp4Scheme("nvfp4")}, []) | {"quant_algo": "NVFP4"}
    assert MODELOPT.scheme(config, MODULE) == ALGORITHMS["W4A16_NVFP4"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_algo": "W4A8_AWQ"}, "quant_algo W4A8_AWQ is not supported: only FP8"),
        ({"quant_algo": "NVFP4", "group_size": 32}, "in groups of 32 is not supported"),
        ({}, "quant_algo NONE is not supported"),
    ],
    ids=str,
)
def test_other_algorithms_are_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        MODELOPT.scheme(config, MODULE)


def test_schemes_without_an_algorithm_are_refused() -> None:
    for scheme in (CodebookScheme("nf4"), Fp4Scheme("mxfp4"), FloatScheme("tensor")):
        with pytest.raises(BadInput, match="format modelopt cannot hold"):
            MODELOPT.check_scheme(scheme)
    with pytest.raises(BadInput, match=f"{MODULE} has 40 inputs, and nvfp4 takes multiples of 16"):
        MODELOPT.check(MODULE, 8, 40, Fp4Scheme("nvfp4"))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_damaged_global_scale_is_named(tmp_path: Path, value: float) -> None:
    tensors, config = stored("modelopt", make(Fp4Scheme("nvfp4"), 8, 32))
    tensors[f"{MODULE}.weight_scale_2"] = torch.tensor(value)
    checkpoint = write_checkpoint(tmp_path, tensors, config)
    with pytest.raises(BadInput, match=r"weight_scale_2 is .*a scale is a positive number"):
        read_quantized(checkpoint, MODULE)
    assert not verify(tmp_path).ok


def test_nan_among_block_scales_fails_verification(tmp_path: Path) -> None:
    for number, (kind, byte) in enumerate((("nvfp4", 127), ("mxfp4", 255))):
        tensors, config = stored("compressed-tensors", make(Fp4Scheme(kind), 8, 64))  # pyright: ignore[reportArgumentType]
        tensors[f"{MODULE}.weight_scale"].view(torch.uint8)[1, 0] = byte
        write_checkpoint(tmp_path / str(number), tensors, config)
        assert verify(tmp_path / str(number)).failures == [f"{MODULE} has scales that are NaN"]


def test_the_older_config_alone_is_read(tmp_path: Path) -> None:
    tensor = make(ALGORITHMS["NVFP4"], 16, 64)
    tensors, config = stored("modelopt", tensor)
    write_checkpoint(tmp_path, tensors, config)
    plain = {"model_type": "single_linear"}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    assert Checkpoint(tmp_path).quantization_config is None
    (tmp_path / HF_QUANT_CONFIG).write_text(json.dumps(hf_quant_config(config)))
    assert_same(tensor, read_quantized(Checkpoint(tmp_path), MODULE))
    assert verify(tmp_path).ok


def test_excluded_modules_may_be_wildcards() -> None:
    fields = {"exclude_modules": ["lm_head", "model.layers.0*"]}
    skipped = skipped_by({"quant_method": "modelopt", "quantization": fields})
    names = ("lm_head", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj")
    assert [skipped(name) for name in names] == [True, True, False]


def test_a_model_goes_to_modelopt_and_back_without_a_change(tmp_path: Path) -> None:
    """W4A4 with scales of a KV cache: names, both configs, and every part of every linear."""
    request = QuantizeRequest(
        MODELS / "stories260K",
        tmp_path / "ct",
        method="nvfp4",
        activations="static",
        ignore=("down_proj",),
        kv_cache="fp8",
        num_samples=2,
        seq_len=8,
    )
    quantize(request)
    convert(Checkpoint(tmp_path / "ct"), "modelopt", tmp_path / "mo")
    there = Checkpoint(tmp_path / "mo")
    assert "model.layers.0.self_attn.k_proj.k_scale" in there
    written = json.loads((tmp_path / "mo" / HF_QUANT_CONFIG).read_text())["quantization"]
    assert (written["quant_algo"], written["kv_cache_quant_algo"]) == ("NVFP4", "FP8")
    assert "model.layers.0.mlp.down_proj" in written["exclude_modules"]
    convert(there, "compressed-tensors", tmp_path / "back")
    first, last = Checkpoint(tmp_path / "ct"), Checkpoint(tmp_path / "back")
    assert first.names == last.names
    assert first.quantization_config == last.quantization_config
    for name in first.names:
        ours, theirs = first.tensor(name), last.tensor(name)
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), name
    for folder in ("ct", "mo", "back"):
        report = verify(tmp_path / folder)
        assert (report.failures, report.status) == ([], PROVEN)
    globals_of = [
        float(first.tensor(f"model.layers.1.self_attn.{name}_proj.weight_global_scale"))
        for name in "qkv"
    ]
    assert len(set(globals_of)) == 1


def test_fp8_blocks_lose_their_activations_only_when_allowed(tmp_path: Path) -> None:
    tensor = make(FloatScheme("block", Activations("fp8", "group128")), 128, 256)
    tensors, config = stored("compressed-tensors", tensor)
    write_checkpoint(tmp_path / "ct", tensors, config)
    with pytest.raises(BadInput, match="format modelopt cannot hold"):
        convert(Checkpoint(tmp_path / "ct"), "modelopt", tmp_path / "no")
    convert(Checkpoint(tmp_path / "ct"), "modelopt", tmp_path / "out", allow_loss=True)
    read = read_quantized(Checkpoint(tmp_path / "out"), MODULE)
    assert read.scheme == FloatScheme("block")
    assert torch.equal(read.dequantize(), tensor.dequantize())
