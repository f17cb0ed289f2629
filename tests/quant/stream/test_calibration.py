from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.quant.stream.calibration import load_calibration
from llmopt.recipes import MODELS
from transformers import AutoTokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODELS / "stories3M")


def load(source: Path | str | None, tokenizer, samples: int = 4, length: int = 16, seed: int = 0):
    name = None if source is None else str(source)
    return load_calibration(name, tokenizer, num_samples=samples, seq_len=length, seed=seed)


def test_bundled_text_gives_full_samples(tokenizer) -> None:
    calibration = load(None, tokenizer, 64, 256)
    assert calibration.token_ids.shape == (64, 256)
    assert calibration.source == "bundled calibration.txt"
    assert int((calibration.token_ids == tokenizer.bos_token_id).sum()) > 30  # one for each story
    assert not calibration.conversations


def test_the_digest_follows_ids_and_seed(tokenizer) -> None:
    first, again, other = (load(None, tokenizer, seed=seed) for seed in (0, 0, 1))
    assert first.sha256 == again.sha256 != other.sha256
    assert torch.equal(first.token_ids, again.token_ids)
    assert load(None, tokenizer, 2, 32).sha256 != load(None, tokenizer, 4, 16).sha256


def test_text_is_split_at_blank_lines(tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("One day\nin the park.\n\n  \n\nThe dog ran.\n")
    ids = load(path, tokenizer, 1, 1000).token_ids.flatten().tolist()
    assert ids.count(tokenizer.bos_token_id) == 2
    assert sorted(ids) == sorted(
        tokenizer("One day\nin the park.")["input_ids"] + tokenizer("The dog ran.")["input_ids"]
    )


def test_little_text_gives_fewer_samples(tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("The dog ran to the park and was happy.")
    total = len(tokenizer(path.read_text())["input_ids"])
    assert load(path, tokenizer, 100, 4).token_ids.shape == (total // 4, 4)
    assert load(path, tokenizer, 100, 4096).token_ids.shape == (1, total)


CONVERSATION = [
    {"from": "human", "value": "Hello"},
    {"from": "gpt", "value": "Good day"},
]
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"


def test_conversations_go_through_the_chat_template(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "stories3M")
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"conversations": CONVERSATION}) + "\n")
    plain = load(path, tokenizer, 1, 1000)
    assert not plain.conversations
    assert "Hello\nGood day" in tokenizer.decode(plain.token_ids[0], skip_special_tokens=True)

    tokenizer.chat_template = TEMPLATE
    templated = load(path, tokenizer, 1, 1000)
    assert templated.conversations
    expected = tokenizer("[user] Hello\n[assistant] Good day\n", add_special_tokens=False)
    assert templated.token_ids[0].tolist() == expected["input_ids"]


def test_jsonl_of_texts_and_messages(tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"text": "The cat sat."}, {"messages": [{"role": "user", "content": "A dog."}]}]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    text = tokenizer.decode(load(path, tokenizer, 1, 1000).token_ids[0])
    assert "The cat sat." in text and "A dog." in text


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.txt", " \n\n ", "is empty"),
        ("empty.jsonl", "\n", "is empty"),
        ("half.jsonl", '{"text": "a"}\n{"text": ', "line 2: not JSON"),
        ("other.jsonl", '{"prompt": "a"}', "line 1 has neither"),
        ("turns.jsonl", '{"messages": [{"role": "user"}]}', "line 1 has a turn without"),
        ("texts.csv", "a,b", "neither .txt nor .jsonl"),
        ("array.json", '{"text": "a"}', "holds no array"),
        ("half.json", '[{"text": "a"}', "not valid JSON"),
        ("binary.txt", b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_bad_files_are_named(
    tokenizer, tmp_path: Path, name: str, content: str | bytes, words: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadInput, match=words) as caught:
        load(path, tokenizer)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_not_there(tokenizer, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"missing.txt does not exist"):
        load(tmp_path / "missing.txt", tokenizer)
    with pytest.raises(BadInput, match="does not exist"):
        load("data/missing.txt", tokenizer)


def test_a_hub_dataset_without_the_library_says_what_to_install(
    tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(BadInput, match=r"llmopt\[hub\]"):
        load("owner/corpus", tokenizer)


@pytest.mark.parametrize(("samples", "length"), [(0, 16), (4, 0)])
def test_no_calibration_at_all_is_refused(tokenizer, samples: int, length: int) -> None:
    with pytest.raises(BadInput, match="no calibration"):
        load(None, tokenizer, samples, length)


def test_text_that_is_too_little_is_shared_with_the_held_out_samples(
    tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("\n\n".join(f"The dog number {number} ran far away." for number in range(40)))
    calibration = load_calibration(
        str(path), tokenizer, num_samples=800, seq_len=8, seed=0, held_out=100
    )
    samples, held_out = len(calibration.token_ids), len(calibration.held_out)
    assert 6 * held_out < samples < 11 * held_out
    whole = load(path, tokenizer, 800, 8)
    assert samples + held_out >= len(whole.token_ids) - 3  # a document belongs to one side


def test_a_conversation_that_the_template_refuses_is_dropped(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "stories3M")
    tokenizer.chat_template = (
        "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}"
    ) + TEMPLATE
    path = tmp_path / "chats.json"
    path.write_text(
        json.dumps([{"conversations": CONVERSATION}, {"conversations": CONVERSATION[::-1]}])
    )
    calibration = load(path, tokenizer, 1, 1000)
    assert (calibration.conversations, calibration.refused, calibration.documents) == (1, 1, 1)


def test_a_word_is_no_calibration_text(tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "word.txt"
    path.write_text("Hello\n")
    with pytest.raises(BadInput, match=r"word.txt holds \d tokens .*, and at least 8 are needed"):
        load(path, tokenizer, 4, 32)
