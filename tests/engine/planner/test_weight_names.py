"""`kv-plan --weights` by every type and method name of `llmopt quantize`, against what that writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.cli.main import main
from llmopt.engine.planner.catalog import find_model
from llmopt.engine.planner.plan_request import named_recipe
from llmopt.engine.planner.weights import weight_bytes
from llmopt.quant.gguf.mix import GGUF_TYPES
from llmopt.quant.methods.registry import METHODS
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest
from llmopt.recipes import MODELS


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as stop:
        main(["kv-plan", *arguments, "--json"])
    assert stop.value.code == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", [*METHODS, *GGUF_TYPES, "exl3", "gguf", "compressed-tensors"])
def test_every_name_of_quantize_is_known(name: str) -> None:
    shape = find_model("llama-3.1-8b").shape
    size, plain = (
        weight_bytes(shape, named_recipe(name, shape)),
        weight_bytes(shape, named_recipe("bf16", shape)),
    )
    assert 0.1 * plain < size < 0.62 * plain


def test_a_name_in_capitals_is_the_same() -> None:
    shape = find_model("llama-3.1-8b").shape
    assert named_recipe("BF16", shape) == named_recipe("bf16", shape)
    assert named_recipe("FP8", shape) == named_recipe("fp8", shape)


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        # Files that llama.cpp's users publish, in GB of tensors.
        ("Q4_K_M", 4.92),
        ("Q8_0", 8.54),
        ("Q6_K", 6.60),
        ("q2_k", 3.18),
    ],
)
def test_a_mix_weighs_what_its_files_do(
    name: str, gigabytes: float, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, "llama-3.1-8b", "--weights", name, "--ctx", "4k", "--gpu", "h100")
    if name == "Q8_0":  # the planner's own q8_0 leaves embedding and head in 16 bits
        assert found["weight_bytes"] / 1e9 == pytest.approx(gigabytes, rel=0.15)
    else:
        assert found["weight_bytes"] / 1e9 == pytest.approx(gigabytes, rel=0.01)


WRITTEN: dict[str, dict[str, Any]] = {
    "Q4_K_M": {"method": "rtn", "format": "gguf", "gguf_type": "Q4_K_M"},
    "trellis:2": {"method": "trellis", "bits": 2},
    "fp4": {"method": "fp4"},
    "hqq:3": {"method": "hqq", "bits": 3},
    "squeezellm": {"method": "squeezellm"},
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", WRITTEN)
def test_predicted_bytes_are_written(name: str, tmp_path: Path) -> None:
    model, output = find_model("stories3M"), tmp_path / "out"
    request = QuantizeRequest(
        MODELS / "stories3M", output, num_samples=2, seq_len=32, **WRITTEN[name]
    )
    quantize(request)
    written = find_model(str(output)).stored_bytes
    planned = weight_bytes(
        model.shape, named_recipe(name, model.shape, plain_bytes=model.plain_bytes)
    )
    assert planned == pytest.approx(written, rel=0.03)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Q4_KM", "close: q4_k_m"),
        ("awqq", "close: awq"),
        ("exl3:9", "--bits 9: method trellis has"),
        ("int3", "no weight format 'int3'"),
    ],
)
def test_a_wrong_name_gets_the_nearest(name: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        named_recipe(name, find_model("llama-3.1-8b").shape)
