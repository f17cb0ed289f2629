"""Damaged values are named; sound checkpoints of every method and of other tools have no finding."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.quant.check.damage import damage
from llmopt.quant.formats.registry import read_quantized
from llmopt.quant.kinds.base.format import pack_words, unpack_words
from llmopt.quant.kinds.integer.awq import ORDER
from llmopt.quant.methods.options import MethodOptions
from llmopt.quant.methods.registry import METHODS
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest
from llmopt.quant.source.models import open_checkpoint
from llmopt.recipes import MODELS
from safetensors.torch import load_file, save_file

from ...strangers.test_checkpoints import FOLDERS
from ...support.family_models import save_model
from ...support.quant_support import QUICK, STORIES, save_layer

UP = "model.layers.1.mlp.up_proj"
QUERY = "model.layers.2.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]


def quantized(source: Path, folder: Path, **options: Any) -> Path:
    is_fp8 = options.get("format") == "fp8"
    given = {"method": "fp8", "granularity": "block"} if is_fp8 else {"method": "rtn"}
    quantize(QuantizeRequest(source, folder, errors=False, **given, **options))
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """stories3M by method rtn in a format, once for each set of options."""
    done: dict[str, Path] = {}

    def make(weight_format: str, **options: Any) -> Path:
        key = f"{weight_format} {options}"
        if key not in done:
            folder = tmp_path_factory.mktemp("written") / "model"
            done[key] = quantized(STORIES, folder, format=weight_format, **options)
        return done[key]

    return make


def damaged(source: Path, folder: Path, change: Callable[[Tensors], object]) -> Checkpoint:
    """A copy of a checkpoint of several shards whose tensors are changed."""
    shutil.copytree(source, folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for shard in set(index["weight_map"].values()):
        tensors = load_file(folder / shard)
        change(tensors)
        save_file(tensors, folder / shard)
        gone = [n for n, s in index["weight_map"].items() if s == shard and n not in tensors]
        for name in gone:
            del index["weight_map"][name]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return Checkpoint(folder)


def one(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def changed(tensors: Tensors) -> None:
        if name in tensors:
            tensors[name] = change(tensors[name]).contiguous()

    return changed


def names_of(checkpoint: Checkpoint, reference: Path | None = None) -> list[tuple[str, str]]:
    plain = None if reference is None else Checkpoint(reference)
    return [(finding.code, finding.subject) for finding in damage(checkpoint, plain)]


def test_zero_points_of_version_1_read_as_version_2(
    written: Callable[..., Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(written("gptq", symmetric=False), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["checkpoint_format"] == "gptq_v2"
    config["quantization_config"]["checkpoint_format"] = "gptq"
    (folder / "config.json").write_text(json.dumps(config))
    assert names_of(Checkpoint(folder)) == [("zero-points-off", "35 linears")]


def test_zero_points_of_one_linear(written: Callable[..., Path], tmp_path: Path) -> None:
    def change(words: torch.Tensor) -> torch.Tensor:
        zeros = unpack_words(words, 4)
        return pack_words((zeros + 1).clamp(max=15), 4)

    source = written("gptq", symmetric=False)
    checkpoint = damaged(source, tmp_path / "m", one(f"{UP}.qzeros", change))
    assert names_of(checkpoint) == [("zero-points-off", UP)]


def test_the_order_of_awq(written: Callable[..., Path], tmp_path: Path) -> None:
    def change(words: torch.Tensor) -> torch.Tensor:
        codes = unpack_words(words, 4).unflatten(-1, (-1, 8))
        return pack_words(codes[..., list(ORDER)].flatten(-2), 4)

    checkpoint = damaged(written("awq"), tmp_path / "m", one(f"{UP}.qweight", change))
    assert names_of(checkpoint) == [("packing-order", UP)]


def test_a_transposed_pack(written: Callable[..., Path], tmp_path: Path) -> None:
    source = written("gptq", symmetric=False)
    swap = one(f"{QUERY}.qweight", lambda words: words.t().reshape(words.shape))
    checkpoint = damaged(source, tmp_path / "m", swap)
    assert ("packing-order", QUERY) in names_of(checkpoint)


@pytest.mark.parametrize(
    ("code", "value"), [("not-finite", torch.nan), ("not-finite", torch.inf), ("zero-scale", 0.0)]
)
@pytest.mark.parametrize("weight_format", ["compressed-tensors", "gptq", "fp8"])
def test_scales(
    written: Callable[..., Path], tmp_path: Path, weight_format: str, code: str, value: float
) -> None:
    names = {"compressed-tensors": "weight_scale", "gptq": "scales", "fp8": "weight_scale_inv"}

    def change(scales: torch.Tensor) -> torch.Tensor:
        scales[0, 0] = value
        return scales

    source = written(weight_format)
    checkpoint = damaged(source, tmp_path / "m", one(f"{UP}.{names[weight_format]}", change))
    assert names_of(checkpoint) == [(code, UP)]


def test_a_dropped_scale(written: Callable[..., Path], tmp_path: Path) -> None:
    source = written("compressed-tensors")
    drop = lambda tensors: tensors.pop(f"{UP}.weight_scale", None)  # noqa: E731
    assert names_of(damaged(source, tmp_path / "m", drop)) == [("unreadable", UP)]


def test_a_dropped_mark(written: Callable[..., Path], tmp_path: Path) -> None:
    drop = lambda tensors: tensors.pop(f"{UP}.weight_scale_inv", None)  # noqa: E731
    checkpoint = damaged(written("fp8"), tmp_path / "m", drop)
    (finding,) = damage(checkpoint)
    assert finding.code == "unreadable" and UP in finding.message


def test_a_scale_of_another_layer_size(written: Callable[..., Path], tmp_path: Path) -> None:
    grow = one(f"{UP}.weight_scale", lambda scales: scales * 64)
    checkpoint = damaged(written("compressed-tensors"), tmp_path / "m", grow)
    assert names_of(checkpoint) == [("unlike-its-family", UP)]


def test_codes_of_fewer_bits(written: Callable[..., Path], tmp_path: Path) -> None:
    def change(words: torch.Tensor) -> torch.Tensor:
        return pack_words((unpack_words(words, 4) >> 2) + 6, 4)

    source = written("compressed-tensors")
    checkpoint = damaged(source, tmp_path / "m", one(f"{UP}.weight_packed", change))
    assert names_of(checkpoint) == [("unused-range", UP)]


def test_plain_tensors(written: Callable[..., Path], tmp_path: Path) -> None:
    norm = "model.layers.3.input_layernorm.weight"
    spoil = one(norm, lambda values: values * torch.nan)
    checkpoint = damaged(written("compressed-tensors"), tmp_path / "m", spoil)
    assert names_of(checkpoint) == [("not-finite", norm)]


EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A plain mixture of experts, and the same quantized."""
    folder = tmp_path_factory.mktemp("mixture")
    save_model("qwen3_moe", folder / "plain")
    options = {"format": "compressed-tensors", "group_size": 8}
    return folder / "plain", quantized(folder / "plain", folder / "quantized", **options)


