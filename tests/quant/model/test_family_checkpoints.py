"""Tiny models of every kind of layer through the whole pipeline, read back by us and by transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.quant.formats.registry import quantized_modules, read_quantized, tensor_names
from llmopt.quant.methods.options import MethodOptions
from llmopt.quant.model.architecture import architecture_of
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.pipeline.pipeline import QuantizeResult, quantize
from llmopt.quant.plan.request import QuantizeRequest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ...support.family_models import make_model, save_model, token_ids
from ...support.quant_support import STORIES

FAMILIES = ["mixtral", "qwen3_moe", "gemma2", "gemma3", "phi3", "deepseek_v3", "gpt_oss"]
VOCAB = 512  # of the tokenizer that is lent to them


def with_tokenizer(folder: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(STORIES / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model with a tokenizer."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("source") / name
            save_model(name, made[name], vocab_size=VOCAB)
            with_tokenizer(made[name])
        return made[name]

    return make


def run(model: Path, output: Path, **options: Any) -> QuantizeResult:
    settings: dict[str, Any] = {
        "format": "compressed-tensors",
        "symmetric": True,
        "num_samples": 12,
        "seq_len": 32,
    }
    return quantize(QuantizeRequest(model, output, **(settings | options)))


def dequantized(folder: Path, output: Path) -> Path:
    """A plain checkpoint with the weights that a quantized one stands for, as our reader has them."""
    checkpoint = Checkpoint(folder)
    modules = quantized_modules(checkpoint)
    stored = set().union(*(tensor_names(checkpoint, module) for module in modules))
    state = {f"{name}.weight": read_quantized(checkpoint, name).dequantize() for name in modules}
    state |= {name: checkpoint.tensor(name) for name in checkpoint.names if name not in stored}
    output.mkdir()
    save_file(
        {k: v.contiguous() for k, v in state.items()},
        output / "model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (output / "config.json").write_text(json.dumps(config))
    return output


def logits_of(folder: Path) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(token_ids(samples=4)).logits


@pytest.mark.sweep(8)
@pytest.mark.parametrize("method", ["rtn", "awq", "gptq"])
@pytest.mark.parametrize("name", [*FAMILIES, "granite"])
def test_a_model_of_every_family_goes_through_and_transformers_loads_it(
    source: Callable[[str], Path], tmp_path: Path, name: str, method: str
) -> None:
    model = source(name)
    result = run(model, tmp_path / "out", method=method)
    architecture = architecture_of(Checkpoint(model))
    expected = {
        f"{architecture.layer_prefix(index)}.{linear}"
        for index, family in enumerate(architecture.layers)
        for linear in family.linears
    }
    modules = {record["module"]: record for record in result.manifest["modules"]}
    assert modules.keys() == expected
    assert quantized_modules(Checkpoint(result.output)) == expected
    errors = [(record["error"], record["rtn_error"]) for record in modules.values()]
    total, rounded = (sum(column) for column in zip(*errors, strict=True))
    assert total > 0
    if method == "rtn":
        assert total <= rounded  # weighted ranges, beside plain ones
    elif method == "awq":
        assert all(error <= rtn * (1 + 1e-6) for error, rtn in errors)
        assert total < 0.95 * rounded
    else:
        assert total < 0.8 * rounded

    plain = logits_of(dequantized(result.output, tmp_path / "plain"))
    assert (logits_of(result.output) - plain).abs().max() < 1e-5
    original = logits_of(model)
    distance = (plain - original).norm() / original.norm()
    assert 0.001 < distance < 0.7


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_smoothed_models_err_no_more_than_rtn(tmp_path: Path, name: str) -> None:
    """Norms are uneven, so that scales are moved, and any that were moved wrongly would show."""
    model = make_model(name, vocab_size=VOCAB)
    with torch.no_grad():
        for path, norm in model.named_parameters():
            if "layers." in path and "layernorm" in path:
                norm[:3] = norm[:3] * 3 + (2 if name.startswith("gemma") else 0)
    model.save_pretrained(tmp_path / "model")
    source = with_tokenizer(tmp_path / "model")
    before, original = Checkpoint(source), logits_of(source)

    def distance(method: str, **options: Any) -> tuple[float, int]:
        """How far the logits go, and how many norms were scaled."""
        ranges = MethodOptions(ranges="minmax")  # weighted ones err elsewhere, and routers show it
        result = run(source, tmp_path / method, method=method, bits=8, options=ranges, **options)
        after = Checkpoint(result.output)
        norms = [tensor for tensor in before.names if "layernorm" in tensor]
        moved = sum(not torch.equal(before.tensor(norm), after.tensor(norm)) for norm in norms)
        plain = logits_of(dequantized(result.output, tmp_path / f"plain-{method}"))
        return float((plain - original).norm() / original.norm()), moved

    rounded, none = distance("rtn", group_size=-1)
    assert none == 0
    for method, options in {"awq": {"group_size": -1}, "smoothquant": {"symmetric": None}}.items():
        smoothed, moved = distance(method, **options)
        assert moved >= 1
        assert smoothed < 3 * rounded  # a scale that is moved wrongly costs far more
    assert rounded < 0.1


@pytest.mark.parametrize("method", ["fp8", "nf4"])
def test_models_without_a_map_go_by_methods_without_data(
    source: Callable[[str], Path], tmp_path: Path, method: str
) -> None:
    result = run(source("bloom"), tmp_path / "out", method=method, format=None, symmetric=None)
    modules = quantized_modules(Checkpoint(result.output))
    assert len(modules) == 8
    assert min(modules) == "transformer.h.0.mlp.dense_4h_to_h"
    before = logits_of(source("bloom"))
    after = logits_of(dequantized(result.output, tmp_path / "plain"))
    assert 0.001 < (after - before).norm() / before.norm() < 0.3


@pytest.mark.sweep(1)
@pytest.mark.parametrize("methods", [("gptq", "awq"), ("awq", "gptq")])
def test_methods_that_fold_scales_share_statistics_with_those_that_do_not(
    source: Callable[[str], Path], tmp_path: Path, methods: tuple[str, str]
) -> None:
    for method in methods:
        run(source("olmoe"), tmp_path / method, method=method, stats=tmp_path / "stats")
    errors = [
        (record["error"], record["rtn_error"])
        for record in run(
            source("olmoe"), tmp_path / "again", method="awq", stats=tmp_path / "stats"
        ).manifest["modules"]
    ]
    assert sum(error for error, _ in errors) < 0.95 * sum(rtn for _, rtn in errors)


def test_smoothing_moves_norms_and_routers_together(tmp_path: Path) -> None:
    model = make_model("mixtral", vocab_size=VOCAB)
    for layer in model.model.layers:
        layer.post_attention_layernorm.weight.data[:3] *= (
            30  # so that all experts want smaller inputs
        )
    model.save_pretrained(tmp_path / "model")
    result = run(with_tokenizer(tmp_path / "model"), tmp_path / "out", method="awq")
    before, after = Checkpoint(tmp_path / "model"), Checkpoint(result.output)
    for index in range(2):
        layer = f"model.layers.{index}"
        norm = f"{layer}.post_attention_layernorm.weight"
        gate = f"{layer}.block_sparse_moe.gate.weight"
        scales = before.tensor(norm) / after.tensor(norm)
        assert (scales - 1).abs().max() > 0.5
        assert (after.tensor(gate) / (before.tensor(gate) * scales) - 1).abs().max() < 1e-5


@pytest.mark.sweep(1)
@pytest.mark.parametrize("method", ["gptq", "awq", "smoothquant"])
def test_an_expert_without_tokens_falls_back_to_rtn_and_is_named(
    tmp_path: Path, method: str
) -> None:
    model = make_model("deepseek_v3", vocab_size=VOCAB)
    model.model.layers[1].mlp.gate.e_score_correction_bias[5] = -1e9
    model.save_pretrained(tmp_path / "model")
    result = run(
        with_tokenizer(tmp_path / "model"),
        tmp_path / "out",
        method=method,
        format=None if method == "smoothquant" else "compressed-tensors",
    )
    records = {record["module"]: record for record in result.manifest["modules"]}
    experts = "model.layers.1.mlp.experts"
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        assert records[f"{experts}.5.{leaf}"]["num_tokens"] == 0
        assert records[f"{experts}.5.{leaf}"]["error"] == 0
        if method == "gptq":
            assert "token" in records[f"{experts}.5.{leaf}"]["fallback"]
    tokens = [records[f"{experts}.{number}.up_proj"]["num_tokens"] for number in range(8)]
    assert sum(tokens) == 2 * records["model.layers.1.self_attn.o_proj"]["num_tokens"]
    if method == "gptq":
        idle = f"{experts}.5.up_proj"
        weight = load_file(tmp_path / "model" / "model.safetensors")[f"{idle}.weight"]
        codes = read_quantized(Checkpoint(result.output), idle)
        step = codes.dequantize().diff().abs()
        assert (codes.dequantize() - weight).abs().max() < step.max()
