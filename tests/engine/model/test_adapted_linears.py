"""Quantized weights and LoRA adapters of models that transformers' modules run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.core.llm import LLM
from llmopt.engine.model.adapter.adapter import TransformersModel
from llmopt.engine.model.adapter.linears import ProjectedLinear
from llmopt.quant.formats.registry import quantized_modules, read_quantized
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.model.checkpoint import INDEX_NAME, Checkpoint
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest
from safetensors.torch import save_file

from ...support.lora_world import merge, write_adapter
from ...support.model_families import VOCAB, save_model
from ...support.quantized_world import write_checkpoint

TOKENS = torch.randint(3, VOCAB, (1, 40), generator=torch.Generator().manual_seed(0))
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("ArceeConfig", {}),  # packed
    "starcoder-2": ("Starcoder2Config", {"sliding_window": 9}),  # biases
    "olmoe": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),  # merged experts
}


def engine(folder: Path, **options: Any) -> Engine:
    return Engine(EngineConfig(folder, dtype="float32", device="cpu", num_threads=1, **options))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits[0]


@pytest.mark.parametrize("name", MODELS)
def test_quantized_weights_have_the_logits_of_the_dequantized_ones(
    name: str, tmp_path: Path
) -> None:
    source, folder = tmp_path / "source", tmp_path / "quantized"
    model = save_model(source, *MODELS[name])
    plain = logits(model)
    quantize(QuantizeRequest(source, folder, method="rtn", group_size=8, num_samples=2, seq_len=32))
    built = engine(folder, max_num_batched_tokens=17)
    adapted: Any = built.runner.decoder
    assert isinstance(adapted, TransformersModel)
    dequantize_into(adapted, model, Checkpoint(folder))
    expected = logits(model)
    assert (expected - plain).abs().max() > 0.01, "the weights were not rounded"
    torch.testing.assert_close(
        built.prompt_logits(TOKENS[0].tolist()), expected, atol=1e-4, rtol=1e-4
    )
    assert adapted.bytes_held < sum(p.nbytes for p in model.parameters()) - packed_bytes(adapted)


def test_scales_of_activations_in_an_awq_file_are_refused(tmp_path: Path) -> None:
    """AutoAWQ divides by them before `c_proj` (`ScaledActivation`); transformers drops unknown tensors."""
    source, folder = tmp_path / "source", tmp_path / "quantized"
    save_model(source, *MODELS["starcoder-2"])
    request = QuantizeRequest(
        source, folder, method="rtn", group_size=8, format="awq", num_samples=2, seq_len=32
    )
    quantize(request)
    save_file(
        {"model.layers.0.mlp.act.scales": torch.full((96,), 2.0)}, folder / "more.safetensors"
    )
    index = folder / INDEX_NAME
    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.0.mlp.act.scales"] = "more.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(BadInput, match=r"no place in the model.*mlp\.act\.scales"):
        engine(folder)


def packed_bytes(adapted: Any) -> int:
    """Bytes of the quantized linears: they take less than half of their float weights'."""
    linears = [m for m in adapted._model.modules() if isinstance(m, ProjectedLinear)]
    return sum(linear.site.projection.weight_bytes for linear in linears)


def dequantize_into(adapted: Any, model: Any, checkpoint: Checkpoint) -> None:
    """Round the weights of `model` as the checkpoint's are."""
    linears = {name for name, m in adapted._model.named_modules() if isinstance(m, ProjectedLinear)}
    modules = quantized_modules(checkpoint)
    assert linears == {name for name in modules if ".experts." not in name} != set()
    with torch.no_grad():
        for name in modules:
            weight = read_quantized(checkpoint, name).dequantize()
            block, _, expert = name.partition(".experts.")
            if not expert:
                model.get_submodule(name).weight.copy_(weight)
                continue
            index, _, kind = expert.partition(".")
            experts, half = model.get_submodule(f"{block}.experts"), weight.shape[0]
            if kind == "down_proj":
                experts.down_proj[int(index)].copy_(weight)
            else:
                begin = half if kind == "up_proj" else 0
                experts.gate_up_proj[int(index), begin : begin + half].copy_(weight)


GPTJ = {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 256}


@pytest.mark.parametrize(
    "model", [MODELS["arcee"], ("GPTJConfig", GPTJ)], ids=["packed", "by sequence"]
)
def test_an_adapter_changes_its_own_rows(model: Any, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", *model)
    write_adapter(tmp_path / "adapter", model, ("q_proj", "down_proj", "fc_in"))
    plain = logits(model)
    built = engine(tmp_path / "model", loras={"own": tmp_path / "adapter"})
    tokens = TOKENS[0].tolist()
    torch.testing.assert_close(built.prompt_logits(tokens), plain, atol=1e-4, rtol=1e-4)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    llm = LLM(
        tmp_path / "model", dtype="float32", num_threads=1, loras={"own": tmp_path / "adapter"}
    )
    mixed = llm.generate([tokens, tokens[:9]], params, lora=["own", None])
    alone = [
        llm.generate([prompt], params, lora=[name])[0]
        for prompt, name in ((tokens, "own"), (tokens[:9], None))
    ]
    assert [result.token_ids for result in mixed] == [result.token_ids for result in alone]
    merged = logits(merge(model, tmp_path / "adapter", 2.0))
    assert (merged - plain).abs().max() > 0.01
    torch.testing.assert_close(
        built.prompt_logits(tokens, lora="own"), merged, atol=1e-4, rtol=1e-4
    )


def test_an_adapter_on_quantized_weights_is_added(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", *MODELS["arcee"])
    write_adapter(tmp_path / "adapter", model, ("o_proj",))
    write_checkpoint(
        tmp_path / "quantized",
        model,
        "compressed-tensors",
        IntScheme(bits=8, group_size=32, symmetric=True),
    )
    tokens = TOKENS[0].tolist()
    built = engine(tmp_path / "quantized", loras={"own": tmp_path / "adapter"})
    plain = engine(tmp_path / "model", loras={"own": tmp_path / "adapter"})
    change = built.prompt_logits(tokens, lora="own") - built.prompt_logits(tokens)
    expected = plain.prompt_logits(tokens, lora="own") - plain.prompt_logits(tokens)
    assert expected.abs().mean() > 0.01
    assert (change - expected).abs().mean() < 0.3 * expected.abs().mean()
