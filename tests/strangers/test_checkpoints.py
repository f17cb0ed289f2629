"""Checkpoints that other tools wrote, against the values that the same tools read back from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from llmopt.quant.convert.convert import convert
from llmopt.quant.convert.plain import PLAIN
from llmopt.quant.convert.verify import verify
from llmopt.quant.formats.registry import quantized_modules, read_quantized
from llmopt.quant.model.checkpoint import SINGLE_NAME, Checkpoint
from safetensors.torch import load_file

HERE = Path(__file__).parent / "checkpoints"
FOLDERS = sorted(path.parent for path in HERE.glob("*/config.json"))
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
        torch.testing.assert_close(ours, weight, rtol=1e-6, atol=0)


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
    for folder in FOLDERS:
        assert f"`{folder.name}`" in text
        size = sum(path.stat().st_size for path in folder.iterdir())
        assert size <= 150_000 and (folder / SINGLE_NAME).is_file()
        version = json.loads((folder / "config.json").read_text())["quantization_config"].get(
            "version"
        )
        assert version is None or folder.name.endswith(f"-{version}")
