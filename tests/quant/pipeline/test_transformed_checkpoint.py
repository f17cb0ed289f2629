"""Checkpoints of codes between transforms (EXL3, QuIP#): resumed, proven, run, damaged, and converted to."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.base.progress import Silent
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.quant.convert.convert import convert
from llmopt.quant.convert.verify import FAILED, PROVEN, verify
from llmopt.quant.methods.options import MethodOptions
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest
from safetensors.torch import load_file, save_file

from ...support.dequantized import dequantized_model
from ...support.model_families import save_model
from ...support.native_paths import needs_compiler

LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256}
# The widths of quip are odd ones, times 32.
SHAPES: dict[str, dict[str, Any]] = {
    "trellis": {
        **LAYERS, "hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4,
    },
    "quip": {**LAYERS, "hidden_size": 96, "intermediate_size": 160, "num_key_value_heads": 2},
}  # fmt: skip
MIXED: dict[str, dict[str, Any]] = {
    "trellis": {"bits": 2, "overrides": (r"down_proj$=bits:3",)},
    "quip": {"bits": 3},
}
pytestmark = needs_compiler  # the searches of codes
TUNED = MethodOptions(asymmetric=True, finetune_steps=6, batch_size=2)


@pytest.fixture(scope="module", params=["quip", "trellis"])
def method(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, method: str) -> Path:
    folder = tmp_path_factory.mktemp(method) / "model"
    save_model(folder, "LlamaConfig", SHAPES[method])
    return folder


def request_for(model: Path, output: Path, method: str) -> QuantizeRequest:
    """Tuned towards the float model, whose states each layer needs beside the quantized ones."""
    return QuantizeRequest(
        model, output, method=method, options=TUNED, num_samples=4, seq_len=32, held_out=0,
        **MIXED[method],
    )  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(model: Path, method: str) -> Path:
    return quantize(request_for(model, model.parent / "out", method)).output


class Killed(BaseException):
    """What `kill -9` does."""


class KilledAfterALayer(Silent):
    def __init__(self) -> None:
        self.layers = 0.0

    def advance(self, count: float = 1) -> None:
        self.layers += count
        if self.layers > 0.999:  # steps within a layer are parts of one
            raise Killed


@pytest.mark.sweep(1)
def test_a_killed_run_ends_with_the_same_bytes(model: Path, checkpoint: Path, method: str) -> None:
    request = request_for(model, model.parent / "again", method)
    with pytest.raises(Killed):
        quantize(request, KilledAfterALayer())
    result = quantize(request)
    assert result.resumed_layers == 1
    for file in checkpoint.iterdir():
        assert (result.output / file.name).read_bytes() == file.read_bytes(), file.name


def test_it_is_proven_and_has_the_logits_of_the_dequantized_weights(
    checkpoint: Path, method: str
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    assert config == json.loads((checkpoint / "quantization_config.json").read_text())
    report = verify(checkpoint)
    assert report.status == PROVEN, report.failures
    tokens = [1, 7, 30, 5, 44, 12]
    with torch.inference_mode():
        expected = dequantized_model(checkpoint)(torch.tensor([tokens])).logits[0]
    engine = Engine(EngineConfig(checkpoint, dtype="float32", device="cpu"))
    assert (engine.prompt_logits(tokens) - expected).norm() < 1e-4 * expected.norm()


def test_integers_convert_to_it_only_with_loss(model: Path, method: str, tmp_path: Path) -> None:
    target = {"trellis": "exl3", "quip": "quip"}[method]
    request = QuantizeRequest(
        model, tmp_path / "int", method="rtn", bits=4, group_size=32, format="compressed-tensors"
    )
    source = quantize(request).output
    with pytest.raises(BadInput, match=target):
        convert(Checkpoint(source), target, tmp_path / target)
    convert(Checkpoint(source), target, tmp_path / target, allow_loss=True)
    assert verify(tmp_path / target).status == PROVEN


def test_to_integers_it_converts_only_with_loss(checkpoint: Path, tmp_path: Path) -> None:
    target = "compressed-tensors"
    with pytest.raises(BadInput, match="--allow-loss requantizes it to"):
        convert(Checkpoint(checkpoint), target, tmp_path / target)
    assert not (tmp_path / target).exists()


def without_manifest(checkpoint: Path, copy: Path) -> Path:
    """A copy that is judged by its contents, as one of another tool is."""
    shutil.copytree(checkpoint, copy, ignore=shutil.ignore_patterns("llmopt_quantization.json"))
    return copy


def change_tensor(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    shard = next(folder.glob("*layer-00000.safetensors"))
    tensors = load_file(shard)
    full = next(each for each in tensors if each.endswith(name))
    save_file({**tensors, full: change(tensors[full]).contiguous()}, shard, {"format": "pt"})


def first_rows(part: torch.Tensor) -> torch.Tensor:
    return part[:2]


DAMAGES: list[tuple[str, str, Callable[[torch.Tensor], torch.Tensor], str]] = [
    ("quip", "k_proj.had_left", lambda part: part * 2, "left factor that is not orthogonal"),
    ("quip", "k_proj.had_right", first_rows, "right factor of (2, 3)"),
    ("quip", "k_proj.Qidxs", lambda part: part[:, 1:], "do not fit 48 × 96 weights"),
    ("quip", "k_proj.SU", lambda part: part / 0, "k_proj"),
    ("trellis", "k_proj.trellis", lambda part: part[..., :16], "has 1 bits a weight, and 2 in"),
    ("trellis", "k_proj.suh", lambda part: part[:-16], "do not fit (128, 128)"),
    ("trellis", "k_proj.svh", lambda part: part / 0, "k_proj"),
]


def test_verify_finds_what_is_damaged(checkpoint: Path, method: str, tmp_path: Path) -> None:
    damages = [damage[1:] for damage in DAMAGES if damage[0] == method]
    for number, (name, change, message) in enumerate(damages):
        copy = without_manifest(checkpoint, tmp_path / str(number))
        change_tensor(copy, name, change)
        report = verify(copy)
        assert report.status == FAILED
        assert any(message in failure for failure in report.failures), report.failures


def test_scales_that_are_missing_and_shards_that_are_cut_off_are_named(
    checkpoint: Path, method: str, tmp_path: Path
) -> None:
    scales = {"trellis": "q_proj.suh", "quip": "q_proj.SU"}[method]
    copy = without_manifest(checkpoint, tmp_path / "missing")
    shard = next(copy.glob("*layer-00000.safetensors"))
    kept = {name: part for name, part in load_file(shard).items() if not name.endswith(scales)}
    save_file(kept, shard, {"format": "pt"})
    with pytest.raises(BadInput, match=rf"lacks '.*{scales}'"):
        verify(copy)
    copy = without_manifest(checkpoint, tmp_path / "cut")
    shard = next(copy.glob("*layer-00001.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-500])
    with pytest.raises(BadInput, match=r"layer-00001\.safetensors is cut off"):
        verify(copy)
