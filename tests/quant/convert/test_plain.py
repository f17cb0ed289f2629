"""`convert --format hf`: a plain checkpoint whose weights are those that the codes stand for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.cli.main import main
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.quant.formats.registry import quantized_modules, read_quantized
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.pipeline.pipeline import QuantizeResult
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from ...support.gguf_support import STORIES, random_model, write_model

TOKENS = [1, 5, 9, 200, 77, 3]


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, dict[str, Any], str]:
    with pytest.raises(SystemExit) as stop:
        main([*map(str, words)])
    captured = capsys.readouterr()
    return int(stop.value.code or 0), json.loads(captured.out or "{}"), captured.err


@pytest.fixture(params=["stories", "qwen2"])
def gguf(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file alone in a folder: what is beside it would be read first."""
    model = tmp_path / "model"
    if request.param == "stories":
        shutil.copytree(STORIES, model)
    else:
        random_model(model, request.param)
    written = write_model(model, tmp_path / "written", "Q4_0")
    (tmp_path / "alone").mkdir()
    return Path(shutil.copy(written, tmp_path / "alone" / "tiny.gguf"))


def test_a_gguf_becomes_what_transformers_reads_of_it(
    gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, answer, err = run(
        capsys, "convert", gguf, "--format", "hf", "-o", tmp_path / "hf", "--json"
    )
    assert code == 0, err
    assert (answer["source_format"], answer["scheme"]) == ("gguf", "bfloat16")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert {tensor.dtype for tensor in ours.state_dict().values()} == {torch.bfloat16}
    theirs = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
        dtype=torch.bfloat16,
    )
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["architectures"] == [type(ours).__name__]
    assert "quantization_config" not in config
    ours, theirs = (
        AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "hf", tmp_path / "model")
    )
    assert ours("Once upon a time")["input_ids"] == theirs("Once upon a time")["input_ids"]


def test_the_logits_are_those_of_the_engine_on_the_dequantized_weights(
    quantized: Callable[..., QuantizeResult], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = quantized(method="awq").output
    words = ("convert", source, "--format", "hf", "-o", tmp_path / "hf", "--json")
    code, answer, err = run(capsys, *words)
    assert code == 0, err
    assert len(answer["modules"]) == 35 and not answer["lossless"]
    plain, codes = Checkpoint(tmp_path / "hf"), Checkpoint(source)
    assert not plain.quantization_config
    for module in quantized_modules(codes):
        wanted = read_quantized(codes, module).dequantize().to(torch.bfloat16)
        assert torch.equal(plain.tensor(f"{module}.weight"), wanted)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    got = Engine(EngineConfig(tmp_path / "hf", dtype="float32")).prompt_logits(TOKENS)
    assert torch.allclose(got, expected, atol=1e-4)


def test_files_in_folders_of_a_checkpoint_are_copied(model_copy: Path) -> None:
    names = (
        *("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"),
        *("1_Pooling/config.json", "2_Dense/model.safetensors", "tekken.json"),
        "additional_chat_templates/tool_use.jinja",
    )
    before = Checkpoint(model_copy).companions()
    for name in (*names, "other/notes.json"):
        (model_copy / name).parent.mkdir(exist_ok=True)
        (model_copy / name).write_text(name)
    companions = Checkpoint(model_copy).companions()
    assert companions == before | {name: name.encode() for name in names}


def test_a_plain_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "convert", STORIES, "--format", "hf", "-o", tmp_path / "hf")
    assert (code, err.count("\n")) == (2, 1)
    assert "is a plain checkpoint already" in err
    assert not (tmp_path / "hf").exists()
