"""A reader consumes or refuses: what it does not read of a config or of a linear's tensors is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.cli.main import run_guarded
from llmopt.quant.base.consumed import Consumed
from llmopt.quant.convert.convert import convert
from llmopt.quant.convert.plain import PLAIN
from llmopt.quant.convert.verify import verify
from llmopt.quant.formats.modelopt import ALGORITHMS, HF_QUANT_CONFIG, hf_quant_config
from llmopt.quant.formats.registry import FORMATS, quantized_modules, read_quantized
from llmopt.quant.kinds.fp4.formats import METHOD, check_mxfp4
from llmopt.quant.model.checkpoint import Checkpoint
from transformers import (
    AwqConfig,
    BitsAndBytesConfig,
    FineGrainedFP8Config,
    GPTQConfig,
)
from transformers.utils.quantization_config import Mxfp4Config

from ...support.format_support import (
    HELD,
    MODULE,
    assert_same,
    make,
    stored,
    write_checkpoint,
)

INT8, FP8_BLOCK, NVFP4 = (
    HELD["compressed-tensors"][24],
    HELD["fp8"][0],
    ALGORITHMS["NVFP4"],
)
BNB_INT8 = HELD["bitsandbytes"][-1]


def written(
    folder: Path,
    name: str,
    scheme: Any = None,
    keys: dict[str, Any] | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
) -> Checkpoint:
    """A checkpoint of one linear, with further keys in its config and further tensors."""
    parts, config = stored(name, make(scheme or HELD[name][0], 64, 128))
    return write_checkpoint(folder, parts | (tensors or {}), config | (keys or {}))


@pytest.mark.parametrize("name", HELD)
def test_an_unknown_key_is_refused_by_every_reader(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    scheme = HELD[name][0]
    plain = written(tmp_path / "plain", name, scheme)
    assert quantized_modules(plain) == {MODULE}
    odd = written(tmp_path / "odd", name, scheme, {"row_order": "shuffled"})
    for read in (lambda: quantized_modules(odd), lambda: verify(odd.folder)):
        with pytest.raises(BadInput, match="row_order"):
            read()
    output = tmp_path / "out"
    code = run_guarded(lambda: convert(odd, PLAIN, output), debug=False)
    assert (code, output.exists()) == (2, False)
    err = capsys.readouterr().err.strip()
    assert "row_order" in err and "\n" not in err


def test_every_format_is_among_them() -> None:
    assert {*HELD, "gguf"} == {*FORMATS}  # a GGUF file's config is made from its header


def test_mxfp4_refuses_an_unknown_key() -> None:
    check_mxfp4(
        {**Mxfp4Config(modules_to_not_convert=["lm_head"]).to_dict(), "quant_method": METHOD}
    )
    with pytest.raises(BadInput, match="row_order"):
        check_mxfp4({"quant_method": METHOD, "row_order": "shuffled"})


@pytest.mark.parametrize(
    ("name", "scheme", "keys", "named"),
    [
        ("gptq", None, {"rotation": "hadamard"}, "rotation"),
        ("gptq", None, {"adapter": {"rank": 8}}, "adapter"),
        ("gptq", None, {"act_bits": 8}, "act_bits"),
        ("gptq", None, {"pack_dtype": "int16"}, "pack_dtype 'int16'"),
        ("gptq", None, {"dynamic": {"+:.*up": {"outliers": 4}}}, r"dynamic\..*outliers"),
        ("awq", None, {"spinquant_config": {"r4": True}}, "spinquant_config"),
        ("awq", None, {"dynamic": {"+:.*up": {"bits": 8}}}, "dynamic"),
        ("fp8", FP8_BLOCK, {"fmt": "e5m2"}, "fmt 'e5m2'"),
        ("fp8", FP8_BLOCK, {"expert_dtype": "fp4"}, "expert_dtype 'fp4'"),
        ("fp8", FP8_BLOCK, {"activation_scheme": "per_head"}, "activation_scheme 'per_head'"),
        ("compressed-tensors", None, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity"),
        ("compressed-tensors", None, {"moe_sparsity_config": {"layers": [0]}}, "moe_sparsity"),
        ("compressed-tensors", None, {"fp8_dtype_flavor": "gaudi2"}, "fp8_dtype_flavor"),
        ("compressed-tensors", None, {"config_groups": {"W4A16": ["Linear"]}}, "config_groups.W4A16"),
        ("modelopt", NVFP4, {"config_groups": {"g": {"pre_quant_scale": True}}}, "pre_quant_scale"),
        ("modelopt", NVFP4, {"config_groups": {"g": {"lora_rank": 32}}}, "lora_rank"),
        ("fp8", FP8_BLOCK, {"fmt": "e4m3fnuz"}, "fmt 'e4m3fnuz'"),
        ("quip", None, {"rescale_WH": True}, "rescale_WH"),
    ],
)  # fmt: skip
def test_keys_that_change_the_weights_are_refused(
    tmp_path: Path, name: str, scheme: Any, keys: dict[str, Any], named: str
) -> None:
    with pytest.raises(BadInput, match=named):
        quantized_modules(written(tmp_path, name, scheme, keys))


@pytest.mark.parametrize("part", ["weights", "input_activations"])
def test_keys_inside_a_group_are_read_too(tmp_path: Path, part: str) -> None:
    tensors, config = stored("compressed-tensors", make(INT8, 64, 128))
    config["config_groups"]["group_0"][part]["zero_rows"] = [3]
    with pytest.raises(BadInput, match=rf"config_groups\.group_0\.{part}\.zero_rows"):
        quantized_modules(write_checkpoint(tmp_path, tensors, config))


def test_the_older_config_of_modelopt_is_read_too(tmp_path: Path) -> None:
    tensors, config = stored("modelopt", make(NVFP4, 64, 128))
    write_checkpoint(tmp_path, tensors, config)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "single_linear"}))
    older = hf_quant_config(config)
    for extra, named in (({"has_zero_point": False}, ""), ({"pre_quant_scale": True}, "pre_quant")):
        facts = {**older, "quantization": older["quantization"] | extra}
        (tmp_path / HF_QUANT_CONFIG).write_text(json.dumps(facts))
        if not named:
            assert quantized_modules(Checkpoint(tmp_path)) == {MODULE}
            continue
        with pytest.raises(BadInput, match=named):
            quantized_modules(Checkpoint(tmp_path))


def test_transforms_of_weights_alone_are_in_the_weights(tmp_path: Path) -> None:
    """SpinQuant's R1 and R2: both sides are fused, the config is kept as a record."""

    def transform(*locations: str) -> dict[str, Any]:
        apply = [
            {"targets": ["Linear"], "location": at, "inverse": False, "ignore": []}
            for at in locations
        ]
        scheme = {"type": "hadamard", "apply": apply, "randomize": False, "requires_grad": False}
        return {"transform_config": {"config_groups": {"R": {**scheme, "head_dim": 64}}}}

    offline = transform("weight_output", "weight_input")
    assert quantized_modules(written(tmp_path / "r1", "compressed-tensors", None, offline))
    for location in ("input", "output", "q_attn", "k_cache"):
        online = transform("weight_input", location)
        with pytest.raises(BadInput, match=f"transform_config: R transforms the {location}"):
            quantized_modules(written(tmp_path / location, "compressed-tensors", None, online))


