"""Lists of modules in the configs of other tools, matched as their owners do."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.quant.check.coverage import skipped_by
from llmopt.quant.convert.verify import verify
from llmopt.quant.formats.compressed_tensors import FORMAT, find_group
from llmopt.quant.formats.registry import read_quantized
from llmopt.quant.kinds.base.raw import read_headers
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.model.checkpoint import SINGLE_NAME
from torch import nn
from transformers.quantizers.quantizers_utils import should_convert_module

from ...support.format_support import MODULE, assert_same, make, stored, write_checkpoint
from ...support.releases import skip_before

SYMMETRIC, ASYMMETRIC = IntScheme(4, 32, True), IntScheme(4, 32, False)


def entry(scheme: IntScheme, targets: list[str]) -> dict[str, Any]:
    group = stored("compressed-tensors", make(scheme, 64, 128))[1]["config_groups"]["group_0"]
    return {**group, "targets": targets}


TARGETS = ["Linear", "re:.*", "re:.*proj$", "re:.*up_proj$", "re:model.*", MODULE, "re:.*down.*"]


def test_overlapping_targets_are_those_of_the_library() -> None:
    """`match_targets`: names before patterns before classes, each in the order of their letters."""
    match = pytest.importorskip("compressed_tensors.utils.match")
    generator = random.Random(0)
    for _ in range(200):
        groups = [generator.sample(TARGETS, generator.randint(1, 3)) for _ in range(3)]
        owners = {target: n for n, group in enumerate(groups) for target in group}
        matched = match.match_targets(MODULE, nn.Linear(1, 1), owners)
        config = {
            "format": "pack-quantized",
            "config_groups": {
                f"g{n}": {"targets": group, "weights": {"number": n}}
                for n, group in enumerate(groups)
            },
        }
        if not matched:
            with pytest.raises(BadInput, match="no entry of config_groups is for"):
                find_group(config, MODULE)
            continue
        assert find_group(config, MODULE)[1]["weights"]["number"] == owners[matched[0]], groups


@pytest.mark.parametrize("order", itertools.permutations(["re:.*proj$", "re:.*up_proj$"]))
def test_zero_points_of_an_overlapping_group_are_kept(
    tmp_path: Path, order: tuple[str, str]
) -> None:
    """The pattern of all linears sorts first, whichever group comes first in the file."""
    tensor = make(ASYMMETRIC, 64, 128)
    tensors, config = stored("compressed-tensors", tensor)
    groups = {"re:.*proj$": entry(ASYMMETRIC, ["re:.*proj$"])}
    groups["re:.*up_proj$"] = entry(SYMMETRIC, ["re:.*up_proj$"])
    config["config_groups"] = {f"g{n}": groups[target] for n, target in enumerate(order)}
    checkpoint = write_checkpoint(tmp_path, tensors, config)
    assert_same(tensor, read_quantized(checkpoint, MODULE))
    raw = FORMAT.read_raw(read_headers([tmp_path / SINGLE_NAME]), MODULE, config)
    assert torch.equal(torch.from_numpy(raw.parts["zeros"]), tensor.parts()["zeros"])
    assert verify(tmp_path).ok


@pytest.mark.parametrize("scheme", [ASYMMETRIC, IntScheme(8, -1, False, None)])
def test_zero_points_that_the_config_denies_are_refused(tmp_path: Path, scheme: IntScheme) -> None:
    tensors, config = stored("compressed-tensors", make(scheme, 64, 128))
    config["config_groups"]["group_0"]["weights"]["symmetric"] = True
    checkpoint = write_checkpoint(tmp_path, tensors, config)
    with pytest.raises(BadInput, match=f"{re.escape(MODULE)}.weight_zero_point holds zero points"):
        read_quantized(checkpoint, MODULE)
    assert verify(tmp_path).failures == [f"{MODULE} has zero points, but its config says symmetric"]


def test_zero_points_that_are_zero_are_symmetric(tmp_path: Path) -> None:
    """Versions of the library before 0.12 stored them."""
    tensor = make(SYMMETRIC, 64, 128)
    tensors, config = stored("compressed-tensors", tensor)
    words = torch.full((8, 4), -0x77777778, dtype=torch.int32)  # 0x88888888
    tensors[f"{MODULE}.weight_zero_point"] = words
    assert_same(tensor, read_quantized(write_checkpoint(tmp_path, tensors, config), MODULE))


def test_groups_of_channels_that_the_config_denies_are_refused(tmp_path: Path) -> None:
    tensors, config = stored("compressed-tensors", make(SYMMETRIC, 64, 128))
    tensors[f"{MODULE}.weight_g_idx"] = torch.arange(128, dtype=torch.int32).flip(0) // 32
    checkpoint = write_checkpoint(tmp_path, tensors, config)
    with pytest.raises(BadInput, match=r"weight_g_idx permutes the groups"):
        read_quantized(checkpoint, MODULE)


NAMES = [
    "lm_head",
    *(f"model.layers.{n}.mlp.{leaf}" for n in (1, 11) for leaf in ("gate", "gate_proj", "up_proj")),
    "model.layers.1.mlp.shared_expert_gate",
    "model.vision_tower.layers.1.fc1",
]
LISTS = ["lm_head", "model.layers.1", "mlp.gate", "gate", "model.layers.*mlp.gate", "fc1", "[", "x"]


@pytest.mark.parametrize("listed", LISTS)
def test_plain_modules_of_fp8_are_those_of_transformers(listed: str) -> None:
    skip_before("5.23", "it reads fewer of these names as patterns")
    skipped = skipped_by({"quant_method": "fp8", "modules_to_not_convert": [listed]})
    if listed == "[":  # no pattern: transformers raises
        assert not any(map(skipped, NAMES))
        return
    theirs = {name for name in NAMES if not should_convert_module(name, [listed])}
    ours = {name for name in NAMES if skipped(name)}
    # A part of a name between dots counts too, as in older versions and for bitsandbytes in vLLM.
    assert ours == theirs | {name for name in NAMES if f".{listed}." in f".{name}."}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quant_method": "awq", "modules_to_not_convert": ["mlp.gate"]}, ["gate", "gate_proj"]),
        ({"quant_method": "bitsandbytes", "llm_int8_skip_modules": ["gate"]}, ["gate"]),
        ({"quant_method": "compressed-tensors", "ignore": ["re:.*gate$", "up"]}, ["gate"]),
        ({"quant_method": "compressed-tensors", "ignore": ["model.layers.1.mlp*"]}, []),
        ({"quant_method": "modelopt", "ignore": ["*.mlp.gate"]}, ["gate"]),
        ({"quant_method": "modelopt", "ignore": ["*.mlp.gate*"]}, ["gate", "gate_proj"]),
        ({"quant_method": "gptq", "dynamic": {"-:.*gate": {}}}, ["gate", "gate_proj"]),
        ({"quant_method": "gptq", "dynamic": {"+:.*gate_proj": {"bits": 8}, "-:.*gate": {}}}, ["gate"]),
    ],
)  # fmt: skip
def test_lists_of_other_formats(config: dict[str, Any], expected: list[str]) -> None:
    skipped = skipped_by(config)
    leaves = ("gate", "gate_proj", "up_proj")
    assert [leaf for leaf in leaves if skipped(f"model.layers.1.mlp.{leaf}")] == expected


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "compressed-tensors", "ignore": ["re:("]},
        {"quant_method": "gptq", "dynamic": {"-:(": {}}},
    ],
)
def test_an_invalid_pattern_is_one_line(config: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="which is no regular expression"):
        skipped_by(config)(MODULE)
