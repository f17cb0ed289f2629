"""Tokenizers read from GGUF keys: the ids of the tokenizer.json they were written from, and llama.cpp's cuts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.quant.gguf.container import GgufFile, write_gguf
from llmopt.quant.gguf.keys import TEMPLATE
from llmopt.quant.gguf.read_tokenizer import read_tokenizer
from llmopt.quant.gguf.tokenizer import (
    ADDS_BOS,
    ADDS_SEPARATOR,
    EXPRESSIONS,
    IGNORES_MERGES,
    RAW_TEXT,
    tokenizer_keys,
)
from llmopt.quant.source.load_processor import load_tokenizer
from llmopt.quant.source.models import open_checkpoint
from tokenizers import Tokenizer

from tests.support.gguf_support import SPLITS, STORIES, byte_level_tokenizer, write_model

TEXTS = (
    "",
    "Once upon a time, there was a little girl named Lily.",
    "  Two spaces, a tab\tand\n\nlines \n  with  3 numbers: 1 22 333 4444 55555.",
    "It's what we'll say: DON'T! (really?) -- [x] {y} <z> @#$%^&* ½",
    "naïve café, Größe, Привет мир, 你好世界, こんにちは, 안녕하세요, 😀👍🏽",
    "<s>whole tokens</s> in a text<unk>\n\n\n",
)


def written(folder: Path, keys: dict[str, Any]) -> GgufFile:
    path = folder / "vocabulary.gguf"
    write_gguf(path, {"general.architecture": "llama", **keys}, [])
    return GgufFile(path)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Keys of a small byte-level vocabulary."""
    folder = tmp_path_factory.mktemp("byte-level")
    byte_level_tokenizer(folder, None)
    return tokenizer_keys(folder, 500)


@pytest.mark.parametrize("kind", ["sentencepiece", None, *SPLITS])
def test_ids_are_those_of_the_tokenizer_json(tmp_path: Path, kind: str | None) -> None:
    source = STORIES
    if kind != "sentencepiece":
        byte_level_tokenizer(source := tmp_path, kind)
    expected = Tokenizer.from_file(str(source / "tokenizer.json"))
    size = expected.get_vocab_size()
    read = read_tokenizer(written(tmp_path, tokenizer_keys(source, size)))
    assert len(read) == len(read.whole) == size
    for text in TEXTS:
        ids = expected.encode(text).ids
        assert read(text).input_ids == read.encode(text) == ids
        bare = read.whole.encode(text, add_special_tokens=False)
        assert read.encode(text, add_special_tokens=False) == bare
        assert read.decode(ids) == expected.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", sorted(EXPRESSIONS.keys() - RAW_TEXT))
def test_no_byte_is_lost(tmp_path: Path, byte_level: dict[str, Any], name: str) -> None:
    keys = byte_level | {"tokenizer.ggml.pre": name, "tokenizer.ggml.add_bos_token": False}
    read = read_tokenizer(written(tmp_path, keys))
    for text in TEXTS:
        assert read.decode(read(text).input_ids) == text


# What llama.cpp cuts these into (tests/owners/check_gguf_tokenizers.py asks it).
CUTS = {
    "gpt-2": ("a 1234 b", ["a", "Ġ1234", "Ġb"]),
    "smollm": ("a 1234", ["a", "Ġ", "1", "2", "3", "4"]),
    "llama-bpe": ("I'LL 12345", ["I", "'LL", "Ġ", "123", "45"]),
    "qwen2": ("a 12", ["a", "Ġ", "1", "2"]),
    "deepseek-v3": ("a#b 1234", ["a", "#b", "Ġ", "123", "4"]),
    "tekken": ("getURL HTTPServer", ["get", "URL", "ĠHTTPServer"]),
    "afmoe": ("1234567 58th", ["1", "234", "567", "Ġ", "58", "th"]),
    "superbpe": ("one two 12345", ["oneĠtwoĠ", "12", "345"]),
    "falcon": ("x=12345", ["x", "=", "123", "45"]),
    "exaone-moe": ("a b c", ["aĠbĠc"]),
    "ufakzeka": ("it's", ["it", "'s"]),
    "viking": ("a, 12", ["a", ",", "Ġ", "1", "2"]),
    "laguna": ("a\nb", ["a", "Ċ", "b"]),
}


@pytest.mark.parametrize("name", CUTS)
def test_a_text_is_cut_as_llama_cpp_cuts_it(
    tmp_path: Path, byte_level: dict[str, Any], name: str
) -> None:
    text, pieces = CUTS[name]
    read = read_tokenizer(written(tmp_path, byte_level | {"tokenizer.ggml.pre": name}))
    cut = read.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [piece for piece, _ in cut] == pieces