@pytest.mark.parametrize(
    ("name", "scheme", "keys"),
    [
        ("gptq", None, GPTQConfig(bits=2, tokenizer="gpt2", dataset=["a"], meta={"x": 1}).to_dict()),
        ("awq", None, AwqConfig(modules_to_not_convert=["lm_head"], group_size=32).to_dict()),
        ("fp8", FP8_BLOCK, FineGrainedFP8Config(modules_to_not_convert=["lm_head"]).to_dict()),
        ("bitsandbytes", None, BitsAndBytesConfig(load_in_4bit=True).to_dict()),
        ("bitsandbytes", BNB_INT8, BitsAndBytesConfig(load_in_8bit=True).to_dict()),
    ],
)  # fmt: skip
def test_all_that_transformers_writes_is_read(
    tmp_path: Path, name: str, scheme: Any, keys: dict[str, Any]
) -> None:
    keys = json.loads(json.dumps(keys, default=str))
    keys.pop("group_size", None)
    assert keys["quant_method"] == name
    assert quantized_modules(written(tmp_path, name, scheme, keys)) == {MODULE}


DENSE = {"format": "dense", "global_sparsity": 0.1, "sparsity_structure": "unstructured"}
AUTO_ROUND = {"act_bits": 16, "act_data_type": "float", "act_dynamic": True, "act_group_size": 128}


