"""A QuIP# checkpoint of an odd width from end to end: solved, killed and resumed, verified, converted, run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.engine import Engine
from llmopt.engine.planner.model.weights import stored_recipe
from llmopt.quant.base.errors import BadInput
from llmopt.quant.base.progress import Silent
from llmopt.quant.base.scheme import E8pScheme
from llmopt.quant.convert.convert import convert
from llmopt.quant.convert.dequantized import dequantized_model
from llmopt.quant.convert.verify import FAILED, PROVEN, verify
from llmopt.quant.grids.e8p_grid import round_to_e8p
from llmopt.quant.methods.base import SchemeOptions
from llmopt.quant.methods.transformed import QUIP
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.pipeline.estimate import estimate_operations
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.pipeline.prepare import prepare
from llmopt.quant.request.request import QuantizeRequest
from safetensors.torch import load_file, save_file

from ...support.layer_problems import heavy_weight, one_linear
from ...support.model_families import save_model

SHAPE = {
    "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quip") / "model"
    save_model(folder, "LlamaConfig", SHAPE)
    return folder


def request_for(model: Path, output: Path, **options: Any) -> QuantizeRequest:
    usual: dict[str, Any] = {"bits": 3, "num_samples": 4, "seq_len": 32, "held_out": 0}
    return QuantizeRequest(model, output, method="quip", **{**usual, **options})


@pytest.fixture(scope="module")
def checkpoint(model: Path) -> Path:
    return quantize(request_for(model, model.parent / "out")).output


class Killed(BaseException):
    """What `kill -9` does."""


class KilledAfterALayer(Silent):
    def advance(self, count: int = 1) -> None:
        if count:  # the first call says how many layers were done
            raise Killed


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_feedback_beats_the_nearest_points(bits: int) -> None:
    weight, scheme = heavy_weight(96, 160), E8pScheme(bits)
    problem = one_linear(weight, scheme, scale_dtype=torch.float16)
    result = QUIP.quantize_layer(problem)
    report = result.reports[0]
    nearest = round_to_e8p(weight, scheme, name="model.layers.0.linear").dequantize()
    assert report.error is not None
    assert report.rtn_error == pytest.approx(problem.error("linear", nearest))
    assert report.error < 0.7 * problem.error("linear", nearest)
    effective = result.weights["linear"].dequantize()
    assert problem.error("linear", effective) == pytest.approx(report.error)


def test_other_widths_and_options_are_refused(model: Path) -> None:
    with pytest.raises(BadInput, match="--bits 5: method quip has 2, 3, 4"):
        QUIP.scheme(SchemeOptions(bits=5))
    with pytest.raises(BadInput, match="--group-size 64"):
        QUIP.scheme(SchemeOptions(group_size=64))
    with pytest.raises(BadInput, match="linear has 40 inputs: E8P codes need a multiple of 32"):
        QUIP.quantize_layer(one_linear(heavy_weight(64, 40), E8pScheme(2)))


def test_a_killed_run_ends_with_the_same_bytes(model: Path, checkpoint: Path) -> None:
    request = request_for(model, model.parent / "again")
    with pytest.raises(Killed):
        quantize(request, KilledAfterALayer())
    result = quantize(request)
    assert result.resumed_layers == 1
    for shard in checkpoint.glob("*.safetensors"):
        assert (result.output / shard.name).read_bytes() == shard.read_bytes()


def test_it_is_proven_and_has_the_logits_of_the_dequantized_weights(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    assert config == json.loads((checkpoint / "quantization_config.json").read_text())
    assert config["quant_method"] == "QUiP" and "lm_head" in config["modules_to_not_convert"]
    report = verify(checkpoint)
    assert report.status == PROVEN, report.failures
    tokens = [1, 7, 30, 5, 44, 12]
    with torch.inference_mode():
        expected = dequantized_model(checkpoint)(torch.tensor([tokens])).logits[0]
    engine = Engine(EngineConfig(checkpoint, dtype="float32", device="cpu"))
    assert (engine.prompt_logits(tokens) - expected).norm() < 1e-4 * expected.norm()


def test_the_plan_knows_its_bytes(model: Path, tmp_path: Path) -> None:
    stored = {"quant_method": "QUiP", "codebook": "E8P12RVQ3B"}
    recipe = stored_recipe({"quantization_config": stored})
    assert (recipe.label, recipe.bits) == ("e8p3 per channel", 3)
    plans = [prepare(request_for(model, tmp_path / "out", bits=bits)).plan for bits in (2, 4)]
    fewer, more = (estimate_operations(plan, tokens=128) for plan in plans)
    assert more > 1.5 * fewer


def spoil(name: str, change: Callable[[torch.Tensor], torch.Tensor], folder: Path) -> None:
    shard = next(folder.glob("*layer-00000.safetensors"))
    tensors = load_file(shard)
    full = next(each for each in tensors if each.endswith(name))
    save_file({**tensors, full: change(tensors[full]).contiguous()}, shard, {"format": "pt"})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("k_proj.had_left", lambda part: part * 2, "left factor that is not orthogonal"),
        ("k_proj.had_right", lambda part: part[:2], "right factor of (2, 3)"),
        ("k_proj.Qidxs", lambda part: part[:, 1:], "do not fit 48 × 96 weights"),
        ("k_proj.SU", lambda part: part / 0, "k_proj"),
    ],
)
def test_verify_finds_what_is_damaged(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], message: str,
    checkpoint: Path, tmp_path: Path,
) -> None:  # fmt: skip
    for path in checkpoint.iterdir():
        if path.name != "llmopt_quantization.json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    spoil(name, change, tmp_path)
    report = verify(tmp_path)
    assert report.status == FAILED
    assert any(message in failure for failure in report.failures), report.failures


def test_integers_convert_to_it_only_with_loss(model: Path, tmp_path: Path) -> None:
    request = QuantizeRequest(
        model, tmp_path / "int", method="rtn", bits=4, group_size=32, format="compressed-tensors"
    )
    source = quantize(request).output
    with pytest.raises(BadInput, match="quip"):
        convert(Checkpoint(source), "quip", tmp_path / "quip")
    convert(Checkpoint(source), "quip", tmp_path / "quip", allow_loss=True)
    assert verify(tmp_path / "quip").status == PROVEN
