"""Weights too small for the scales of a format: refused by name, or said where they are negligible."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.quant.convert.convert import convert
from llmopt.quant.convert.verify import verify
from llmopt.quant.formats.registry import read_quantized
from llmopt.quant.model.checkpoint import SINGLE_NAME, Checkpoint
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.manifest import MANIFEST_NAME
from llmopt.quant.plan.request import QuantizeRequest
from llmopt.recipes import MODELS
from safetensors.torch import load_file, save_file

TINY = "model.layers.1.self_attn.o_proj"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """stories260K in float32, so that its weights may be of any magnitude."""
    shutil.copytree(MODELS / "stories260K", tmp_path / "model")
    return tmp_path / "model"


def scale(model: Path, factor: float, rows: slice = slice(None)) -> torch.Tensor:
    tensors = {name: part.float() for name, part in load_file(model / SINGLE_NAME).items()}
    tensors[f"{TINY}.weight"][rows] *= factor
    save_file(tensors, model / SINGLE_NAME, {"format": "pt"})
    return tensors[f"{TINY}.weight"]


def rtn(model: Path, output: Path, name: str, method: str = "rtn", **options: object) -> None:
    options |= {"ignore": ("gate_proj", "up_proj", "down_proj"), "group_size": 32}
    request = QuantizeRequest(model, output, method=method, format=name, **options)  # pyright: ignore[reportArgumentType]
    quantize(request)


@pytest.mark.parametrize("method", ["rtn", "awq", "gptq"])
def test_a_weight_below_float16_scales_is_refused(model: Path, tmp_path: Path, method: str) -> None:
    scale(model, 1e-8)
    name = "awq" if method == "awq" else "gptq"
    options = {"num_samples": 2, "seq_len": 32}
    with pytest.raises(BadInput, match=rf"{TINY}: 64 of 64 rows would become zeros"):
        rtn(model, tmp_path / "out", name, method, **options)
    assert not (tmp_path / "out" / MANIFEST_NAME).exists()


def test_scales_of_the_models_dtype_hold_them(model: Path, tmp_path: Path) -> None:
    weight = scale(model, 1e-8)
    rtn(model, tmp_path / "out", "compressed-tensors")
    stored = read_quantized(Checkpoint(tmp_path / "out"), TINY).dequantize()
    assert float((stored - weight).square().sum() / weight.square().sum()) < 0.02
    with pytest.raises(BadInput, match=rf"{TINY}: 64 of 64 rows would become zeros"):
        convert(Checkpoint(tmp_path / "out"), "gptq", tmp_path / "gptq", allow_loss=True)


def test_negligible_rows_are_said_when_written_and_when_verified(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scale(model, 1e-9, slice(3, 5))
    with caplog.at_level(logging.WARNING):
        rtn(model, tmp_path / "out", "gptq")
    assert f"{TINY}: 2 rows of tiny weights became zeros" in caplog.messages
    records = json.loads((tmp_path / "out" / MANIFEST_NAME).read_text())["modules"]
    assert {m["module"]: m["zeroed_rows"] for m in records if m["zeroed_rows"]} == {TINY: 2}
    report = verify(tmp_path / "out")
    assert report.ok and report.unchecked == [f"{TINY}: 2 rows of tiny weights became zeros"]


def test_rows_of_zeros_stay_zeros_without_a_word(model: Path, tmp_path: Path) -> None:
    scale(model, 0.0, slice(0, 8))
    rtn(model, tmp_path / "out", "gptq")
    assert verify(tmp_path / "out").unchecked == []
