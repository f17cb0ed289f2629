"""Damaged checkpoints, each found by the name of its fault, and sound ones, which have none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.quant.check.check import CheckReport, check
from llmopt.quant.check.engines import Target
from llmopt.recipes import MODELS
from safetensors.torch import load_file, save_file

STRANGERS = Path(__file__).parents[2] / "strangers" / "checkpoints"
SOUND = sorted(path.parent for path in STRANGERS.glob("*/expected.safetensors"))
INT4, FP8, GPTQ = "llmcompressor-w4a16-0.14.0.1", "ct-fp8-0.20.0", "gptqmodel-v1-7.7.0"
UP = "model.layers.0.mlp.up_proj"
Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
Damage = Callable[[Tensors, Config], None]


def damaged(folder: Path, source: str, damage: Damage) -> CheckReport:
    """Check a copy of a stranger's checkpoint with a tokenizer, after `damage`."""
    shutil.copytree(STRANGERS / source, folder, dirs_exist_ok=True)
    (folder / "expected.safetensors").unlink()
    for path in (MODELS / "stories260K").glob("*token*"):
        shutil.copy(path, folder)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    damage(tensors, config)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return check(folder, ["vllm"])


def drop_scale(tensors: Tensors, config: Config) -> None:
    del tensors[f"{UP}.weight_scale"]


def drop_parameter(tensors: Tensors, config: Config) -> None:
    del tensors["model.norm.weight"]


def convert_scale(tensors: Tensors, config: Config) -> None:
    tensors[f"{UP}.weight_scale"] = tensors[f"{UP}.weight_scale"].to(torch.float64)


def lose_group(tensors: Tensors, config: Config) -> None:
    tensors[f"{UP}.scales"] = tensors[f"{UP}.scales"][:1].clone()


def transpose_pack(tensors: Tensors, config: Config) -> None:
    tensors[f"{UP}.weight"] = tensors[f"{UP}.weight"].T.contiguous()


def miss_ignore(tensors: Tensors, config: Config) -> None:
    config["quantization_config"]["ignore"] = ["model.layers.0.mlp.up_porj"]


def ignore_quantized(tensors: Tensors, config: Config) -> None:
    config["quantization_config"]["ignore"].append(UP)


def break_pattern(tensors: Tensors, config: Config) -> None:
    config["quantization_config"]["ignore"].append("re:(")


def quantize_head(tensors: Tensors, config: Config) -> None:
    for ending in ("weight_packed", "weight_scale", "weight_shape"):
        tensors[f"lm_head.{ending}"] = tensors[f"{UP}.{ending}"].clone()
    config["quantization_config"]["ignore"] = []


def target_nothing(tensors: Tensors, config: Config) -> None:
    (group,) = config["quantization_config"]["config_groups"].values()
    group["targets"].append("re:.*no_such_linear")


def overlap(tensors: Tensors, config: Config) -> None:
    groups = config["quantization_config"]["config_groups"]
    (group,) = groups.values()
    groups["second"] = group | {"targets": ["re:.*up_proj"]}
    group["targets"] = ["Linear", "re:.*mlp.*"]


def shrink_vocabulary(tensors: Tensors, config: Config) -> None:
    config["vocab_size"] *= 2


def promise_cache(tensors: Tensors, config: Config) -> None:
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "dynamic": False}


def add_cache_scale(tensors: Tensors, config: Config) -> None:
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)


def promise_mtp(tensors: Tensors, config: Config) -> None:
    config["num_nextn_predict_layers"] = 1


def end_beyond(tensors: Tensors, config: Config) -> None:
    config["eos_token_id"] = config["vocab_size"]