def test_merges_of_what_is_no_token_are_left_out(
    tmp_path: Path, byte_level: dict[str, Any]
) -> None:
    merges = "tokenizer.ggml.merges"
    plain = read_tokenizer(written(tmp_path, byte_level))
    odd = [*byte_level[merges], "no token", "noneither"]
    found = read_tokenizer(written(tmp_path, byte_level | {merges: odd}))
    assert [found(text).input_ids for text in TEXTS] == [plain(text).input_ids for text in TEXTS]


def test_special_ids_that_are_missing_or_no_token_s(tmp_path: Path) -> None:
    keys = tokenizer_keys(STORIES, 512)
    names = [f"tokenizer.ggml.{kind}_token_id" for kind in ("bos", "eos", "unknown")]
    plain = read_tokenizer(written(tmp_path, keys))
    silent = read_tokenizer(written(tmp_path, {k: v for k, v in keys.items() if k not in names}))
    assert silent("Once").input_ids == plain("Once").input_ids
    odd = read_tokenizer(written(tmp_path, keys | {"tokenizer.ggml.padding_token_id": 2**32 - 1}))
    assert odd.pad_token is None


def raw_text_keys() -> dict[str, Any]:
    """A vocabulary of Gemma 4's kind: raw text, byte tokens, newlines in runs."""
    letters = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "a",
        "b",
        "\u2581",
        "ab",
        "\u2581ab",
        "\n",
        "\n\n",
        "\n\n\n",
    ]
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": letters + bytes_,
        "tokenizer.ggml.token_type": [3, 3, 3, 2] + [1] * (len(letters) - 4) + [6] * 256,
        "tokenizer.ggml.merges": ["a b", "\u2581 ab"],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
    }


def test_raw_text_has_bytes_and_runs_of_newlines(tmp_path: Path) -> None:
    read = read_tokenizer(written(tmp_path, raw_text_keys()))
    pieces = read.convert_ids_to_tokens(read("ab ab\n\n\nbé").input_ids)
    assert pieces == ["<bos>", "ab", "\u2581ab", "\n\n\n", "b", "<0xC3>", "<0xA9>"]
    assert read.decode(read("ab ab\n\n\nbé").input_ids, skip_special_tokens=True) == "ab ab\n\n\nbé"


def test_white_space_after_tokens_of_phi3_goes(tmp_path: Path) -> None:
    keys = tokenizer_keys(STORIES, 512) | {"tokenizer.ggml.add_bos_token": False}
    plain = read_tokenizer(written(tmp_path, keys))
    phi3 = read_tokenizer(written(tmp_path, keys | {"general.name": "Phi-3 mini"}))
    assert phi3("</s>  a").input_ids == plain("</s>a").input_ids
    assert phi3("<s>  a").input_ids == plain("<s>  a").input_ids != plain("<s>a").input_ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "of kind 't5'.*tokenizer.json next to"),
        ({"tokenizer.ggml.pre": "new-one"}, "pre-tokenizer 'new-one'.*tokenizer.json next to"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokens is no list of str"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "500 tokens and 2 types: it is damaged"),
        ({"tokenizer.ggml.bos_token_id": "x"}, "bos_token_id is 'x'"),
        ({"tokenizer.ggml.model": "llama"}, "500 tokens and 0 scores: it is damaged"),
    ],
)
def test_what_cannot_be_read_is_named(
    tmp_path: Path, byte_level: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        read_tokenizer(written(tmp_path, byte_level | change))


@pytest.mark.parametrize("form", ["list", "folder", "chat_template.json", "processor_config.json"])
def test_chat_templates_have_their_keys(tmp_path: Path, form: str) -> None:
    shutil.copytree(STORIES, tmp_path, dirs_exist_ok=True)
    templates = {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}
    listed = {"chat_template": [{"name": n, "template": text} for n, text in templates.items()]}
    if form == "folder":
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "chat_template.jinja").write_text("{{ 1 }}")
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ 2 }}")
    else:
        path = tmp_path / ("tokenizer_config.json" if form == "list" else form)
        path.write_text(
            json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | listed)
        )
    keys = tokenizer_keys(tmp_path, 512)
    assert {name: value for name, value in keys.items() if "template" in name} == {
        "tokenizer.chat_template": "{{ 1 }}",
        "tokenizer.chat_template.tool_use": "{{ 2 }}",
        "tokenizer.chat_templates": ["tool_use"],
    }
    read = read_tokenizer(written(tmp_path, keys))
    assert read.chat_template == load_tokenizer(tmp_path).chat_template == templates
    assert read.apply_chat_template([{"role": "user", "content": ""}], tokenize=False) == "<s>1"
    read.save_pretrained(tmp_path / "saved")
    saved = load_tokenizer(tmp_path / "saved").chat_template
    assert saved == {name: f"{{{{ bos_token }}}}{text}" for name, text in templates.items()}


