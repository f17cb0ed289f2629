"""A family is a file and a line of the registry: planned, quantized, run and written as GGUF with no other change."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.planner.catalog import find_model
from llmopt.quant.convert.verify import verify
from llmopt.quant.families import registry
from llmopt.quant.families.config import current_names
from llmopt.quant.families.family import ImageSettings
from llmopt.quant.formats.registry import quantized_modules, read_quantized
from llmopt.quant.gguf.checkpoint import GgufCheckpoint
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)

from ...support.quant_support import STORIES

VOCAB = 512


class ToyConfig(GraniteConfig):
    model_type = "toy"


class ToyForCausalLM(GraniteForCausalLM):
    config_class = ToyConfig


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The line in the registry; and transformers' own registration of the modules, as a release has it."""
    monkeypatch.setitem(registry.FILES, "tests.quant.families.toy_family", ("toy", "toy_of_old"))
    AutoConfig.register("toy", ToyConfig, exist_ok=True)
    AutoModelForCausalLM.register(ToyConfig, ToyForCausalLM, exist_ok=True)
    yield


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Any]:
    """Folder and model of a random checkpoint with a tokenizer."""
    config = ToyConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        attention_multiplier=0.2, embedding_multiplier=3.0, residual_multiplier=0.5,
        logits_scaling=2.0, tie_word_embeddings=False, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = ToyForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "toy")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(STORIES / name, tmp_path / "toy" / name)
    return tmp_path / "toy", model


def logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    config = EngineConfig(
        folder, dtype="float32", device="cpu", num_threads=1, max_model_len=128, num_blocks=40
    )
    return Engine(config).prompt_logits(tokens.tolist())


def test_the_engine_agrees_with_transformers_and_kv_plan_with_both(
    saved: tuple[Path, Any],
) -> None:
    folder, model = saved
    tokens = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
    assert expected.std() > 0.1
    torch.testing.assert_close(logits(folder, tokens), expected, atol=1e-4, rtol=1e-4)
    planned = find_model(str(folder))
    assert planned.how == "table" and planned.shape.family == "toy"
    assert planned.shape.num_parameters == model.num_parameters()
    assert planned.shape.kv_bytes_per_token(2) == 2 * 2 * 2 * 16 * 2


def test_it_is_quantized_verified_and_run(saved: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = saved
    output = tmp_path / "awq"
    options: dict[str, Any] = {"format": "awq", "num_samples": 8, "seq_len": 32, "group_size": 32}
    quantize(QuantizeRequest(folder, output, method="awq", bits=4, **options))
    assert verify(output).passed
    checkpoint = Checkpoint(output)
    modules = quantized_modules(checkpoint)
    assert len(modules) == 2 * 7
    state = {f"{name}.weight": read_quantized(checkpoint, name).dequantize() for name in modules}
    plain = {
        name: checkpoint.tensor(name) for name in checkpoint.names if name in model.state_dict()
    }
    model.load_state_dict({**state, **plain})
    tokens = torch.arange(3, 40)
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
    torch.testing.assert_close(logits(output, tokens), expected, atol=2e-3, rtol=2e-3)


def test_it_is_written_as_gguf_and_read_back(saved: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = saved
    quantize(QuantizeRequest(folder, tmp_path / "gguf", method="rtn", format="gguf", bits=8))
    read = GgufCheckpoint(next((tmp_path / "gguf").glob("*.gguf")))
    assert read.config["model_type"] == "toy"
    name = "model.layers.1.self_attn.q_proj"
    restored = read_quantized(read, name).dequantize()
    weight = model.get_submodule(name).weight.detach()
    assert (restored - weight).abs().max() < 0.02 * weight.abs().max()


def test_images_and_former_names_are_of_the_family() -> None:
    tokens = registry.image_tokens(ImageSettings({"model_type": "toy"}, {}), 8, 6)
    assert tokens is not None and tokens.num_tokens == 12
    old = {"model_type": "toy_of_old", "hidden_size": 64}
    assert current_names(old) == {
        "model_type": "toy", "hidden_size": 64, "residual_multiplier": 1.0,
    }  # fmt: skip
