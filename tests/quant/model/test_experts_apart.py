"""Fused experts taken apart: written as linears that loaders take, and read back by the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.model.adapter.adapter import TransformersModel
from llmopt.quant.convert.verify import PROVEN, verify
from llmopt.quant.formats.registry import quantized_modules
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.model.experts import parts_of, with_experts_apart
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.plan import make_plan
from llmopt.quant.plan.request import QuantizeRequest
from transformers import AutoTokenizer

from ...support.model_families import MODELS
from ...support.releases import skip_before
from ...support.survey.case import Case, spread_weights, surveyed_types
from ...support.survey.quantized import dequantized, loaded

TOKENS = [17, 44, 23, 90, 31, 12, 55, 71, 18, 40, 66]


def saved(model_type: str, folder: Path, **changes: object) -> Case:
    """A tiny random checkpoint of a type, whose experts have weights that matter."""
    case = Case(model_type, {**surveyed_types()[model_type], **changes}, folder)
    spread_weights(case.model).save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODELS / "stories260K").save_pretrained(folder)
    case.notes["source"] = folder
    return case


def request(folder: Path, output: Path, **options: object) -> QuantizeRequest:
    return QuantizeRequest(
        folder,
        output,
        **{"method": "rtn", "format": "compressed-tensors", "errors": False, "group_size": 16}
        | options,  # pyright: ignore[reportArgumentType]
    )


def logits(folder: Path) -> tuple[object, torch.Tensor]:
    engine = Engine(EngineConfig(folder, dtype="float32", device="cpu", num_threads=1))
    return engine.runner.decoder, engine.prompt_logits(TOKENS)


def test_every_expert_is_the_slice_that_transformers_computes_with(tmp_path: Path) -> None:
    """Llama 4's are [experts, in, out], Granite's [experts, out, in]."""
    for model_type in ("llama4_text", "granitemoe"):
        case = saved(model_type, tmp_path / model_type)
        apart = with_experts_apart(Checkpoint(case.folder))
        block = "feed_forward" if model_type == "llama4_text" else "block_sparse_moe"
        name = f"model.layers.1.{block}.experts"
        whole = case.model.get_submodule(name)
        gate, up, down = (
            apart.tensor(f"{name}.5.{leaf}_proj.weight") for leaf in ("gate", "up", "down")
        )
        both, second = whole.gate_up_proj[5], whole.down_proj[5]
        if model_type == "llama4_text":
            both, second = both.T, second.T
        assert torch.equal(torch.cat((gate, up)), both) and torch.equal(down, second)
        assert apart.shape(f"{name}.5.up_proj.weight") == tuple(up.shape)
        assert apart.dtype_name(f"{name}.5.up_proj.weight") == "F32"
        assert not any(len(apart.shape(n)) == 3 for n in apart.names)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("model_type", "way"),
    [
        ("qwen3_vl_moe", "Decoder"),
        ("granitemoe", "Decoder"),
        ("llama4_text", "Decoder"),
        ("granitemoehybrid", "Decoder"),
        ("aria", "TransformersModel"),
    ],
)
def test_the_engine_computes_with_the_experts_that_were_written(
    model_type: str, way: str, tmp_path: Path
) -> None:
    if model_type == "aria":
        skip_before("5.23", "its experts are modules of another kind, which stay as they are")
    case = saved(model_type, tmp_path / "model")
    output = tmp_path / "quantized"
    quantize(request(case.folder, output))
    experts = [n for n in quantized_modules(Checkpoint(output)) if ".experts." in n]
    assert len(experts) >= 3 * 8, "no expert was quantized"
    assert verify(output).status == PROVEN
    model, got = logits(output)
    assert type(model).__name__ == way
    plain = loaded(case, dequantized(output))
    with torch.no_grad():
        expected = plain(input_ids=torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)
    with torch.no_grad():
        whole = case.model(input_ids=torch.tensor([TOKENS])).logits[0]
    assert (expected - whole).abs().max() > 0.01, "the weights were not rounded"


def test_what_loads_them_is_said_and_a_format_without_a_loader_leaves_them(tmp_path: Path) -> None:
    case = saved("granitemoe", tmp_path / "model")
    plan = make_plan(request(case.folder, tmp_path / "out"))
    assert sum(".experts." in name for name in plan.modules) == 3 * 8 * 4
    left = {"method": "nf4", "format": "bitsandbytes", "group_size": None}
    plan = make_plan(request(case.folder, tmp_path / "out", **left))
    assert not any(".experts." in name for name in plan.modules)
    assert any("stay as they are" in note for note in plan.notes)


def test_experts_that_do_not_fit_each_other_are_refused() -> None:
    shapes = {"a.experts.gate_up_proj": (4, 32, 8), "a.experts.down_proj": (4, 8, 9)}
    with pytest.raises(BadInput, match=r"a\.experts\.gate_up_proj is \[4, 32, 8\]"):
        parts_of(shapes)


def test_experts_by_themselves_are_merged_for_modules_that_keep_them_fused(tmp_path: Path) -> None:
    """Some experts quantized, the others plain."""
    case = saved("granitemoeshared", tmp_path / "model")
    output = tmp_path / "quantized"
    quantize(request(case.folder, output, ignore=(r"experts\.[0-3]\.",)))
    modules = quantized_modules(Checkpoint(output))
    assert {n.split(".experts.")[1][0] for n in modules if ".experts." in n} == {*"4567"}
    model, got = logits(output)
    assert isinstance(model, TransformersModel)
    plain = loaded(case, dequantized(output))
    with torch.no_grad():
        expected = plain(input_ids=torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)
