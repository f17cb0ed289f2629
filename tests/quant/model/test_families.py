from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.quant.families.layer_map import Fold, LayerMap
from llmopt.quant.methods.folding import fold_into_norm, row_scales
from llmopt.quant.model.architecture import Architecture, architecture_of
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.smoothing.smoothing_map import with_smoothing
from safetensors.torch import load_file, save_file

from ...support.family_models import MAPPED, OTHERS, save_model
from ...support.folded_models import fold_model, logits_of
from ...support.hand_kept_maps import map_of

EXPERTS, SHARED = 4, 1
# Folds that can be done in the two layers of each tiny model together.
FOLDS = {
    "llama": 8,
    "llama-grouped": 6,  # two query heads read one value head
    "mistral": 8,
    "mixtral": 2 * (3 + EXPERTS),
    "qwen2": 6,  # its value projection has a bias
    "qwen3": 8,
    "qwen3_moe": 4 + 3 + EXPERTS,  # the first layer is dense
    "gemma2": 8,
    "gemma3": 6,
    "phi3": 8,
    "gpt_oss": 2,
    "deepseek_v2": 4 + 3 + 8 + SHARED,
    "deepseek_v3": 5 + 4 + 8 + SHARED,
}

UNMAPPED_ROUTERS = {
    "olmoe": {"mlp.gate"},
    "qwen2_moe": {"mlp.gate", "mlp.shared_expert_gate"},
}


def mapped(folder: Path) -> Architecture:
    """The layers of a checkpoint with their maps, as they are discovered."""
    checkpoint = Checkpoint(folder)
    return with_smoothing(checkpoint, architecture_of(checkpoint))


@pytest.mark.parametrize("name", MAPPED)
def test_folded_scales_leave_the_logits_as_they_were(tmp_path: Path, name: str) -> None:
    save_model(name, tmp_path / "plain")
    architecture = mapped(tmp_path / "plain")
    done = fold_model(tmp_path / "plain", tmp_path / "folded", architecture.layers, architecture)
    assert done == FOLDS[name]
    before, after = logits_of(tmp_path / "plain"), logits_of(tmp_path / "folded")
    assert before.abs().max() > 0.1
    assert (after - before).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_a_router_that_is_left_out_changes_the_logits(tmp_path: Path, name: str) -> None:
    """What the test above would see if routers were forgotten."""
    save_model(name, tmp_path / "plain")
    architecture = mapped(tmp_path / "plain")

    def without_routers(family: LayerMap) -> LayerMap:
        folds = tuple(
            replace(fold, targets=tuple(t for t in fold.targets if t not in family.routers))
            for fold in family.folds
        )
        return replace(family, folds=folds)

    layers = [without_routers(family) for family in architecture.layers]
    fold_model(tmp_path / "plain", tmp_path / "folded", layers, architecture)
    assert (logits_of(tmp_path / "folded") - logits_of(tmp_path / "plain")).abs().max() > 1e-3


@pytest.mark.parametrize("name", [*MAPPED, *OTHERS])
def test_every_matrix_of_a_layer_is_a_linear_or_a_router(tmp_path: Path, name: str) -> None:
    save_model(name, tmp_path)
    checkpoint = Checkpoint(tmp_path)
    architecture = mapped(tmp_path)
    assert any("fused" in note for note in architecture.notes) == (name == "gpt_oss")
    for index, family in enumerate(architecture.layers):
        start = architecture.layer_prefix(index) + "."
        matrices = {
            tensor.removeprefix(start).removesuffix(".weight")
            for tensor in checkpoint.names
            if tensor.startswith(start) and len(checkpoint.shape(tensor)) == 2
        }
        left_alone = UNMAPPED_ROUTERS.get(name, set(family.routers))
        if name == "gpt_oss":
            left_alone = {matrix for matrix in matrices if matrix.startswith("mlp.")}
        assert matrices - left_alone == set(family.linears)
        assert len(family.linears) == len(set(family.linears))


def test_experts_are_in_order_and_share_the_norm_with_their_router(tmp_path: Path) -> None:
    save_model("deepseek_v3", tmp_path)
    dense, sparse = mapped(tmp_path).layers
    assert dense.routers == () and sparse.routers == ("mlp.gate",)
    readers = next(f for f in sparse.folds if f.source == "post_attention_layernorm").targets
    experts = [f"mlp.experts.{number}" for number in range(8)] + ["mlp.shared_experts"]
    pairs = [(f"{expert}.gate_proj", f"{expert}.up_proj") for expert in experts]
    assert readers[0] == "mlp.gate" and len(readers) == 1 + 2 * (8 + SHARED)
    assert set(readers[1:]) == {name for pair in pairs for name in pair}
    assert [group for group in sparse.shared_inputs if group in pairs[:8]] == pairs[:8]


def test_experts_that_lie_fused_on_disk_stay_with_a_note(tmp_path: Path) -> None:
    save_model("qwen3_moe", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in stored.items() if ".experts." not in name}
    kept["model.layers.1.mlp.experts.gate_up_proj"] = torch.zeros(4, 64, 32)
    kept["model.layers.1.mlp.experts.down_proj"] = torch.zeros(4, 32, 32)
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    architecture = mapped(tmp_path)
    assert any("fused 3-D" in note for note in architecture.notes)
    sparse = architecture.layers[1]
    assert all(name.startswith("self_attn.") for name in sparse.linears)
    assert not sparse.routers
    assert all(fold.source != "post_attention_layernorm" for fold in sparse.folds)


def test_fused_projections_say_which_rows_feed_what() -> None:
    config = {
        "model_type": "phi3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    folds = {fold.source: fold for fold in map_of(config).folds}
    assert folds["self_attn.qkv_proj"] == Fold(
        "self_attn.qkv_proj", ("self_attn.o_proj",), rows=(48, 64)
    )
    assert folds["mlp.gate_up_proj"].rows == (48, 96)
    assert row_scales(Fold("a", ("b",), rows=(1, 3)), 4, torch.tensor([2.0, 3.0])).tolist() == [
        1,
        2,
        3,
        1,
    ]


def test_norms_that_add_one_are_divided_as_a_whole() -> None:
    norm = torch.tensor([0.5, -0.25, 0.0], dtype=torch.bfloat16)
    stored, scales = fold_into_norm(norm, torch.tensor([3.0, 0.7, 1.9]), offset=1.0)
    assert stored.dtype == torch.bfloat16
    product = (1 + stored.float()) * scales
    assert (product - (1 + norm.float())).abs().max() < 1e-6
    assert (scales - torch.tensor([3.0, 0.7, 1.9])).abs().max() < 0.05


def test_more_layers_on_disk_than_the_config_counts_are_no_layers(tmp_path: Path) -> None:
    """DeepSeek-V3 stores a layer for drafting behind the others."""
    save_model("deepseek_v3", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["model.layers.2.eh_proj.weight"] = torch.zeros(32, 64)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    assert len(architecture_of(Checkpoint(tmp_path)).layers) == 2


def test_model_types_that_transformers_does_not_know_are_named(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"llama"', '"perceptron"'))
    with pytest.raises(BadInput, match=r"config\.json is not usable: .*perceptron"):
        architecture_of(Checkpoint(tmp_path))
