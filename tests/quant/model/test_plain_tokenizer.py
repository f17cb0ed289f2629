"""Tokenizers that are read without their model's class, against transformers' choice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from llmopt.quant.families.registry import all_families
from llmopt.quant.load_processor import load_tokenizer
from llmopt.recipes import DEFAULT_MODEL, MODELS
from transformers import AutoTokenizer
from transformers.models.auto import tokenization_auto

PLAIN_TYPES = [family.name for family in all_families() if family.plain_tokenizer]
TEXT = "Of 3 tokens, <s> is one;\n\n  two  spaces é."


@pytest.mark.parametrize("model_name", [None, "internlm2"])
@pytest.mark.parametrize("model_type", PLAIN_TYPES)
def test_a_plain_tokenizer_is_the_one_that_transformers_chooses(
    model_type: str, model_name: str | None, tmp_path: Path
) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODELS / DEFAULT_MODEL / name, tmp_path)
    for name, key, value in (
        ("config.json", "model_type", model_type),
        ("config.json", "model_name", model_name),
        ("tokenizer_config.json", "tokenizer_class", "TokenizersBackend"),
    ):
        if value is None:
            continue
        held = json.loads((tmp_path / name).read_text())
        (tmp_path / name).write_text(json.dumps(held | {key: value}))
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert type(ours) is type(theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template
    assert ours(TEXT).input_ids == theirs(TEXT).input_ids


def test_transformers_replaces_no_class_of_a_plain_type() -> None:
    registered = tokenization_auto.TOKENIZER_MAPPING_NAMES
    assert not tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS & {*PLAIN_TYPES}
    assert "MistralCommonBackend" not in {registered.get(name) for name in PLAIN_TYPES}
