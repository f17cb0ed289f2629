"""Merged adapters: the logits of PEFT's merge in float32, over plain and quantized bases; and bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.quant.convert.plain import WeightedAdapter, merge
from llmopt.quant.formats.registry import read_quantized
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.source.load_processor import load_tokenizer
from llmopt.recipes import MODELS
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ...support.cli_process import run_llmopt
from ...support.lora_world import ATTENTION, write_adapter
from ...support.model_families import FAMILIES, save_model
from ...support.quantized_world import random_model, write_checkpoint

MODEL = MODELS / "stories3M"
TOKENS = torch.randint(3, 512, (1, 24), generator=torch.Generator().manual_seed(1))


def plain(folder: Path = MODEL) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(TOKENS).logits


def trained(folder: Path, model: Any, seed: int, **options: Any) -> Path:
    """An adapter that PEFT itself writes, with random weights in the place of trained ones."""
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], **options)
    wrapped = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05, generator=generator)
            if "magnitude" in name:
                parameter.mul_(1 + 0.2 * torch.rand(parameter.shape, generator=generator))
    wrapped.save_pretrained(str(folder))
    return folder


def merged_by_peft(*folders: Path, base: Path = MODEL) -> torch.Tensor:
    """Logits of PEFT's merge, one adapter after the other."""
    model: Any = plain(base)
    for folder in folders:
        model = peft.PeftModel.from_pretrained(model, folder).merge_and_unload()
    return logits(model)


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"use_dora": True}], ids=str)
def test_the_logits_are_those_of_peft(options: dict[str, Any], tmp_path: Path) -> None:
    adapter = trained(tmp_path / "adapter", plain(), 1, **options)
    result = merge(Checkpoint(MODEL), [WeightedAdapter(adapter)], tmp_path / "m", dtype="float32")
    theirs = merged_by_peft(adapter)
    assert (logits(plain(tmp_path / "m")) - theirs).abs().max() < 1e-4
    assert (logits(plain()) - theirs).abs().max() > 1e-2
    assert len(result.modules) == 2 * plain().config.num_hidden_layers
    assert result.kept == pytest.approx(1.0, abs=1e-5)


def test_several_adapters_add_up_by_their_weights(tmp_path: Path) -> None:
    first = write_adapter(tmp_path / "first", plain(), ATTENTION, seed=1)
    second = write_adapter(tmp_path / "second", plain(), seed=2)
    half = write_adapter(tmp_path / "half", plain(), seed=2, alpha=4.0)
    given = [WeightedAdapter(first), WeightedAdapter(second, 0.5)]
    merge(Checkpoint(MODEL), given, tmp_path / "merged", dtype="float32")
    assert (logits(plain(tmp_path / "merged")) - merged_by_peft(first, half)).abs().max() < 1e-4


def test_a_transposed_base_is_merged_as_it_is_stored(tmp_path: Path) -> None:
    save_model(tmp_path / "base", *FAMILIES["gpt-2"][:2])
    adapter = write_adapter(
        tmp_path / "adapter", plain(tmp_path / "base"), ("c_attn", "c_proj"), fan_in_fan_out=True
    )
    merge(
        Checkpoint(tmp_path / "base"), [WeightedAdapter(adapter)], tmp_path / "m", dtype="float32"
    )
    theirs = merged_by_peft(adapter, base=tmp_path / "base")
    assert (logits(plain(tmp_path / "m")) - theirs).abs().max() < 1e-4


