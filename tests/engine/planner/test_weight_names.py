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


LLAMA_8B_BITS = {
    "IQ1_S": 2.0042,
    "IQ1_M": 2.1460,
    "IQ2_XXS": 2.3824,
    "IQ2_XS": 2.5882,
    "IQ2_S": 2.7403,
    "IQ2_M": 2.9294,
    "IQ3_XXS": 3.2548,
    "IQ3_XS": 3.4977,
    "IQ3_S": 3.6606,
    "IQ3_M": 3.7628,
    "IQ4_XS": 4.4597,
    "IQ4_NL": 4.6818,
    "Q2_K_S": 2.9697,
    "Q2_K": 3.1593,
    "Q3_K_S": 3.6429,
    "Q3_K_M": 3.9960,
    "Q3_K_L": 4.2979,
    "Q4_K_S": 4.6672,
    "Q4_K_M": 4.8944,
    "Q5_K_S": 5.5704,
    "Q5_K_M": 5.7036,
    "Q6_K": 6.5633,
    "Q8_0": 8.5008,
    "F16": 16.0005,
}
"""Bits per weight of whole files of Llama-3.1-8B, by llama.cpp's tools/quantize/README.md."""


@pytest.mark.parametrize("name", LLAMA_8B_BITS)
def test_a_gguf_type_weighs_what_its_files_do(name: str) -> None:
    shape = find_model("llama-3.1-8b").shape
    size = weight_bytes(shape, named_recipe(name.lower(), shape))
    # Files have 256 KiB of vocabulary and keys besides their tensors.
    assert 8 * size / shape.num_parameters == pytest.approx(LLAMA_8B_BITS[name], rel=4e-4)


def test_q8_0_is_that_of_gguf_in_any_case(capsys: pytest.CaptureFixture[str]) -> None:
    shape = find_model("llama-3.1-8b").shape
    assert named_recipe("q8_0", shape) == named_recipe("Q8_0", shape)
    # bartowski/Meta-Llama-3.1-8B-Instruct-GGUF: 8.54 GB.
    plan = answer(capsys, "llama-3.1-8b", "--weights", "Q8_0", "--ctx", "4k", "--gpu", "h100")
    assert plan["weight_bytes"] / 1e9 == pytest.approx(8.54, rel=0.005)
    # vLLM loads no GGUF file without a plugin.
    assert (plan["engine"], plan["beside"]) == ("llama.cpp", None)


@pytest.mark.parametrize(
    ("name", "means"), [("F16", "f16"), ("fp16", "f16"), ("bfloat16", "bf16"), ("F32", "float32")]
)
def test_plain_dtypes_have_the_names_of_engines(name: str, means: str) -> None:
    shape = find_model("llama-3.1-8b").shape
    assert named_recipe(name, shape).name == means


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
        ("Q4_KM", "close: Q4_K_M"),
        ("q8_o", "close: Q8_0"),
        ("nvpf4", "close: nvfp4"),
        ("awqq", "close: awq"),
        ("exl3:9", "--bits 9: method trellis has"),
        ("int3", "no weight format 'int3'"),
    ],
)
def test_a_wrong_name_gets_the_nearest(name: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        named_recipe(name, find_model("llama-3.1-8b").shape)