def swapped(tensors: Tensors) -> None:
    first, second = f"{EXPERTS}.0.up_proj.", f"{EXPERTS}.1.up_proj."
    for name in [name for name in tensors if name.startswith(first)]:
        other = name.replace(first, second)
        tensors[name], tensors[other] = tensors[other], tensors[name]


def test_equal_experts(mixture: tuple[Path, Path], tmp_path: Path) -> None:
    def copy(tensors: Tensors) -> None:
        first, second = f"{EXPERTS}.0.up_proj.", f"{EXPERTS}.1.up_proj."
        for name in [name for name in tensors if name.startswith(first)]:
            tensors[name.replace(first, second)] = tensors[name].clone()

    checkpoint = damaged(mixture[1], tmp_path / "m", copy)
    assert names_of(checkpoint) == [("equal-experts", f"{EXPERTS}.1.up_proj")]


def test_swapped_experts_against_a_reference(mixture: tuple[Path, Path], tmp_path: Path) -> None:
    plain, source = mixture
    assert names_of(Checkpoint(source), plain) == []
    checkpoint = damaged(source, tmp_path / "m", swapped)
    assert names_of(checkpoint) == []
    findings = list(damage(checkpoint, Checkpoint(plain)))
    assert [finding.subject for finding in findings] == [
        f"{EXPERTS}.{number}.up_proj" for number in (0, 1)
    ]
    assert f"it holds those of {EXPERTS}.1.up_proj" in findings[0].message