def test_a_quantized_base_is_dequantized(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model = random_model()
    write_checkpoint(base, model, "gptq", IntScheme(4, 32, True))
    write_adapter(adapter, model, ("q_proj",))
    checkpoint = Checkpoint(base)
    merge(checkpoint, [WeightedAdapter(adapter)], tmp_path / "merged", dtype="float32")
    merged = load_all(tmp_path / "merged")
    assert not [name for name in merged if "qweight" in name or name.endswith("scales")]
    for module in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"):
        weight = read_quantized(checkpoint, module).dequantize()
        tensors = load_file(adapter / "adapter_model.safetensors")
        if module.endswith("q_proj"):
            down, up = (tensors[f"base_model.model.{module}.lora_{x}.weight"] for x in "AB")
            weight = weight + 2.0 * up @ down
        assert torch.allclose(merged[f"{module}.weight"], weight, atol=1e-6)
    assert "quantization_config" not in Checkpoint(tmp_path / "merged").config


def test_bfloat16_says_how_much_of_a_change_it_keeps(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", plain(), ("q_proj",), alpha=1e-3)
    result = merge(
        Checkpoint(MODEL), [WeightedAdapter(adapter)], tmp_path / "merged", dtype="bfloat16"
    )
    assert result.kept < 0.99


def test_the_record_names_the_base_by_its_digest(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", plain(), ("q_proj",))
    done = run_llmopt("merge", MODEL, adapter, "-o", tmp_path / "merged", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["modules"]
    record = json.loads((tmp_path / "merged" / "merge.json").read_text())
    assert set(record["base_sha256"]) == {p.name for p in MODEL.glob("*.safetensors")}
    assert [(a["name"], a["weight"]) for a in record["adapters"]] == [("adapter", 1.0)]


def test_the_tokenizer_is_the_one_that_the_adapter_was_trained_with(tmp_path: Path) -> None:
    base = shutil.copytree(MODEL, tmp_path / "base")
    (base / "chat_template.jinja").write_text("BASE")
    adapter = write_adapter(tmp_path / "adapter", plain(), ("q_proj",))
    for path in MODEL.glob("*token*"):
        shutil.copy(path, adapter)
    settings = json.loads((MODEL / "tokenizer_config.json").read_text())
    changed = {**settings, "eos_token": "<unk>", "chat_template": "TUNED"}
    (adapter / "tokenizer_config.json").write_text(json.dumps(changed))
    assert not merge(Checkpoint(base), [WeightedAdapter(adapter)], tmp_path / "m").notes
    tokenizer = load_tokenizer(tmp_path / "m")
    assert (tokenizer.chat_template, tokenizer.eos_token_id) == ("TUNED", 0)
    (adapter / "tokenizer_config.json").write_text(json.dumps(settings))
    merge(Checkpoint(base), [WeightedAdapter(adapter)], tmp_path / "kept")
    assert load_tokenizer(tmp_path / "kept").chat_template == "BASE"
    content = json.loads((adapter / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 512, "content": "<new>"})
    (adapter / "tokenizer.json").write_text(json.dumps(content))
    (note,) = merge(Checkpoint(base), [WeightedAdapter(adapter)], tmp_path / "other").notes
    assert "not taken: the ids of 1 tokens, such as '<new>', differ from the base's" in note
    expected = (base / "tokenizer.json").read_bytes()
    assert (tmp_path / "other" / "tokenizer.json").read_bytes() == expected


def test_bad_input_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    model = plain()
    good = write_adapter(tmp_path / "good", model, ("q_proj",))
    dora = trained(tmp_path / "dora", plain(), 1, use_dora=True)
    wrong_rank = write_adapter(tmp_path / "rank", model, ("q_proj",), seed=1)
    settings = json.loads((wrong_rank / "adapter_config.json").read_text())
    (wrong_rank / "adapter_config.json").write_text(json.dumps({**settings, "r": 5}))
    tensors = load_file(good / "adapter_model.safetensors")
    stray = write_adapter(tmp_path / "stray", model, ("q_proj",))
    renamed = {name.replace("layers.0.", "layers.70."): t for name, t in tensors.items()}
    save_file(renamed, stray / "adapter_model.safetensors")
    cases = {
        "it is neither a folder": [tmp_path / "nowhere", good],
        "adapter_config.json is missing": [MODEL, tmp_path / "none"],
        "r = 5": [MODEL, wrong_rank],
        "is not its base": [MODEL, stray],
        "merge it alone": [MODEL, dora, good],
        "one for each adapter": [MODEL, good, "--weights", "1,2"],
        "choose auto": [MODEL, good, "--dtype", "int3"],
    }
    for words, arguments in cases.items():
        done = run_llmopt("merge", *arguments, "-o", tmp_path / "merged")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert words in done.stderr
        assert not list(tmp_path.glob("merged*"))
    (tmp_path / "merged").mkdir()
    with pytest.raises(BadInput, match="exists"):
        merge(Checkpoint(MODEL), [WeightedAdapter(good)], tmp_path / "merged")


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}
