"""The engine on GGUF files: the logits of the dequantized weights, for every way to name the file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.processor import VARIABLE
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.kernels.linear.native_linear import native_linear
from llmopt.engine.model.decoder.decoder import Decoder
from llmopt.quant.formats.registry import quantized_modules, read_quantized
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.source.models import open_checkpoint
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from ...support.gguf_support import STORIES, TEXT, random_model, write_model
from ...support.native_paths import native_paths

TOKENS = torch.randint(3, 500, (1, 90), generator=torch.Generator().manual_seed(0))
KINDS = (
    *("stories3M", "llama-bias", "qwen2", "qwen3", "gemma2", "granite", "olmo2", "cohere"),
    *("starcoder2", "phi", "qwen3_moe", "mixtral"),
)


@pytest.fixture(scope="module", params=KINDS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(source folder, GGUF file with config and tokenizer beside it)."""
    name = request.param
    folder = tmp_path_factory.mktemp("gguf")
    source = STORIES if name == "stories3M" else random_model(folder / name, name)
    path = write_model(source, folder / "out", "Q4_K_M")
    for file in (*source.glob("*token*"), source / "config.json"):
        shutil.copy(file, path.parent)
    return source, path


def engine(path: Path) -> Engine:
    return Engine(EngineConfig(path, dtype="float32", device="cpu", cpu_activations=16))


def write_plain(read: Checkpoint, source: Path, folder: Path) -> Path:
    """The dequantized weights as a plain checkpoint."""
    folder.mkdir()
    quantized = quantized_modules(read)
    state = {f"{name}.weight": read_quantized(read, name).dequantize() for name in quantized}
    state |= {
        name: read.tensor(name).float() for name in read.names if name.endswith(("weight", "bias"))
    }
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    for file in (*source.glob("*token*"), source / "config.json"):
        shutil.copy(file, folder)
    return folder


@pytest.mark.sweep(6)
def test_logits_are_those_of_the_dequantized_weights(written, tmp_path):
    source, path = written
    plain = write_plain(open_checkpoint(path), source, tmp_path / "plain")
    model: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(TOKENS).logits[0]
    built = engine(path)
    got = built.prompt_logits(TOKENS[0].tolist())
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    # The blocks stay packed. The decoder's tied head shares the embedding's; transformers' modules look up
    # floats.
    embedding = 0 if isinstance(built.runner.decoder, Decoder) else 512 * 256 * 4
    if native_paths():  # torch's operations hold their codes in other layouts
        assert built.memory.weight_bytes < 1.15 * path.stat().st_size + embedding


@pytest.mark.parametrize(
    "written", ["stories3M", "qwen2", "qwen3_moe", "gemma2", "granite"], indirect=True
)
def test_a_gguf_file_alone_is_complete(written, tmp_path):
    pytest.importorskip("gguf")
    _, path = written
    alone, beside = engine(Path(shutil.copy(path, tmp_path))), engine(path.parent)
    for text in TEXT.read_text(encoding="utf-8").split("\n\n")[:20]:
        assert alone.tokenizer(text).input_ids == beside.tokenizer(text).input_ids
    assert alone.eos_token_ids == beside.eos_token_ids
    tokens = TOKENS[0].tolist()
    assert torch.equal(alone.prompt_logits(tokens), beside.prompt_logits(tokens))


@pytest.mark.parametrize("path", ["auto", "off"])
@pytest.mark.parametrize("written", ["stories3M", "mixtral"], indirect=True)
def test_a_loaded_model_no_longer_needs_its_file(written, path, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, path)
    file = Path(shutil.copytree(written[1].parent, tmp_path / "copy")) / written[1].name
    built, tokens = engine(file), TOKENS[0].tolist()
    expected = built.prompt_logits(tokens)
    # In place, as `cp` writes; a file that is cut off ends the process that reads on.
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
    assert torch.equal(built.prompt_logits(tokens), expected)


def test_activations_have_8_bits_unless_16_are_asked_for(tmp_path):
    source = random_model(tmp_path / "llama", "llama")
    path = write_model(source, tmp_path / "out", "Q4_K_M")
    for file in source.glob("*token*"):
        shutil.copy(file, path.parent)
    usual = Engine(EngineConfig(path, dtype="float32", device="cpu"))
    exact, plain = engine(path), Engine(EngineConfig(source, dtype="float32", device="cpu"))
    bits = 8 if native_linear().reason is None else 16
    assert [built.activation_bits for built in (usual, exact, plain)] == [bits, 16, 16]
    tokens = TOKENS[0].tolist()
    got, expected = usual.prompt_logits(tokens), exact.prompt_logits(tokens)
    moved = float((got - expected).norm() / expected.norm())
    assert moved < 0.1 and (moved > 1e-4) == (native_linear().reason is None)


def test_types_of_lattices_give_the_dequantized_weights(tmp_path):
    source = random_model(tmp_path / "llama", "llama")
    path = write_model(source, tmp_path / "out", "IQ2_XS")
    for file in source.glob("*token*"):
        shutil.copy(file, path.parent)
    read = open_checkpoint(path)
    assert "IQ2_XS" in read.quantization_config["types"].values()
    expected = write_plain(read, source, tmp_path / "plain")
    tokens = TOKENS[0].tolist()
    got, plain = engine(path).prompt_logits(tokens), engine(expected).prompt_logits(tokens)
    torch.testing.assert_close(got, plain, atol=1e-4, rtol=1e-4)
