"""Checkpoints that other tools wrote, against the values that the same tools read back from them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.quant.convert.convert import convert
from llmopt.quant.convert.plain import PLAIN
from llmopt.quant.convert.verify import verify
from llmopt.quant.formats.registry import quantized_modules, read_quantized
from llmopt.quant.model.checkpoint import SINGLE_NAME, Checkpoint
from llmopt.recipes import MODELS
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent / "checkpoints"
FOLDERS = sorted(path.parent for path in HERE.glob("*/expected.safetensors"))
REFUSED = HERE / "autoround-native-0.16.1"
WEIGHT_ONLY = [
    folder
    for folder in FOLDERS
    if folder.name.startswith(("autoround", "gptqmodel", "llmcompressor-w4", "llmcompressor-gptq"))
]
LINEARS = 7


def name_of(folder: Path) -> str:
    return folder.name


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_the_values_are_those_of_the_tool(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    assert len(quantized_modules(checkpoint)) == LINEARS
    expected = load_file(folder / "expected.safetensors")
    assert len(expected) == 3
    for module, weight in expected.items():
        ours = read_quantized(checkpoint, module).dequantize()
        torch.testing.assert_close(ours.to(weight.dtype), weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize("folder", WEIGHT_ONLY, ids=name_of)
def test_the_engine_computes_with_the_values(folder: Path, tmp_path: Path) -> None:
    checkpoint, tokens = Checkpoint(folder), list(range(3, 27))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float().eval()
    names = quantized_modules(checkpoint)
    weights = {f"{name}.weight": read_quantized(checkpoint, name).dequantize() for name in names}
    plain = {name for name in model.state_dict() if name not in weights}
    weights |= {name: checkpoint.tensor(name) for name in plain}
    model.load_state_dict(weights)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    for path in (*folder.iterdir(), *(MODELS / "stories260K").glob("*token*")):
        shutil.copy(path, tmp_path)
    engine = Engine(EngineConfig(tmp_path, dtype="float32", device="cpu"))
    assert expected.std() > 0.5
    torch.testing.assert_close(engine.prompt_logits(tokens), expected, atol=1e-4, rtol=0)


def test_a_group_order_and_zero_points_are_in_the_files() -> None:
    def stored(name: str, suffix: str) -> torch.Tensor:
        tensors = load_file(HERE / name / SINGLE_NAME)
        return tensors[f"model.layers.0.mlp.up_proj.{suffix}"]

    order = stored("gptqmodel-v1-desc-act-7.7.0", "g_idx")
    assert not torch.equal(order, order.sort().values)
    first, second = (stored(f"gptqmodel-{v}-asymmetric-7.7.0", "qzeros") for v in ("v1", "v2"))
    assert not torch.equal(first, second)


def test_the_format_of_auto_round_is_refused_by_name() -> None:
    with pytest.raises(BadInput, match="quant_method 'auto-round' is not supported") as error:
        quantized_modules(Checkpoint(REFUSED))
    assert "\n" not in str(error.value)


def test_zero_points_that_the_config_denies_are_refused(tmp_path: Path) -> None:
    for path in (HERE / "autoround-awq-0.16.1").iterdir():
        shutil.copy(path, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["zero_point"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match=r"zero_point is false, but model\.layers\.0\..*qzeros"):
        read_quantized(Checkpoint(tmp_path), "model.layers.0.mlp.up_proj")


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_a_valid_file_passes_and_becomes_a_plain_one(folder: Path, tmp_path: Path) -> None:
    report = verify(folder)
    assert report.failures == [] and report.num_modules == LINEARS
    convert(Checkpoint(folder), PLAIN, tmp_path / "hf")
    plain = Checkpoint(tmp_path / "hf")
    dtype = plain.tensor("lm_head.weight").dtype
    for module, weight in load_file(folder / "expected.safetensors").items():
        torch.testing.assert_close(plain.tensor(f"{module}.weight"), weight.to(dtype))


def test_every_tool_is_listed_with_its_version() -> None:
    text = (HERE / "README.md").read_text()
    assert FOLDERS
    for folder in (*FOLDERS, REFUSED):
        assert f"`{folder.name}`" in text
        size = sum(path.stat().st_size for path in folder.iterdir())
        assert size <= 150_000 and (folder / SINGLE_NAME).is_file()
        tool, version = folder.name.split("-")[0], folder.name.rsplit("-", 1)[-1]
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
        # These three write no version of their own.
        silent = tool in ("bnb", "llmcompressor") or (tool, version) == ("ct", "0.9.4")
        assert silent or version in json.dumps(config)
