"""The calibration text that ships: what is in it, which model takes it, and how much of it."""

from __future__ import annotations

import json
import shutil
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from llmopt.quant.methods.registry import METHODS
from llmopt.quant.pipeline.prepare import BUNDLED_EVALUATION, prepare
from llmopt.quant.plan.request import QuantizeRequest
from llmopt.quant.stream.calibration import check_leakage, deduplicate
from llmopt.quant.stream.sources import MIXED, STORIES, plain_text, read_documents
from llmopt.recipes import DATA, MODELS

STORIES_3M = MODELS / "stories3M"
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def mixed():
    return read_documents(MIXED)[1]


@pytest.fixture
def model_copy(tmp_path: Path) -> Path:
    """A model that does not ship, with a chat template."""
    folder = tmp_path / "model"
    shutil.copytree(STORIES_3M, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return folder


def test_the_mixed_text_holds_what_its_licence_file_says(mixed) -> None:
    notice = (DATA / "LICENSE-calibration").read_text()
    for word in ("Python Software Foundation", "MIT License", "public domain", "Apache License"):
        assert word in notice
    texts = [document for document in mixed if isinstance(document, str)]
    talks = [document for document in mixed if not isinstance(document, str)]
    assert 4_400_000 < sum(len(plain_text(document)) for document in mixed) < 5_000_000
    assert sum(map(len, map(plain_text, talks))) > 1_000_000
    assert all(turn["role"] in ("user", "assistant") for talk in talks for turn in talk)
    scripts = {
        unicodedata.name(char, "?").split()[0]
        for text in texts
        for char in text[:2000]
        if ord(char) > 127 and char.isalpha()
    }
    assert {"CYRILLIC", "CJK", "HANGUL", "ARABIC", "DEVANAGARI", "HIRAGANA", "GREEK"} <= scripts
    assert sum("    return " in text for text in texts) > 100
    assert MIXED.stat().st_size < 2**21


def test_the_mixed_text_repeats_nothing_and_holds_no_evaluation_text(mixed) -> None:
    assert len(deduplicate(mixed, plain_text)) == len(mixed)
    evaluation = [plain_text(text) for text in read_documents(str(BUNDLED_EVALUATION))[1]]
    check_leakage("mixed", [plain_text(text) for text in mixed], "evaluation", evaluation)


def test_the_bundled_models_take_stories_and_others_the_mixed_text(
    model_copy: Path, tmp_path: Path
) -> None:
    ours = prepare(QuantizeRequest(STORIES_3M, tmp_path / "out")).calibration
    assert ours.source == f"bundled {STORIES.name}"
    assert (ours.token_ids.shape, ours.held_out.shape) == ((64, 256), (8, 256))
    assert not ours.conversations
    small = QuantizeRequest(model_copy, tmp_path / "out", num_samples=64, seq_len=256)
    other = prepare(small).calibration
    assert other.source == f"bundled {MIXED.name}"
    assert 0 < other.conversations < other.documents


def test_a_method_says_how_many_samples_it_takes_on_a_gpu_and_a_cpu_takes_few(
    model_copy: Path, tmp_path: Path
) -> None:
    assert {METHODS[name].num_samples for name in ("gptq", "awq", "smoothquant")} == {512}
    config = model_copy / "config.json"
    longer = json.loads(config.read_text()) | {"max_position_embeddings": 8192}
    config.write_text(json.dumps(longer))
    request = QuantizeRequest(model_copy, tmp_path / "out", method="rtn")
    assert prepare(request).calibration.token_ids.shape == (64, 512)
    assert prepare(replace(request, num_samples=3)).calibration.token_ids.shape == (3, 512)


def test_fewer_tokens_than_inputs_give_a_warning(tmp_path: Path) -> None:
    few = QuantizeRequest(STORIES_3M, tmp_path / "out", method="gptq", num_samples=1, seq_len=256)
    (warning,) = (note for note in prepare(few).notes if "inputs" in note)
    assert "5 linears such as model.layers.0.mlp.down_proj (512 inputs)" in warning
    assert "(256)" in warning
    enough = replace(few, num_samples=2)
    assert not [note for note in prepare(enough).notes if "inputs" in note]
    assert not [note for note in prepare(replace(few, method="rtn")).notes if "inputs" in note]
