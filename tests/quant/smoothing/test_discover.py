from __future__ import annotations

from pathlib import Path

import pytest
import torch
from llmopt.quant.families.layer_map import Fold, LayerMap
from llmopt.quant.methods.folding import column_scales, tied_scales
from llmopt.quant.model.architecture import Architecture, architecture_of
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.smoothing import smoothing_map
from llmopt.quant.smoothing.smoothing_map import with_smoothing

from ...support.family_models import MAPPED, OTHERS, save_model
from ...support.folded_models import fold_model, logits_of
from ...support.hand_kept_maps import maps_of

# Folds that can be done in the two layers of each tiny model of a type that no hand-kept map has.
OTHER_FOLDS = {
    "granite": 8,
    "stablelm": 8,
    "olmoe": 2 * (3 + 4),
    "qwen2_moe": 2 * (2 + 4 + 1),  # its value projection has a bias
    "gpt_neox": 4,
    "bloom": 4,
    "gptj": 2 + 2,
}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def discovered(name: str, folder: Path) -> Architecture:
    save_model(name, folder)
    checkpoint = Checkpoint(folder)
    return with_smoothing(checkpoint, architecture_of(checkpoint))


def pairs(family: LayerMap) -> set[tuple[object, ...]]:
    return {
        (fold.source, frozenset(fold.targets), fold.rows, fold.norm_offset)
        for fold in family.folds
        if fold.repeats == 1
    }


@pytest.mark.parametrize("name", MAPPED)
def test_the_discovered_map_is_the_hand_kept_one(tmp_path: Path, name: str) -> None:
    architecture = discovered(name, tmp_path)
    for family, known in zip(architecture.layers, maps_of(architecture), strict=True):
        expected = pairs(known)
        if name == "llama-grouped":  # by hand for as many value heads as query heads only
            expected -= {("self_attn.v_proj", frozenset({"self_attn.o_proj"}), None, 0.0)}
        assert pairs(family) == expected
        assert set(family.linears) == set(known.linears)
        assert {frozenset(group) for group in family.shared_inputs} == {
            frozenset(group) for group in known.shared_inputs
        }
        assert set(family.routers) == set(known.routers)
        # A latent's keys feed the scores too, which the hand-kept map of DeepSeek leaves out.
        scores = known.unclipped & set(known.linears)
        assert family.unclipped - {"self_attn.kv_b_proj"} == scores


@pytest.mark.parametrize("name", ["llama-grouped", *OTHERS])
def test_discovered_folds_leave_the_logits_as_they_were(tmp_path: Path, name: str) -> None:
    architecture = discovered(name, tmp_path / "plain")
    done = fold_model(tmp_path / "plain", tmp_path / "folded", architecture.layers, architecture)
    assert done == (OTHER_FOLDS | {"llama-grouped": 6})[name]  # not v → o
    before, after = logits_of(tmp_path / "plain"), logits_of(tmp_path / "folded")
    assert before.abs().max() > 0.1
    assert (after - before).abs().max() < 1e-5 * before.abs().max()


def test_grouped_heads_share_the_scales_of_their_value_head(tmp_path: Path) -> None:
    family = discovered("llama-grouped", tmp_path).layers[0]
    fold = next(fold for fold in family.folds if fold.source == "self_attn.v_proj")
    assert (fold.groups, fold.repeats) == (2, 2)
    wanted = torch.arange(1.0, 33)
    rows = tied_scales(fold, wanted)
    assert rows.shape == (16,)
    assert rows[0] == pytest.approx((1 * 9) ** 0.5)  # heads 0 and 1 read the first value head
    assert rows[8] == pytest.approx((17 * 25) ** 0.5)
    columns = column_scales(fold, rows)
    assert torch.equal(columns[:8], columns[8:16]) and torch.equal(columns[:8], rows[:8])


def test_one_row_for_each_column_keeps_the_scales() -> None:
    scales = torch.tensor([0.5, 2.0, 3.0])
    fold = Fold("a", ("b",))
    assert torch.allclose(tied_scales(fold, scales), scales)
    assert torch.equal(column_scales(fold, scales), scales)


def test_an_answer_is_kept_and_a_damaged_one_is_made_again(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = discovered("qwen3_moe", tmp_path)
    calls: list[object] = []
    really = smoothing_map.discovered_maps
    monkeypatch.setattr(
        smoothing_map, "discovered_maps", lambda raw: calls.append(raw) or really(raw)
    )
    checkpoint = Checkpoint(tmp_path)
    assert with_smoothing(checkpoint, architecture_of(checkpoint)) == first
    assert not calls
    (kept,) = (cache / "llmopt" / "smoothing").iterdir()
    kept.write_text("{")
    assert with_smoothing(checkpoint, architecture_of(checkpoint)) == first
    assert len(calls) == 1


def test_a_reader_that_is_stored_in_another_way_stops_the_fold(tmp_path: Path) -> None:
    """Fused experts cannot be multiplied along, so the norm before them is not folded into."""
    from safetensors.torch import load_file, save_file

    save_model("qwen3_moe", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in stored.items() if ".experts." not in name}
    kept["model.layers.1.mlp.experts.gate_up_proj"] = torch.zeros(4, 64, 32)
    kept["model.layers.1.mlp.experts.down_proj"] = torch.zeros(4, 32, 32)
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    checkpoint = Checkpoint(tmp_path)
    family = with_smoothing(checkpoint, architecture_of(checkpoint)).layers[1]
    assert {fold.source for fold in family.folds} == {"input_layernorm", "self_attn.v_proj"}
    assert not family.routers
