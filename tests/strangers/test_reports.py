"""Public reports of wrong numbers in other readers, rebuilt as files for ours.

| report | the fault there |
| --- | --- |
| transformers#47145 | a `frozen` fp8 checkpoint of compressed-tensors is loaded without its scales |
| vllm#38966 | GPTQModel labels zero points of version 2 as version 1 |
| sglang#32736 | `ignore` lists a container, and its linears are taken as plain |
| stable-diffusion.cpp#1898, ComfyUI#15511 | fp8 codes with scales, and nothing in the config says so |
| vllm#17862 | zero points of compressed-tensors that are not packed |
| compressed-tensors#143 | a group index of -1 in every channel is no index |
| vllm#54547, intel/auto-round#1847 | quantizers whose files nobody else reads |
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.quant.check.coverage import skipped_by
from llmopt.quant.convert.convert import convert
from llmopt.quant.convert.plain import PLAIN
from llmopt.quant.convert.verify import verify
from llmopt.quant.formats.registry import quantized_modules, read_quantized
from llmopt.quant.kinds.fp8.kind import Fp8Tensor
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.model.checkpoint import Checkpoint
from safetensors.torch import save_file

from ..support.format_support import HELD, MODULE, assert_same, make, stored, write_checkpoint


@pytest.mark.parametrize("layout", ["naive-quantized", "float-quantized"])
def test_a_frozen_fp8_checkpoint_has_its_scales(tmp_path: Path, layout: str) -> None:
    """As AutoFP8 and the first llm-compressor wrote them, with every default in the config."""
    scheme = HELD["compressed-tensors"][31]
    tensor = make(scheme, 64, 128)
    assert isinstance(tensor, Fp8Tensor) and scheme.label == "fp8 tensor a-fp8-tensor-static"
    tensors, config = stored("compressed-tensors", tensor)
    defaults = {"block_structure": None, "group_size": None, "observer": "minmax"}
    group = config["config_groups"]["group_0"]
    for part in ("weights", "input_activations"):
        group[part] |= defaults | {"observer_kwargs": {}, "actorder": None}
    config |= {"format": layout, "quantization_status": "frozen", "global_compression_ratio": 1.4}
    checkpoint = write_checkpoint(tmp_path, tensors, config)
    assert_same(tensor, read_quantized(checkpoint, MODULE))
    convert(checkpoint, PLAIN, tmp_path / "hf")
    plain = Checkpoint(tmp_path / "hf").tensor(f"{MODULE}.weight")
    assert torch.equal(plain, tensor.dequantize().to(plain.dtype))


def test_zero_points_tell_the_version_of_gptq(tmp_path: Path) -> None:
    tensor = make(IntScheme(4, 32, True), 64, 128)
    tensors, config = stored("gptq", tensor)
    tensors[f"{MODULE}.qzeros"] += 0x11111111  # version 2
    checkpoint = write_checkpoint(tmp_path, tensors, config)
    assert torch.equal(read_quantized(checkpoint, MODULE).dequantize(), tensor.dequantize())
    (failure,) = verify(tmp_path).failures
    assert "gptq_v2" in failure


def test_an_ignored_container_ignores_nothing_in_it() -> None:
    skipped = skipped_by({"quant_method": "compressed-tensors", "ignore": ["model.layers.0.mlp"]})
    assert skipped("model.layers.0.mlp") and not skipped(MODULE)


@pytest.mark.parametrize("ending", [".scale_weight", ".weight_scale", ".weight_scale_inv"])
def test_codes_without_a_config_are_not_cast(tmp_path: Path, ending: str) -> None:
    weight = torch.ones(64, 128).to(torch.float8_e4m3fn)
    parts = {f"{MODULE}.weight": weight, MODULE + ending: torch.tensor(0.001)}
    save_file(parts, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(BadInput, match=f"codes with scales such as {MODULE}{ending}"):
        quantized_modules(Checkpoint(tmp_path))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
def test_zero_points_that_are_not_packed_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors, config = stored("compressed-tensors", make(IntScheme(4, 32, False), 64, 128))
    tensors[f"{MODULE}.weight_zero_point"] = torch.ones(64, 4).to(dtype)
    with pytest.raises(BadInput, match="weight_zero_point holds"):
        read_quantized(write_checkpoint(tmp_path, tensors, config), MODULE)


def test_a_group_index_of_minus_one_is_none(tmp_path: Path) -> None:
    tensor = make(IntScheme(4, 32, True), 64, 128)
    tensors, config = stored("compressed-tensors", tensor)
    tensors[f"{MODULE}.weight_g_idx"] = torch.full((128,), -1, dtype=torch.int32)
    assert_same(tensor, read_quantized(write_checkpoint(tmp_path, tensors, config), MODULE))


@pytest.mark.parametrize("method", ["quark", "auto-round", "hqq", "torchao", "fbgemm_fp8", "vptq"])
def test_methods_that_nobody_here_reads_are_named(tmp_path: Path, method: str) -> None:
    tensors, config = stored("gptq", make(IntScheme(4, 32, True), 64, 128))
    checkpoint = write_checkpoint(tmp_path, tensors, config | {"quant_method": method})
    with pytest.raises(BadInput, match=f"quant_method '{method}' is not supported"):
        quantized_modules(checkpoint)