@pytest.mark.parametrize(
    ("source", "damage", "code"),
    [
        (INT4, drop_scale, "missing-scale"),
        (INT4, drop_parameter, "missing-parameter"),
        (INT4, convert_scale, "wrong-scale-dtype"),
        (GPTQ, lose_group, "wrong-scale-shape"),
        (FP8, transpose_pack, "transposed-weight"),
        (INT4, miss_ignore, "unused-ignore"),
        (INT4, miss_ignore, "undeclared-plain"),
        (INT4, ignore_quantized, "quantized-though-ignored"),
        (INT4, break_pattern, "bad-pattern"),
        (INT4, quantize_head, "quantized-lm-head"),
        (INT4, target_nothing, "unused-target"),
        (INT4, overlap, "overlapping-targets"),
        (INT4, shrink_vocabulary, "wrong-vocabulary"),
        (INT4, promise_cache, "missing-kv-scales"),
        (INT4, add_cache_scale, "undeclared-kv-scales"),
        (INT4, promise_mtp, "missing-mtp-layers"),
        (INT4, end_beyond, "token-beyond-vocabulary"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_fault_is_found_by_name(tmp_path: Path, source: str, damage: Damage, code: str) -> None:
    report = damaged(tmp_path, source, damage)
    codes = {finding.code for finding in report.findings}
    assert code in codes, report.findings
    if any(finding.severity == "broken" for finding in report.findings):
        assert report.exit_code == 1


def test_codes_of_no_linear_hide_no_missing_scale(tmp_path: Path) -> None:
    """Such codes, like those of a layer that was left in 8 bits, have no scale either."""

    def both(tensors: Tensors, config: Config) -> None:
        scales = [name for name in tensors if name.endswith(".weight_scale")]
        for name in scales:
            del tensors[name]
        tensors["model.extra.weight"] = torch.zeros(4, 4, dtype=torch.int8)

    findings = damaged(tmp_path, INT4, both).findings
    missing = {finding.subject for finding in findings if finding.code == "missing-scale"}
    assert len(missing) > 1 and "model.extra" in missing, findings


def test_shards_that_are_missing_cut_off_or_contradict_the_index(tmp_path: Path) -> None:
    shutil.copy(STRANGERS / INT4 / "config.json", tmp_path)
    tensors = load_file(STRANGERS / INT4 / "model.safetensors")
    names = sorted(tensors)
    first, second = "model-1-of-3.safetensors", "model-2-of-3.safetensors"
    save_file({name: tensors[name] for name in names[:-1]}, tmp_path / first)
    save_file({name: tensors[name] for name in names[-2:]}, tmp_path / second)
    weight_map = dict.fromkeys(names, first) | {names[0]: "model-3-of-3.safetensors"}
    index = json.dumps({"weight_map": weight_map})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with (tmp_path / second).open("r+b") as file:
        file.truncate((tmp_path / second).stat().st_size - 8)
    report = check(tmp_path, ["llmopt"])
    codes = {finding.code for finding in report.findings}
    assert report.exit_code == 1
    assert codes >= {"missing-shard", "missing-tensor"}
    weight_map[names[-1]] = second
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    codes = {finding.code for finding in check(tmp_path, ["llmopt"]).findings}
    assert codes >= {"missing-shard", "damaged-shard", "overlapping-shards"}


@pytest.mark.parametrize("head", [(2**60).to_bytes(8, "little"), b"\2\0\0\0\0\0\0\x0012"])
def test_a_header_that_cannot_be_read_is_a_damaged_shard(tmp_path: Path, head: bytes) -> None:
    """One that promises more bytes than memory holds, and one that is a number."""
    shutil.copytree(STRANGERS / INT4, tmp_path, dirs_exist_ok=True)
    (tmp_path / "expected.safetensors").unlink()
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(head + data[len(head) :])
    report = check(tmp_path, ["llmopt"])
    assert "damaged-shard" in {finding.code for finding in report.findings}
    assert report.exit_code == 1


def test_end_tokens_and_companions(tmp_path: Path) -> None:
    def nothing(tensors: Tensors, config: Config) -> None:
        pass

    damaged(tmp_path, INT4, nothing)
    config = json.loads((tmp_path / "config.json").read_text())
    wrong = {"eos_token_id": (config["eos_token_id"] or 0) + 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(wrong))
    codes = {finding.code for finding in check(tmp_path, ["llmopt"]).findings}
    assert "end-tokens-differ" in codes and "no-generation-config" not in codes
    (tmp_path / "generation_config.json").write_text("{")
    codes = {finding.code for finding in check(tmp_path, ["llmopt"]).findings}
    assert "damaged-json" in codes
    for path in tmp_path.glob("*token*"):
        path.unlink()
    codes = {finding.code for finding in check(tmp_path, ["llmopt"]).findings}
    assert "missing-tokenizer" in codes


def test_heads_and_groups_are_counted_on_each_rank() -> None:
    report = check(STRANGERS / INT4, ["vllm"], Target(tensor_parallel=3))
    assert {"heads-per-rank"} <= {finding.code for finding in report.findings}
    report = check(STRANGERS / INT4, ["sglang"], Target(tensor_parallel=4))
    assert "whole groups of 32" in report.engines[0].reason


@pytest.mark.parametrize("folder", SOUND, ids=lambda folder: folder.name)
def test_sound_checkpoints_of_other_tools_are_not_accused(folder: Path) -> None:
    codes = {finding.code for finding in check(folder, ["llmopt"]).findings}
    allowed = {"missing-tokenizer", "no-generation-config"}
    overlaps = {"overlapping-targets"} if "overlap" in folder.name else set()
    assert codes == allowed | overlaps


def test_the_bundled_models_are_sound() -> None:
    for name in ("stories3M", "stories260K"):
        findings = check(MODELS / name, ["llmopt"]).findings
        assert [finding for finding in findings if finding.severity != "note"] == []
