"""Types with linears that stay unquantized: transformers loads what was written, and each parameter is ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.quant.convert.verify import PROVEN, verify
from llmopt.quant.methods.options import MethodOptions
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.pipeline import pipeline
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest

from tools.survey.written_columns import ReloadColumn

from ...support.quant_support import STORIES
from ...support.survey.case import Case, surveyed_types
from ...support.survey.quantized import quantized, source, written_and_loaded

# Routers and gates that are linears of transformers; experts that it merges; a mixer that it initialises.
TYPES = (
    "qwen2_moe",
    "qwen3_next",
    "qwen3_5_moe_text",
    "hunyuan_v1_moe",
    "phimoe",
    "afmoe",
    "mamba2",
    "llama4_text",
)


def case_of(model_type: str, folder: Path) -> Case:
    return Case(model_type, surveyed_types()[model_type], folder)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("model_type", TYPES)
def test_transformers_loads_every_parameter_as_we_do(tmp_path: Path, model_type: str) -> None:
    case = case_of(model_type, tmp_path)
    verdict = written_and_loaded(case, "rtn")
    assert verdict.outcome == "exact", verdict.detail
    assert ReloadColumn().verdict(case).outcome == "exact"
    report = verify(quantized(case, "rtn").folder)
    assert (report.status, report.unchecked) == (PROVEN, [])


@pytest.mark.whole
def test_weights_that_transformers_splits_are_refused_beside_codes(tmp_path: Path) -> None:
    verdict = written_and_loaded(case_of("inkling_mm_model", tmp_path), "rtn")
    assert (verdict.outcome, verdict.detail[:30]) == ("refused", "it splits mlp.w13_dn.weight, a")


def test_every_format_names_the_routers(tmp_path: Path) -> None:
    """Under the names on disk and of transformers' modules; fused experts with a pattern for those inside."""
    case = case_of("qwen2_moe", tmp_path)
    gate = "model.layers.0.mlp.shared_expert_gate"
    keys = {
        "gptq": "dynamic",
        "fp8": "modules_to_not_convert",
        "bitsandbytes": "llm_int8_skip_modules",
    }
    method = {"gptq": "rtn", "fp8": "fp8", "bitsandbytes": "nf4"}
    for name, key in keys.items():
        grid: dict[str, Any] = {"granularity": "block"} if name == "fp8" else {}
        request = QuantizeRequest(
            source(case), tmp_path / name, method=method[name], format=name, errors=False, **grid
        )
        config = Checkpoint(quantize(request).output).quantization_config or {}
        entries = list(config[key])
        assert any(gate in entry.replace("\\", "") for entry in entries), name
        assert name == "gptq" or "lm_head" in entries
    awq = QuantizeRequest(source(case), tmp_path / "awq", method="rtn", format="awq", errors=False)
    config = Checkpoint(quantize(awq).output).quantization_config or {}
    assert gate in config["modules_to_not_convert"]


def test_experts_without_codes_are_said_to_be_lost(tmp_path: Path) -> None:
    """transformers merges plain experts with none of its own rules beside packed codes, and drops them."""
    case = case_of("qwen2_moe", tmp_path)
    request = QuantizeRequest(
        source(case), tmp_path / "out", method="rtn", ignore=("experts",), errors=False
    )
    result = quantize(request)
    row = next(row for row in result.preflight.loaders if row.name == "transformers")
    assert not row.loads and "it loses model.layers.*.mlp.experts" in row.reason
    assert "transformers" not in result.loads_in


@pytest.mark.parametrize(("name", "loads"), [("compressed-tensors", True), ("gptq", False)])
def test_experts_that_a_quantizer_replaces_load_in_its_formats(
    tmp_path: Path, name: str, loads: bool
) -> None:
    """For some formats transformers unfuses Llama 4's experts, which are written apart; not for others."""
    case = case_of("llama4_text", tmp_path)
    request = QuantizeRequest(
        source(case), tmp_path / "out", method="rtn", format=name, errors=False
    )
    row = next(row for row in quantize(request).preflight.loaders if row.name == "transformers")
    assert row.loads == loads
    assert loads or row.reason == (
        "for gptq it has other names in model.layers.0.feed_forward.experts"
    )


def test_no_errors_runs_no_layer_and_reads_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def must_not_run(*_: Any, **__: Any) -> None:
        raise AssertionError("a forward pass, or calibration text")

    with_errors = quantize(
        QuantizeRequest(
            STORIES,
            tmp_path / "with",
            method="rtn",
            num_samples=2,
            seq_len=16,
            options=MethodOptions(ranges="minmax"),
        )
    )
    monkeypatch.setattr("llmopt.quant.pipeline.prepare.load_calibration", must_not_run)
    monkeypatch.setattr(torch.nn.Linear, "forward", must_not_run)
    request = QuantizeRequest(STORIES, tmp_path / "without", method="rtn", errors=False)
    result = quantize(request)
    assert result.manifest["summary"]["error"] is None
    assert result.manifest["error"] == "not measured"
    assert with_errors.manifest["error"].endswith(
        "float layer behind the quantized layers before it"
    )
    digests = [
        {record["module"]: record["sha256"] for record in one.manifest["modules"]}
        for one in (result, with_errors)
    ]
    assert digests[0] == digests[1]
    assert verify(result.output).status == PROVEN
    card = (result.output / "README.md").read_text()
    assert "output error" not in card and "The error is not measured" in card


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "gptq"}, "method gptq is calibrated"),
        ({"method": "fp8", "activations": "static"}, "static activation scales are measured"),
        ({"kv_cache": "fp8"}, "--kv-cache scales are measured"),
        ({"stats": Path("stats")}, "--stats are measured"),
        ({"revert_worse": True}, "--revert-worse compares errors"),
    ],
    ids=str,
)
def test_no_errors_is_refused_where_data_is_needed(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    settings: dict[str, Any] = {"method": "rtn", "format": "compressed-tensors", **options}
    with pytest.raises(BadInput, match=words):
        pipeline.prepare(QuantizeRequest(STORIES, tmp_path / "out", errors=False, **settings))