@pytest.mark.parametrize("template", ["{{ 1 }}", "{{ bos_token }}{{ 1 }}", "<s>{{ 1 }}"])
def test_a_chat_begins_with_bos_once_where_the_file_adds_it(tmp_path: Path, template: str) -> None:
    keys = tokenizer_keys(STORIES, 512) | {"tokenizer.chat_template": template}
    turns = [{"role": "user", "content": ""}]
    read = read_tokenizer(written(tmp_path, keys))
    assert read.apply_chat_template(turns, tokenize=False) == "<s>1"
    read.save_pretrained(tmp_path / "saved")
    assert read.chat_template == template
    assert load_tokenizer(tmp_path / "saved").apply_chat_template(turns, tokenize=False) == "<s>1"
    keys["tokenizer.ggml.add_bos_token"] = False
    read = read_tokenizer(written(tmp_path, keys))
    bare = "1" if template == "{{ 1 }}" else "<s>1"
    assert read.apply_chat_template(turns, tokenize=False) == bare
    read.chat_template = None
    plain = read.apply_chat_template(turns, tokenize=False, chat_template="{{ 2 }}")
    assert plain == "2"


@pytest.mark.parametrize(("declared", "written"), [(True, True), (False, False), (None, False)])
def test_flags_of_tokenizer_config_are_written(
    tmp_path: Path, declared: bool | None, written: bool
) -> None:
    """The tokenizer.json of DeepSeek-R1-Distill-Qwen adds no BOS."""
    byte_level_tokenizer(tmp_path, None)
    path = tmp_path / "tokenizer_config.json"
    flags = {"add_bos_token": declared, "add_eos_token": declared}
    path.write_text(json.dumps(json.loads(path.read_text()) | flags))
    keys = tokenizer_keys(tmp_path, 500)
    assert keys["tokenizer.ggml.add_bos_token"] is keys["tokenizer.ggml.add_eos_token"] is written


def test_files_next_to_a_gguf_file_do_not_replace_its_tokenizer(tmp_path: Path) -> None:
    """llama.cpp and transformers take the file's own; another one is for a tokenizer that is not read here."""
    path = write_model(STORIES, tmp_path / "gguf", "Q8_0")
    folder = tmp_path / "alone"
    folder.mkdir()
    alone = Path(shutil.copy(path, folder))
    ids = load_tokenizer(alone)(TEXTS[1]).input_ids
    byte_level_tokenizer(folder, None)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = json.dumps(settings | {"chat_template": "{{ 'stale' }}"})
    (folder / "tokenizer_config.json").write_text(template)
    stale = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXTS[1]).ids
    read = load_tokenizer(alone)
    assert read(TEXTS[1]).input_ids == ids != stale
    assert read.chat_template == "{{ 'stale' }}"  # the file has none
    checkpoint = open_checkpoint(alone)
    copied = Tokenizer.from_str(checkpoint.companions()["tokenizer.json"].decode())
    assert copied.encode(TEXTS[1]).ids == ids
    tokens = "tokenizer.ggml.tokens"
    assert checkpoint.source_tokenizer is not None
    assert checkpoint.source_tokenizer[tokens] == GgufFile(path).metadata[tokens]
    assert checkpoint.source_tokenizer[TEMPLATE] == "{{ 'stale' }}"  # a file made of it has it too
    file = GgufFile(path)
    named = {**file.metadata, TEMPLATE: "{{ 'own' }}"}
    assert load_tokenizer(written(folder, named).path).chat_template == "{{ 'own' }}"
    unread = written(folder, {**named, "tokenizer.ggml.model": "t5"})
    assert load_tokenizer(unread.path)(TEXTS[1]).input_ids == stale


def test_a_file_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"holds no tokenizer: put the model's tokenizer\.json"):
        read_tokenizer(written(tmp_path, {}))


def test_special_pre_tokenizers_are_known() -> None:
    assert EXPRESSIONS.keys() >= IGNORES_MERGES | ADDS_BOS | ADDS_SEPARATOR | RAW_TEXT
