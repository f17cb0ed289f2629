"""The method `quip`: block LDLQ on points of E8P, what it refuses, and what the plan knows of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.engine.planner.stored_recipe import stored_recipe
from llmopt.quant.kinds.base.kind import kind_of
from llmopt.quant.kinds.e8p.scheme import E8pScheme
from llmopt.quant.methods.options import SchemeOptions
from llmopt.quant.methods.registry import METHODS
from llmopt.quant.pipeline.estimate import estimate_operations
from llmopt.quant.pipeline.prepare import prepare
from llmopt.quant.plan.request import QuantizeRequest

from ...support.layer_problems import heavy_weight, one_linear, output_error
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


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_feedback_beats_the_nearest_points(bits: int) -> None:
    weight, scheme = heavy_weight(96, 160), E8pScheme(bits)
    problem = one_linear(weight, scheme, scale_dtype=torch.float16)
    result = METHODS["quip"].quantize_layer(problem)
    report = result.reports[0]
    nearest = (
        kind_of(scheme).round(weight, torch.float16, name="model.layers.0.linear").dequantize()
    )
    assert report.error is not None
    assert report.rtn_error == pytest.approx(output_error(problem, "linear", nearest))
    assert report.error < 0.7 * output_error(problem, "linear", nearest)
    effective = result.weights["linear"].dequantize()
    assert output_error(problem, "linear", effective) == pytest.approx(report.error)


def test_other_widths_and_options_are_refused(model: Path) -> None:
    with pytest.raises(BadInput, match="--bits 5: method quip has 2, 3, 4"):
        METHODS["quip"].scheme(SchemeOptions(bits=5))
    with pytest.raises(BadInput, match="--group-size 64"):
        METHODS["quip"].scheme(SchemeOptions(group_size=64))
    with pytest.raises(BadInput, match="linear has 40 inputs: E8P codes need a multiple of 32"):
        METHODS["quip"].quantize_layer(one_linear(heavy_weight(64, 40), E8pScheme(2)))


def test_the_plan_knows_its_bytes(model: Path, tmp_path: Path) -> None:
    stored = {"quant_method": "QUiP", "codebook": "E8P12RVQ3B"}
    recipe = stored_recipe({"quantization_config": stored})
    assert (recipe.label, recipe.bits) == ("e8p3 per channel", 3)
    plans = [prepare(request_for(model, tmp_path / "out", bits=bits)).plan for bits in (2, 4)]
    fewer, more = (estimate_operations(plan, tokens=128) for plan in plans)
    assert more > 1.5 * fewer
