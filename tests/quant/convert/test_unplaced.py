"""`convert` and `merge` carry or refuse: a tensor that is neither codes nor a parameter is an error."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.quant.convert.convert import convert
from llmopt.quant.convert.plain import PLAIN, WeightedAdapter, merge
from llmopt.quant.model.checkpoint import INDEX_NAME, Checkpoint
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest
from llmopt.recipes import MODELS
from safetensors.torch import save_file

LINEAR = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("unplaced") / "int8"
    model = MODELS / "stories260K"
    quantize(QuantizeRequest(model, output, method="rtn", bits=8, group_size=-1))
    return output


def with_tensor(source: Path, folder: Path, name: str) -> Checkpoint:
    shutil.copytree(source, folder)
    index = json.loads((folder / INDEX_NAME).read_text())
    index["weight_map"][name] = "extra.safetensors"
    (folder / INDEX_NAME).write_text(json.dumps(index))
    save_file({name: torch.ones(64)}, folder / "extra.safetensors")
    return Checkpoint(folder)


def adapter(folder: Path) -> WeightedAdapter:
    folder.mkdir()
    facts = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    pair = {"A": torch.zeros(2, 64), "B": torch.zeros(64, 2)}
    parts = {f"base_model.model.{LINEAR}.lora_{n}.weight": part for n, part in pair.items()}
    save_file(parts, folder / "adapter_model.safetensors")
    return WeightedAdapter(folder)


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.smoothing", "model.layers.1.mlp.extra.weight"]
)
def test_a_tensor_without_a_place_is_refused(source: Path, tmp_path: Path, name: str) -> None:
    checkpoint = with_tensor(source, tmp_path / "odd", name)
    said = rf"1 tensors have no place in the model that config.json describes, the first is {name}"
    for target in (PLAIN, "fp8"):
        with pytest.raises(BadInput, match=said):
            convert(checkpoint, target, tmp_path / "out", allow_loss=True)
    with pytest.raises(BadInput, match=said):
        merge(checkpoint, [adapter(tmp_path / "adapter")], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name",
    ["model.layers.9.mlp.up_proj.weight", "mtp.norm.weight", "model.rotary_emb.inv_freq"],
)
def test_what_a_model_may_leave_is_carried(source: Path, tmp_path: Path, name: str) -> None:
    checkpoint = with_tensor(source, tmp_path / "more", name)
    convert(checkpoint, PLAIN, tmp_path / "out")
    assert torch.equal(Checkpoint(tmp_path / "out").tensor(name).float(), torch.ones(64))