def test_a_transposed_weight_against_a_reference(
    written: Callable[..., Path], tmp_path: Path
) -> None:
    source = written("fp8")
    name = "model.layers.2.self_attn.o_proj"
    weight = read_quantized(Checkpoint(source), name).dequantize()
    assert weight.shape[0] == weight.shape[1]
    turn = one(f"{name}.weight", lambda values: values.view(torch.uint8).t().contiguous())

    def both(tensors: Tensors) -> None:
        turn(tensors)
        if f"{name}.weight" in tensors:
            tensors[f"{name}.weight"] = tensors[f"{name}.weight"].view(torch.float8_e4m3fn)
            scales = f"{name}.weight_scale_inv"
            tensors[scales] = tensors[scales].t().contiguous()

    checkpoint = damaged(source, tmp_path / "m", both)
    (finding,) = damage(checkpoint, Checkpoint(STORIES))
    assert finding.subject == name and "it is transposed" in finding.message


def test_another_reference(written: Callable[..., Path]) -> None:
    other = MODELS / "stories260K"
    codes = {code for code, _ in names_of(Checkpoint(written("fp8")), other)}
    assert codes == {"not-in-reference"}


SOUND: list[dict[str, Any]] = [
    *({"method": method} for method in METHODS),
    {"method": "fp8", "granularity": "block"},
    {"method": "awq", "rotations": None, "format": "compressed-tensors"},
    {"method": "rtn", "bits": 2},
    {"method": "gptq", "bits": 3, "options": MethodOptions(act_order="dynamic")},
    {"method": "int8", "outlier_threshold": 6.0},
    {"method": "nf4", "double_quant": True},
    {"method": "Q4_K_M"},
    {"method": "awq", "kv_cache": "fp8", "format": "compressed-tensors"},
]


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_layer(tmp_path_factory.mktemp("source") / "layer")


@pytest.mark.parametrize("options", SOUND, ids=lambda options: "-".join(map(str, options.values())))
def test_sound_checkpoints_of_every_method(
    layer: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    given: dict[str, Any] = (
        {"options": MethodOptions(iters=1)} if options["method"] == "autoround" else {}
    )
    quantize(QuantizeRequest(layer, tmp_path / "m", **(QUICK | given | options)))
    assert names_of(open_checkpoint(tmp_path / "m"), layer) == []


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_sound_checkpoints_of_other_tools(folder: Path) -> None:
    assert names_of(Checkpoint(folder)) == []


@pytest.mark.parametrize("weight_format", ["compressed-tensors", "gptq", "awq", "fp8"])
def test_sound_checkpoints_of_several_layers(
    written: Callable[..., Path], weight_format: str
) -> None:
    assert names_of(Checkpoint(written(weight_format)), STORIES) == []
    assert names_of(Checkpoint(STORIES)) == []


def test_a_mock_is_told_as_one(tmp_path: Path) -> None:
    quantize(QuantizeRequest(STORIES, tmp_path / "m", "rtn", mock=True))
    (finding,) = damage(Checkpoint(tmp_path / "m"))
    assert (finding.code, finding.severity) == ("mock", "note")


def test_an_unsupported_format_is_a_note() -> None:
    folder = Path(__file__).parents[2] / "strangers" / "checkpoints" / "autoround-native-0.16.1"
    (finding,) = damage(Checkpoint(folder))
    assert (finding.code, finding.severity) == ("not-read", "note")
