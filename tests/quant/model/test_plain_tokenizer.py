"""Tokenizers that are read without their model's class, against transformers' choice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from llmopt.quant.base.plain_tokenizer import PlainTokenizer
from llmopt.quant.check.check import check
from llmopt.quant.families.registry import all_families
from llmopt.quant.gguf.tokenizer import tokenizer_keys
from llmopt.quant.source.load_processor import load_tokenizer
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
    whole = getattr(ours, "whole", ours)
    assert isinstance(ours, PlainTokenizer) == (model_name is None)
    assert type(whole) is type(theirs)
    assert whole.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert_same(ours, theirs)


@pytest.mark.parametrize("name", ["chat_template.json", "processor_config.json"])
def test_the_template_of_a_processor_is_that_of_the_tokenizer(name: str, tmp_path: Path) -> None:
    shutil.copytree(MODELS / DEFAULT_MODEL, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text(json.dumps({"chat_template": "{{ 1 }}"}))
    assert load_tokenizer(tmp_path).chat_template == "{{ 1 }}"
    assert tokenizer_keys(tmp_path, 512)["tokenizer.chat_template"] == "{{ 1 }}"
    codes = {finding.code for finding in check(tmp_path, ["llmopt"]).findings}
    assert "no-chat-template" not in codes
    (tmp_path / "chat_template.jinja").write_text("{{ 2 }}")
    assert load_tokenizer(tmp_path).chat_template == "{{ 2 }}"


def assert_same(ours: Any, theirs: Any) -> None:
    """The same ids, texts, vocabulary and ends, whether or not transformers is asked."""
    for text in (TEXT, "", " ", "</s> é"):
        for special in (True, False):
            ids = theirs(text, add_special_tokens=special).input_ids
            assert ours.encode(text, add_special_tokens=special) == ids
            assert ours(text, add_special_tokens=special).input_ids == ids
            decoded = theirs.decode(ids, skip_special_tokens=special)
            assert ours.decode(ids, skip_special_tokens=special) == decoded
    assert ours.get_vocab() == theirs.get_vocab() and len(ours) == len(theirs)
    for name in (
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "all_special_ids",
        "chat_template",
    ):
        assert getattr(ours, name) == getattr(theirs, name)


@pytest.mark.parametrize(
    ("changed", "plain"),
    [
        ({}, True),
        ({"add_bos_token": False}, True),
        ({"add_eos_token": True}, True),
        ({"is_local": True, "local_files_only": True}, True),
        ({"bos_token": {"__type": "AddedToken", "content": "<s>", "special": True}}, True),
        ({"chat_template": "{{ 1 }}"}, True),
        ({"eos_token": "<|new|>"}, False),
        ({"added_tokens_decoder": {"7": {"content": "<s>", "special": True}}}, False),
        ({"split_special_tokens": True}, False),
        ({"extra_special_tokens": ["<|one|>"]}, False),
    ],
)
def test_what_adds_tokens_is_left_to_transformers(
    changed: dict[str, Any], plain: bool, tmp_path: Path
) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODELS / DEFAULT_MODEL / name, tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    ours = load_tokenizer(tmp_path)
    assert isinstance(ours, PlainTokenizer) == plain
    assert_same(ours, AutoTokenizer.from_pretrained(tmp_path))


def test_a_chat_template_that_is_set_is_the_one_that_is_rendered() -> None:
    tokenizer = load_tokenizer(MODELS / DEFAULT_MODEL)
    turns = [{"role": "user", "content": "hello"}]
    for template in ("first {{ messages[0].content }}", "then {{ messages[0].role }}"):
        tokenizer.chat_template = template
        rendered = tokenizer.apply_chat_template(turns, tokenize=False)
        assert rendered in ("first hello", "then user") and rendered.split()[0] in template


def test_transformers_replaces_no_class_of_a_plain_type() -> None:
    registered = tokenization_auto.TOKENIZER_MAPPING_NAMES
    assert not tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS & {*PLAIN_TYPES}
    assert "MistralCommonBackend" not in {registered.get(name) for name in PLAIN_TYPES}
