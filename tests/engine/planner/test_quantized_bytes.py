"""Weight bytes predicted before quantizing, against what `llmopt quantize` then writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.engine.planner.catalog import find_model, stored_weight_bytes
from llmopt.engine.planner.weights import FORMATS, checkpoint_file_bytes, recipe_for, weight_bytes
from llmopt.quant.formats.registry import FORMATS as PROJECT_FORMATS
from llmopt.quant.model.checkpoint import INDEX_NAME
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest
from llmopt.recipes import MODELS
from transformers import AutoConfig, AutoModelForCausalLM

# What is asked of `llmopt quantize`, and of the planner.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "awq": ({"method": "awq"}, {"name": "int4"}),
    "awq g32": ({"method": "awq", "group_size": 32}, {"name": "int4", "group_size": 32}),
    "int4 g64 symmetric": (
        {"method": "rtn", "group_size": 64},
        {"name": "int4", "group_size": 64, "symmetric": True},
    ),
    "int4 g32 asymmetric": (
        {"method": "rtn", "group_size": 32, "symmetric": False},
        {
            "name": "int4",
            "group_size": 32,
            "symmetric": False,
            "file_format": "compressed-tensors",
        },
    ),
    "int4 channel asymmetric": (
        {"method": "rtn", "group_size": -1, "symmetric": False},
        {
            "name": "int4",
            "group_size": -1,
            "symmetric": False,
            "file_format": "compressed-tensors",
        },
    ),
    "int8 channel": ({"method": "rtn", "bits": 8, "group_size": -1}, {"name": "int8"}),
    "int8 g128 asymmetric": (
        {"method": "rtn", "bits": 8, "symmetric": False},
        {"name": "int8", "group_size": 128, "symmetric": False},
    ),
}


def written(source: Path, folder: Path, **options: Any) -> tuple[int, int]:
    """Bytes of the tensors and of the files."""
    quantize(QuantizeRequest(source, folder, num_samples=2, seq_len=32, **options))
    index = json.loads((folder / INDEX_NAME).read_text())
    files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return index["metadata"]["total_size"], files


# What is asked of `llmopt quantize`, and the planner's name for it.
FLOATS: dict[str, tuple[dict[str, Any], str]] = {
    "nvfp4": ({"method": "nvfp4"}, "nvfp4"),
    "mxfp4": ({"method": "mxfp4"}, "mxfp4"),
    "modelopt nvfp4": ({"method": "nvfp4", "format": "modelopt"}, "nvfp4"),
    "modelopt fp8 block": (
        {"method": "fp8", "format": "modelopt", "granularity": "block", "activations": "none"},
        "fp8-block",
    ),
}


@pytest.mark.parametrize("kind", FLOATS)
def test_predicted_bytes_of_floats_are_written(kind: str, tmp_path: Path) -> None:
    asked, name = FLOATS[kind]
    tensors, _ = written(MODELS / "stories3M", tmp_path / "out", errors=False, **asked)
    model = find_model("stories3M")
    recipe = recipe_for(name, model.shape, plain_bytes=model.plain_bytes)
    assert weight_bytes(model.shape, recipe) == tensors
    done = find_model(str(tmp_path / "out"))
    assert done.stored_bytes == tensors == weight_bytes(done.shape, done.as_stored())
    assert done.as_stored().label == recipe.label


@pytest.mark.parametrize(
    ("asked", "extra"),
    [
        ({"method": "nvfp4", "activations": "static", "format": "modelopt"}, 8),
        (
            {
                "method": "fp8",
                "granularity": "tensor",
                "activations": "static",
                "format": "modelopt",
            },
            8,
        ),
    ],
    ids=str,
)
def test_scales_of_inputs_are_counted(asked: dict[str, Any], extra: int, tmp_path: Path) -> None:
    tensors, _ = written(MODELS / "stories3M", tmp_path / "out", **asked)
    recipe = replace(find_model(str(tmp_path / "out")).as_stored(), stored_bytes=None)
    assert recipe.bytes_per_tensor == extra
    assert weight_bytes(find_model("stories3M").shape, recipe) == tensors


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", KINDS)
def test_predicted_bytes_are_written(kind: str, tmp_path: Path) -> None:
    asked, planned = KINDS[kind]
    tensors, files = written(MODELS / "stories3M", tmp_path / "out", **asked)
    model = find_model("stories3M")
    recipe = recipe_for(shape=model.shape, plain_bytes=model.plain_bytes, **planned)
    assert weight_bytes(model.shape, recipe) == tensors
    assert checkpoint_file_bytes(model.shape, recipe) == files
    # And afterwards, from the headers and from the config of what was written.
    done = find_model(str(tmp_path / "out"))
    assert done.stored_bytes == tensors == weight_bytes(done.shape, done.as_stored())
    assert done.as_stored().label == recipe.label


def test_every_format_that_the_planner_knows_is_predicted() -> None:
    used = {planned.get("file_format", "awq") for _, planned in KINDS.values()}
    assert used == set(FORMATS) <= set(PROJECT_FORMATS)


def test_biases_norms_and_an_untied_head_are_counted(tmp_path: Path) -> None:
    """A qwen2 with biases and one of qwen3 with norms of queries and keys, in float32."""
    for model_type in ("qwen2", "qwen3"):
        config = AutoConfig.for_model(
            model_type,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            vocab_size=512,
            max_position_embeddings=64,
            tie_word_embeddings=False,
        )
        source = tmp_path / model_type
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(source)
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            (source / name).write_bytes((MODELS / "stories3M" / name).read_bytes())
        tensors, files = written(source, tmp_path / f"{model_type}-4", method="rtn", group_size=32)
        model = find_model(str(source))
        recipe = recipe_for("int4", model.shape, 32, symmetric=True, plain_bytes=model.plain_bytes)
        assert weight_bytes(model.shape, recipe) == tensors
        assert checkpoint_file_bytes(model.shape, recipe) == files


def test_other_models_have_no_predicted_files() -> None:
    model = find_model("gpt-oss-20b")
    assert checkpoint_file_bytes(model.shape, recipe_for("int4", model.shape)) is None


def test_headers_are_summed_without_loading(tmp_path: Path) -> None:
    assert stored_weight_bytes(MODELS / "stories3M") == 2 * 3_083_008
    assert stored_weight_bytes(tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(BadInput, match="cut off or damaged"):
        stored_weight_bytes(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / INDEX_NAME).write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(BadInput, match=r"gone\.safetensors is missing"):
        stored_weight_bytes(tmp_path)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("fp8-block", 8 + 32 / (128 * 128)),
        ("mxfp8", 8.25),
        ("mxfp4", 4.25),
        ("nf4", 4.126953125),
        ("nvfp4", 4.5 + 32 / (4096 * 4096)),
        ("gptq", 4.15625 + 32 / 4096),
    ],
)
def test_bits_of_a_weight_in_other_formats(name: str, bits: float) -> None:
    model = find_model("llama-3.1-8b").shape
    recipe = recipe_for(name, model)
    (tensor,) = [
        t for t in model.tensors() if (t.out_features, t.in_features, t.count) == (4096, 4096, 32)
    ][:1]
    assert recipe.tensor_bytes(tensor) * 8 / tensor.num_elements == pytest.approx(bits, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "int8", "file_format": "awq"}, "asymmetric int4 alone"),
        ({"name": "int4", "file_format": "awq", "symmetric": True}, "asymmetric int4 alone"),
        ({"name": "int4", "file_format": "gguf"}, "no format 'gguf'"),
        ({"name": "fp8", "symmetric": True}, "no meaning for fp8"),
        ({"name": "gptq", "file_format": "awq"}, "a format itself"),
        ({"name": "int4", "group_size": 0}, "a positive number"),
    ],
)
def test_what_no_format_holds_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        recipe_for(shape=find_model("llama-3.1-8b").shape, **options)
