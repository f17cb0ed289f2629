"""`--quantize-lm-head`: an output projection of its own, quantized with what the final norm gives it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.quant.convert.verify import PROVEN, verify
from llmopt.quant.formats.registry import FORMATS, quantized_modules, read_quantized
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.pipeline.online_calibration import OnlineCalibration
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ...support.quant_support import STORIES

HEAD = "lm_head"
PROMPT = [1, 403, 407, 261, 378, 31, 91, 300]


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model with an output projection that is no longer its embedding."""
    folder = tmp_path_factory.mktemp("untied") / "model"
    folder.mkdir()
    for path in STORIES.iterdir():
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    noise = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(2))
    tensors[f"{HEAD}.weight"] = (embedding + 0.002 * noise).to(embedding.dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def request(model: Path, output: Path, **options: object) -> QuantizeRequest:
    asked = QuantizeRequest(model, output, method="gptq", lm_head=True, num_samples=8, seq_len=64)
    return replace(asked, **options)


@pytest.mark.parametrize("format_name", ["compressed-tensors", "gptq", "bitsandbytes"])
def test_the_head_is_quantized_and_read_back(
    untied: Path, tmp_path: Path, format_name: str
) -> None:
    method = "nf4" if format_name == "bitsandbytes" else "gptq"
    result = quantize(request(untied, tmp_path / "out", format=format_name, method=method))
    checkpoint = Checkpoint(result.output)
    assert HEAD in quantized_modules(checkpoint)
    head = next(module for module in result.manifest["modules"] if module["module"] == HEAD)
    assert head["num_tokens"] == 8 * 64
    assert head["held_out_error"] > 0
    if method == "gptq":
        assert head["error"] < head["rtn_error"] and head["fallback"] is None
    assert verify(result.output).status == PROVEN

    modules = quantized_modules(checkpoint)
    plain = AutoModelForCausalLM.from_pretrained(untied, dtype=torch.float32)
    plain.load_state_dict(
        {f"{name}.weight": read_quantized(checkpoint, name).dequantize() for name in modules},
        strict=False,
    )
    with torch.inference_mode():
        expected = plain(torch.tensor([PROMPT])).logits[0]
    ours = Engine(EngineConfig(result.output, dtype="float32")).prompt_logits(PROMPT)
    assert (ours - expected).abs().max() < 1e-3
    if format_name == "compressed-tensors":
        theirs = AutoModelForCausalLM.from_pretrained(result.output, dtype=torch.float32)
        with torch.inference_mode():
            assert (theirs(torch.tensor([PROMPT])).logits[0] - expected).abs().max() < 1e-4


@pytest.mark.parametrize(("name", "symmetric"), [("gptq", True), ("awq", False)])
def test_the_config_says_whether_the_head_is_packed(name: str, symmetric: bool) -> None:
    """By the key that vLLM reads for both formats, false where it is absent."""
    scheme, linear = IntScheme(4, 128, symmetric), "model.layers.0.mlp.down_proj"
    packed = FORMATS[name].config({linear: scheme, HEAD: scheme}, [])
    plain = FORMATS[name].config({linear: scheme}, [HEAD])
    assert packed["lm_head"] is True and not plain.get("lm_head", False)


def test_cut_before_the_head_the_run_goes_on_there(
    untied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = quantize(request(untied, tmp_path / "whole", num_samples=2))

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    asked = request(untied, tmp_path / "out", num_samples=2)
    with monkeypatch.context() as patch:
        patch.setattr(OnlineCalibration, "measure_head", crash)
        with pytest.raises(KeyboardInterrupt):
            quantize(asked)
    result = quantize(asked)
    assert result.resumed_layers == 5
    files = {path.name: path.read_bytes() for path in whole.output.iterdir()}
    assert {path.name: path.read_bytes() for path in result.output.iterdir()} == files


def test_a_head_that_is_ignored_stays(untied: Path, tmp_path: Path) -> None:
    result = quantize(request(untied, tmp_path / "out", method="rtn", ignore=(f"^{HEAD}$",)))
    checkpoint, source = Checkpoint(result.output), Checkpoint(untied)
    assert HEAD not in quantized_modules(checkpoint)
    assert torch.equal(checkpoint.tensor(f"{HEAD}.weight"), source.tensor(f"{HEAD}.weight"))
