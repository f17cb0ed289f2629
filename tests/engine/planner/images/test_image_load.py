"""`kv-plan --images`: tokens, encoder memory and time in the plan, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llmopt.base.errors import BadInput
from llmopt.engine.planner.explain import explain
from llmopt.engine.planner.load import parse_images
from llmopt.engine.planner.plan import DeploymentPlan
from llmopt.engine.planner.plan_json import plan_as_dict
from llmopt.engine.planner.plan_request import PlanRequest, plan_for


def _plan(
    model: str = "qwen3-vl-2b", images: str | None = "2x1024x768", **fields: str
) -> DeploymentPlan:
    return plan_for(
        PlanRequest(model, context=fields.pop("context", "16k"), images=images, gpus=("h100",))
    )


def test_images_are_in_the_plan() -> None:
    plan = plan_as_dict(_plan())
    images, parts = plan["images"], plan["param_count_by_part"]
    assert (images["tokens_per_image"], images["tokens"]) == (768, 2 * 768)
    assert images["patches_per_image"] == (1024 // 16) * (768 // 16)
    assert images["encoder_weight_bytes"] == 2 * (parts["vision"] + parts["projector"])
    assert images["embedding_bytes"] == 2 * 768 * 2048 * 2 * 4  # three levels of deepstack
    linear = 2 * (parts["vision"] * 3072 + parts["projector"] * 768)
    assert images["encode_flops"] == 2 * (linear + 4 * 24 * 1024 * 3072**2)
    assert plan["encode_ms"] > 0
    without = plan_as_dict(_plan(images=None))
    assert without["images"] is None and without["encode_ms"] is None
    assert without["weight_bytes"] == plan["weight_bytes"]


def test_more_pixels_take_more_time() -> None:
    times = [
        plan_as_dict(_plan(images=f"1x{side}x{side}"))["encode_ms"] for side in (512, 1024, 2048)
    ]
    assert times == sorted(times) and times[0] < times[2]


def test_each_formula_has_its_numbers() -> None:
    shown = {formula.name: formula for formula in explain(_plan())}
    assert shown["image tokens"].result == "1,536"
    assert {"encode", "encode, compute"} <= set(shown)


def test_a_processor_beside_the_config_sets_the_limits(tmp_path: Path) -> None:
    config = _plan().model.config
    (tmp_path / "config.json").write_text(json.dumps(config))
    limits = {"min_pixels": 4096, "max_pixels": 256 * 1024}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(limits))
    images = plan_as_dict(_plan(str(tmp_path)))["images"]
    assert 0 < images["tokens_per_image"] <= 256


@pytest.mark.parametrize(
    ("model", "images", "reason"),
    [
        ("qwen3-vl-2b", "two", "COUNTxWIDTHxHEIGHT"),
        ("qwen3-vl-2b", "0x5x5", "1 to 10000 images"),
        ("qwen3-vl-2b", "1x1000000x5", "1 to 10000 images"),
        ("qwen3-vl-2b", "40x4000x3000", "give a longer --ctx"),
        ("qwen3-vl-2b", "5000x10", "aspect ratios up to 200"),
        ("llama-70b", "1x64x64", "it takes text alone"),
        ("kimi-k2.5", "1x64x64", "no rule for the image tokens"),
    ],
)
def test_images_that_cannot_be_planned(model: str, images: str, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        _plan(model, images)


def test_one_image_needs_no_count() -> None:
    assert parse_images("640X480") == (1, 640, 480)