@pytest.mark.parametrize(
    ("name", "scheme", "keys"),
    [
        ("compressed-tensors", None, {"sparsity_config": {**DENSE, "targets": []}}),
        ("fp8", FP8_BLOCK, {"fmt": "float8_e4m3fn", "scale_fmt": "ue8m0", "ignored_layers": ["x"]}),
        ("gptq", None, {"provider": "auto-round", "autoround_version": "0.4.2"} | AUTO_ROUND),
        ("gptq", None, {"pack_dtype": "int32", "meta": {"quantizer": ["gptqmodel:5"]}, "method": "gptq"}),
        ("awq", None, {"modules_to_fuse": {"mlp": ["up"]}, "dynamic": {"-:.*gate$": {}}}),
        ("exl3", None, {"calibration": {"rows": 250, "cols": 2048}, "mtp_bits": 4}),
    ],
)  # fmt: skip
def test_what_other_tools_write_is_read(
    tmp_path: Path, name: str, scheme: Any, keys: dict[str, Any]
) -> None:
    """Llama-3.1-W8A8 of Red Hat, MiniMax-M2, Intel's and ModelCloud's int4, AutoAWQ's fused, exllamav3's."""
    assert quantized_modules(written(tmp_path, name, scheme, keys)) == {MODULE}


@pytest.mark.parametrize(
    ("name", "scheme", "extra"),
    [
        ("modelopt", NVFP4, f"{MODULE}.pre_quant_scale"),
        ("modelopt", NVFP4, f"{MODULE}.svdquant_lora_a"),
        ("compressed-tensors", None, f"{MODULE}.R4_input.weight"),
        ("gptq", None, f"{MODULE}.lora_A.weight"),
        ("awq", None, f"{MODULE}.channel_scale"),
    ],
)
def test_a_further_tensor_of_a_linear_is_refused(
    tmp_path: Path, name: str, scheme: Any, extra: str
) -> None:
    checkpoint = written(tmp_path / "a", name, scheme, tensors={extra: torch.ones(4)})
    with pytest.raises(BadInput, match=extra):
        convert(checkpoint, PLAIN, tmp_path / "out")
    for fine in (f"{MODULE}.bias", "model.layers.0.self_attn.k_scale"):
        other = written(tmp_path / fine, name, scheme, tensors={fine: torch.ones(1)})
        assert quantized_modules(other) == {MODULE}


def test_fused_experts_with_codes_are_refused(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    codes = torch.ones(2, 64, 32).to(torch.float8_e4m3fn)
    fused = {name: codes, f"{name}_scale_inv": torch.ones(2, 1, 1)}
    checkpoint = written(tmp_path / "a", "fp8", FP8_BLOCK, tensors=fused)
    with pytest.raises(BadInput, match=rf"{name} holds F8_E4M3 codes of shape \(2, 64, 32\)"):
        convert(checkpoint, PLAIN, tmp_path / "out")
    bare = written(tmp_path / "b", "fp8", FP8_BLOCK)
    (tmp_path / "b" / "config.json").write_text(json.dumps({"model_type": "single_linear"}))
    with pytest.raises(BadInput, match="no quantization_config that says what they mean"):
        quantized_modules(Checkpoint(bare.folder))


@pytest.mark.parametrize(("order", "said"), [(1, "col32"), (2, "col_turing"), (3, "col_ampere")])
def test_tile_orders_of_int8_codes_are_refused(tmp_path: Path, order: int, said: str) -> None:
    tensor = make(BNB_INT8, 64, 128)
    tensors, config = stored("bitsandbytes", tensor)
    rows = write_checkpoint(tmp_path / "rows", tensors, config)
    assert_same(tensor, read_quantized(rows, MODULE))
    tensors[f"{MODULE}.weight_format"] = torch.tensor(order, dtype=torch.uint8)
    tiled = write_checkpoint(tmp_path / "tiled", tensors, config)
    with pytest.raises(BadInput, match=rf"{MODULE}\.weight_format: .*{said}"):
        read_quantized(tiled, MODULE)
    (failure,) = verify(tiled.folder).failures
    assert MODULE in failure and said in failure


def test_reading_ticks_off_and_asking_does_not() -> None:
    section = Consumed({"a": 1, "b": {"c": 2, "d": 3}, "off": False, "none": None, "e": [1]})
    assert "a" in section and list(section) == ["a", "b", "off", "none", "e"]
    assert list(section.unread(())) == ["a", "b", "e"]
    assert section["b"].get("c") == 2 and section.get("missing", 5) == 5
    assert list(section.unread(("e",))) == ["a", "b.d"]
    with pytest.raises(BadInput, match=r"the header has a, b\.d, e, which"):
        section.refuse_unread((), "the header")
