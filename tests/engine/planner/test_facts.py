"""A model's facts in one line, from its headers alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llmopt.base.errors import BadInput
from llmopt.engine.planner.catalog import facts_of
from llmopt.recipes import MODELS

from ...support.gguf_support import STORIES, write_model


def test_a_plain_checkpoint() -> None:
    facts = facts_of(STORIES)
    assert (facts.family, facts.weights, facts.context) == ("llama", "bfloat16", 512)
    assert facts.num_parameters and facts.stored_bytes == 2 * facts.num_parameters


def test_a_gguf_file_says_its_mix(tmp_path: Path) -> None:
    written = write_model(STORIES, tmp_path, "Q4_K_M")
    plain, packed = facts_of(STORIES), facts_of(written)
    assert packed.weights == "GGUF Q4_K_M"
    assert (packed.family, packed.num_parameters, packed.context) == (
        plain.family,
        plain.num_parameters,
        plain.context,
    )
    assert packed.line.startswith("llama, 3.") and packed.line.endswith("MiB, context 512")


@pytest.mark.parametrize(
    ("stored", "weights"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq int4"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "of tomorrow"}, "of tomorrow"),
    ],
)
def test_a_quantization_is_named(tmp_path: Path, stored: dict, weights: str) -> None:
    config = json.loads((MODELS / "stories260K" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": stored}))
    facts = facts_of(tmp_path)
    assert facts.weights == weights and facts.stored_bytes is None


def test_a_family_without_a_rule_has_no_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bloom"}))
    assert facts_of(tmp_path).line == "bloom, bfloat16"


@pytest.mark.parametrize("field", ["text_config", "quantization_config"])
def test_a_field_of_a_wrong_kind_is_refused_by_name(tmp_path: Path, field: str) -> None:
    config = json.loads((MODELS / "stories260K" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {field: "x"}))
    with pytest.raises(BadInput, match=f"{field} is 'x' in the config"):
        facts_of(tmp_path)
