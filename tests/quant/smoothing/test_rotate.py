"""Rotated checkpoints against the models that they came from, for every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.quant.convert.verify import verify
from llmopt.quant.model.checkpoint import SINGLE_NAME, Checkpoint
from llmopt.quant.pipeline import pipeline
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.manifest import MANIFEST_NAME
from llmopt.quant.plan.request import QuantizeRequest
from llmopt.quant.smoothing.rotate import rotated
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from ...support.family_models import MAPPED, OTHERS, save_model, token_ids
from ...support.quant_support import TINY
from ...support.vision_checkpoints import image_prompt, save_wrapped

# Values between others in one projection, per head (GPT-NeoX, BLOOM), of a latent (DeepSeek), or without a pair.
REFUSED = {"deepseek_v2", "deepseek_v3", "gpt_neox", "bloom", "gptj"}


def write_plain(checkpoint: Checkpoint, folder: Path) -> Path:
    """Write a checkpoint that fits in memory as plain files."""
    folder.mkdir(exist_ok=True)
    save_file(
        {name: tensor.clone() for name, tensor in checkpoint.tensors()},
        folder / SINGLE_NAME,
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
    return folder


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()(input_ids=token_ids(), use_cache=False).logits


@pytest.mark.sweep(12)
@pytest.mark.parametrize("name", [*MAPPED, *OTHERS])
def test_logits_stay_or_the_family_is_refused(tmp_path: Path, name: str) -> None:
    save_model(name, tmp_path / "plain")
    checkpoint = Checkpoint(tmp_path / "plain")
    if name in REFUSED:
        with pytest.raises(BadInput, match="--rotate R2: model type"):
            rotated(checkpoint, ("R2",), 0)
        return
    turned = rotated(checkpoint, ("R2",), 0)
    assert changed(checkpoint, turned) >= 2
    after = logits(write_plain(turned, tmp_path / "rotated"))
    before = logits(tmp_path / "plain")
    assert float((after - before).abs().max()) < 1e-5 * max(1, float(before.abs().max()))


def changed(plain: Checkpoint, turned: Checkpoint) -> int:
    """How many matrices differ."""
    return sum(
        not torch.equal(plain.tensor(name), turned.tensor(name))
        for name in plain.names
        if len(plain.shape(name)) == 2
    )


@pytest.mark.parametrize("name", ["llama", "llama-grouped", "qwen2", "phi3"])
def test_values_are_turned_head_by_head(tmp_path: Path, name: str) -> None:
    save_model(name, tmp_path / "plain")
    checkpoint = Checkpoint(tmp_path / "plain")
    turned = rotated(checkpoint, ("R2",), 3)
    assert changed(checkpoint, turned) == 4  # v and o of two layers
    before, after = logits(tmp_path / "plain"), logits(write_plain(turned, tmp_path / "rotated"))
    assert float((after - before).abs().max()) < 1e-5 * max(1, float(before.abs().max()))


def request(output: Path, **options: Any) -> QuantizeRequest:
    settings: dict[str, Any] = {
        "method": "rtn",
        "bits": 8,
        "group_size": -1,
        "num_samples": 4,
        "seq_len": 32,
        "held_out": 0,
        "model_name": "tiny",
        "rotations": ("R2",),
    }
    return QuantizeRequest(TINY, output, **(settings | options))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_rotated_model_is_quantized_and_resumed_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = quantize(request(tmp_path / "whole")).output
    config = json.loads((whole / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert '"rotations": [\n' in (whole / MANIFEST_NAME).read_text()
    assert verify(whole).ok
    written = pipeline._write_layer

    class Killed(BaseException):
        pass

    def killed(plan: Any, journal: Any, index: int, work: Any) -> Any:
        if index == 2:
            raise Killed
        return written(plan, journal, index, work)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "_write_layer", killed)
        with pytest.raises(Killed):
            quantize(request(tmp_path / "out"))
    result = quantize(request(tmp_path / "out"))
    assert result.resumed_layers == 2
    assert contents(result.output) == contents(whole)
    other = quantize(request(tmp_path / "other", seed=1)).output
    assert (
        contents(other)["model-layer-00000.safetensors"]
        != (contents(whole)["model-layer-00000.safetensors"])
    )


@torch.no_grad()
def logits_behind_image(folder: Path, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return model.eval()(**inputs, use_cache=False).logits


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["qwen3_vl", "llava_onevision"])
def test_answers_about_images_stay(tmp_path: Path, name: str) -> None:
    save_wrapped(tmp_path / "plain", name)
    checkpoint = Checkpoint(tmp_path / "plain")
    turned = rotated(checkpoint, ("R2",), 0)
    assert changed(checkpoint, turned) == 4
    inputs = image_prompt(tmp_path / "plain", name)
    before = logits_behind_image(tmp_path / "plain", inputs)
    after = logits_behind_image(write_plain(turned, tmp_path / "rotated"), inputs)
    assert float((after - before).abs().max()) < 1e-5 * max(1, float(before.abs().max()))


def test_an_unknown_rotation_is_refused(tmp_path: Path) -> None:
    for names in (("R5",), ("R1", "R2")):
        with pytest.raises(BadInput, match=f"--rotate {names[0]}: choose R2, or none"):
            quantize(request(tmp_path / "out", rotations=names))
