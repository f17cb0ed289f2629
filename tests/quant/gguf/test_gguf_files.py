"""GGUF files: the container, whole models as their owner reads them, and what is wrong with a broken one."""

from __future__ import annotations

import gc
import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llmopt.base.errors import BadInput
from llmopt.quant.formats.registry import quantized_modules, read_quantized, tensor_names
from llmopt.quant.gguf.architecture import (
    architecture_keys,
    from_gguf,
    gguf_families,
    rope_factors,
    to_gguf,
    to_halves,
    to_interleaved,
)
from llmopt.quant.gguf.assemble import assemble, check_source, planned_bytes
from llmopt.quant.gguf.checkpoint import GgufCheckpoint
from llmopt.quant.gguf.container import TYPE_NUMBERS, GgufFile, TensorToWrite, write_gguf
from llmopt.quant.gguf.read_config import config_of, stored_config
from llmopt.quant.gguf.tokenizer import tokenizer_keys
from llmopt.quant.kinds.ggml.formats import BLOCKS_SUFFIX, GgufFormat
from llmopt.quant.kinds.ggml.scheme import GgufScheme
from llmopt.quant.kinds.ggml.tensor import dequantize_blocks, quantize_blocks
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.source.models import open_checkpoint, resolve_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ...support.gguf_support import (
    RANDOM_MODELS,
    SPLITS,
    STORIES,
    byte_level_tokenizer,
    linears_of,
    random_model,
    write_model,
)


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """stories3M as Q4_K_M."""
    return write_model(STORIES, tmp_path_factory.mktemp("stories"), "Q4_K_M")


@pytest.fixture
def damaged(stories: Path, tmp_path: Path) -> Any:
    """Write a changed copy of the file's bytes, and open it."""

    def open_changed(data: bytes) -> GgufCheckpoint:
        path = tmp_path / "changed.gguf"
        path.write_bytes(data)
        return GgufCheckpoint(path)

    return open_changed


VALUES: dict[str, Any] = {
    "a.text": "Grüße, 世界",
    "a.flag": True,
    "a.count": 7,
    "a.share": 0.5,
    "a.words": ["", "one", "▁two"],
    "a.numbers": [1, -2, 3],
    "a.scores": [0.0, -1.5],
}


def test_a_file_gives_back_what_was_written(tmp_path):
    path = tmp_path / "a.gguf"
    first, second = np.arange(12, dtype=np.float32), bytes(range(36))
    tensors = [
        TensorToWrite(
            "x.weight", (3, 4), "F32", lambda: [first[:5].tobytes(), first[5:].tobytes()]
        ),
        TensorToWrite("y.weight", (2, 32), "Q4_0", lambda: [second]),
    ]
    write_gguf(path, VALUES, tensors)
    read = GgufFile(path)
    assert read.metadata == VALUES
    assert [(t.name, t.shape, t.type) for t in read.tensors.values()] == [
        ("x.weight", (3, 4), "F32"),
        ("y.weight", (2, 32), "Q4_0"),
    ]
    assert read.data("x.weight").tobytes() == first.tobytes()
    assert read.data("y.weight").tobytes() == second
    assert all(tensor.start % 32 == 0 for tensor in read.tensors.values())
    assert [p.name for p in tmp_path.iterdir()] == ["a.gguf"]


def test_a_header_is_read_again_where_it_changed(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for text in ("first", "other"):
        write_gguf(tmp_path / "new.gguf", {"general.name": text}, [])
        data = (tmp_path / "new.gguf").read_bytes()
        path.write_bytes(data)  # of the same size, at once, in the same file
        found = GgufFile(path)
        assert found.metadata["general.name"] == text
        assert GgufFile(path).metadata is found.metadata
        found.release()
        assert GgufFile(path).metadata is not found.metadata


def test_the_owner_reads_the_container(tmp_path):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "a.gguf"
    data = bytes(range(36))
    write_gguf(path, VALUES, [TensorToWrite("y.weight", (2, 32), "Q4_0", lambda: [data])])
    reader = gguf.GGUFReader(path)
    assert {name: reader.fields[name].contents() for name in VALUES} == VALUES
    assert reader.tensors[0].data.tobytes() == data
    assert all(gguf.GGMLQuantizationType[n].value == number for n, number in TYPE_NUMBERS.items())


def test_nothing_half_written_remains(tmp_path):
    path = tmp_path / "a.gguf"
    with pytest.raises(ValueError, match="gave 3 bytes"):
        write_gguf(path, {}, [TensorToWrite("x", (4,), "F32", lambda: [b"abc"])])
    assert not list(tmp_path.iterdir())


@settings(max_examples=60, deadline=None)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_that_is_cut_off_anywhere_says_so(stories, tmp_path_factory, share):
    data = stories.read_bytes()
    path = tmp_path_factory.getbasetemp() / "cut.gguf"
    # Half of the cuts go through the header, where the structure is.
    path.write_bytes(data[: int(share * (len(data) if share > 0.5 else 20_000))])
    with pytest.raises(BadInput, match=r"cut\.gguf"):
        GgufCheckpoint(path)


@settings(max_examples=60, deadline=None)
@given(position=st.integers(0, 15_000), value=st.integers(0, 255))
@example(position=255, value=0)  # no heads
@example(position=273, value=10)  # a line end in the name of a key
def test_a_damaged_byte_is_an_error_of_one_line_or_harmless(
    stories, tmp_path_factory, position, value
):
    data = bytearray(stories.read_bytes())
    data[position] = value
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(data)
    try:
        GgufCheckpoint(path)
    except BadInput as error:
        assert "damaged.gguf" in str(error) and "\n" not in str(error)


def test_foreign_and_other_files_are_named(stories, damaged):
    data = stories.read_bytes()
    with pytest.raises(BadInput, match="does not begin with 'GGUF'"):
        damaged(b"GGML" + data[4:])
    with pytest.raises(BadInput, match="version 2: this reads version 3"):
        damaged(b"GGUF" + struct.pack("<I", 2) + data[8:])
    with pytest.raises(BadInput, match="big-endian file: convert it"):
        damaged(b"GGUF" + struct.pack(">I", 3) + data[8:])
    count = struct.unpack("<Q", data[16:24])[0]
    for name, message in ((b"general.file_type", "key general.file_type twice"), (b"", "no name")):
        key = struct.pack("<Q", len(name)) + name + struct.pack("<II", 4, 1)
        with pytest.raises(BadInput, match=message):
            damaged(data[:16] + struct.pack("<Q", count + 1) + key + data[24:])
    with pytest.raises(BadInput, match="architecture 'blama' is not read"):
        damaged(data.replace(b"llama", b"blama", 1).replace(b"blama.context", b"llama.context"))
    with pytest.raises(BadInput, match=r"lacks the key llama\.block_count"):
        damaged(data.replace(b"llama.block_count", b"llama.block_coumt", 1))
    with pytest.raises(BadInput, match="has no place in the models"):
        damaged(data.replace(b"blk.0.attn_q.weight", b"blk.0.attn_x.weight", 1))
    name = b"blk.0.attn_q.weight"
    at = data.index(name) + len(name) + 4 + 16
    with pytest.raises(BadInput, match=r"attn_q\.weight' has ggml type 99, which is not read here"):
        damaged(data[:at] + struct.pack("<I", 99) + data[at + 4 :])
    with pytest.raises(BadInput, match="cannot be read"):
        GgufCheckpoint(stories.with_name("missing.gguf"))


def test_names_and_rows_go_over_and_back():
    for family in gguf_families().values():
        for stem in family.stems:
            module = f"model.layers.11.{stem}"
            name = to_gguf(module.replace(".experts.", ".experts.5."), family.architecture)
            assert name is not None and from_gguf(name, family) == module
        assert from_gguf("token_embd", family) == "model.embed_tokens"
        is_dense = "num_experts_per_tok" not in family.keys
        assert (from_gguf("blk.0.ffn_gate_exps", family) is None) == is_dense
    assert to_gguf("model.layers.0.mlp.experts.0.w9") is None
    assert to_gguf("model.layers.3.mlp.experts.7.up_proj") == "blk.3.ffn_up_exps"
    rows = torch.arange(16).view(16, 1)
    mixed = to_interleaved(rows, 2)
    assert mixed.flatten().tolist()[:8] == [0, 4, 1, 5, 2, 6, 3, 7]
    assert torch.equal(to_halves(mixed, 2), rows)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_K_M"])
@pytest.mark.parametrize("name", RANDOM_MODELS)
def test_a_model_comes_back_as_its_blocks(name, type_name, tmp_path):
    source = Checkpoint(random_model(tmp_path / "source", name))
    path = write_model(source.folder, tmp_path / "out", type_name)
    read = open_checkpoint(path)
    linears = linears_of(source)
    heads = {"lm_head"} & {n.removesuffix(".weight") for n in read.names} | (
        {"lm_head"} if "lm_head.gguf_blocks" in read else set()
    )
    assert quantized_modules(read) == set(linears) | heads
    for module in linears:
        scheme = GgufScheme(read.quantization_config["types"][module])
        expected = quantize_blocks(source.tensor(f"{module}.weight").float(), scheme.type)
        assert torch.equal(read_quantized(read, module).parts()["data"], expected)
        assert tensor_names(read, module) == {f"{module}.gguf_blocks"}
    for one in source.names:
        assert (one in read) == (one.removesuffix(".weight") not in quantized_modules(read))
        if source.tensor(one).dim() == 1:
            # Gemma's norms are stored with 1 added.
            stored = source.tensor(one).float()
            torch.testing.assert_close(read.tensor(one), stored, atol=3e-7, rtol=0)
    embedding = "model.embed_tokens.weight"
    assert read.shape(embedding) == tuple(read.tensor(embedding).shape) == source.shape(embedding)
    assert (read.tensor(embedding) - source.tensor(embedding)).abs().max() < 0.06
    assert read.weight_bytes == path.stat().st_size
    for key in ("hidden_size", "num_key_value_heads", "vocab_size", "tie_word_embeddings"):
        assert read.config[key] == source.config[key]
    assert read.config["head_dim"] == (128 if name == "qwen3" else 64)
    assert architecture_keys(read.config) == architecture_keys(source.config)


# transformers gives no Llama from GGUF a bias, so that one is left out.
@pytest.mark.parametrize("name", ["stories", "llama", "qwen2", "qwen3"])
def test_transformers_loads_it_with_the_same_weights(name, stories, tmp_path):
    pytest.importorskip("gguf")
    if name == "stories":
        path = stories
    else:
        path = write_model(random_model(tmp_path / "source", name), tmp_path / "out", "Q4_K_M")
    theirs: Any = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    state, read = theirs.state_dict(), open_checkpoint(path)
    for one in quantized_modules(read):
        torch.testing.assert_close(
            state[f"{one}.weight"], read_quantized(read, one).dequantize(), atol=0, rtol=0
        )
    for one in read.names:
        if not one.endswith(".gguf_blocks"):
            assert torch.equal(state[one], read.tensor(one))


def test_a_head_of_other_values_than_its_tied_embedding_is_not_lost(tmp_path):
    """transformers 5 takes it for untied, as a merge of a trained head leaves it."""
    folder = shutil.copytree(STORIES, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    check_source(Checkpoint(folder))
    tensors["lm_head.weight"][7] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(BadInput, match=r"lm_head\.weight of its own.*tie_word_embeddings"):
        check_source(Checkpoint(folder))


def test_a_config_beside_the_file_must_belong_to_it(stories, tmp_path):
    shutil.copy(stories, tmp_path)
    config = json.loads((STORIES / "config.json").read_text())
    yarn = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0}
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_parameters": yarn}))
    read = open_checkpoint(tmp_path)
    assert read.config["rope_parameters"] == yarn
    assert read.quantization_config["quant_method"] == "gguf"
    others = {"num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 16}
    others |= {"rms_norm_eps": 1e-3, "rope_theta": 5.0}
    for name, value in others.items():
        changed = config | {"rope_parameters": None, name: value}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(BadInput, match=rf"{name} {value}.*do not belong together"):
            open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear' in the config: an object is needed"),
        ({"rope_theta": "10000"}, "rope_theta is '10000' in the config: a number is needed"),
        ({"rms_norm_eps": True}, "rms_norm_eps is True in the config: a number is needed"),
        ({"rope_parameters": {"rope_theta": "10"}}, "rope_theta is '10': a number is needed"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_type 'llama3' lacks factor"),
    ],
)
def test_a_config_beside_the_file_of_wrong_values(stories, tmp_path, field, message):
    shutil.copy(stories, tmp_path)
    config = json.loads((STORIES / "config.json").read_text()) | {"rope_parameters": None}
    (tmp_path / "config.json").write_text(json.dumps(config | field))
    with pytest.raises(BadInput, match=re.escape(message)):
        open_checkpoint(tmp_path)


def test_a_type_that_is_not_written_is_compared_by_its_sizes(stories, tmp_path):
    """llama.cpp converts some types under another's architecture, such as Olmo 3 as olmo2."""
    shutil.copy(stories, tmp_path)
    config = json.loads((STORIES / "config.json").read_text()) | {"model_type": "olmo3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (file,) = tmp_path.glob("*.gguf")
    assert stored_config(GgufFile(file))["model_type"] == "olmo3"


def test_a_config_of_llama_3_does_not_belong_to_a_file_of_llama_3_1(tmp_path):
    """They have equal sizes, and the file has factors of frequencies that the config does not name."""
    source = Checkpoint(random_model(tmp_path / "source", "llama-bias"))
    shutil.copy(write_model(source.folder, tmp_path / "out", "Q8_0"), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(source.config))
    assert open_checkpoint(tmp_path).config["rope_parameters"]["rope_type"] == "llama3"
    rope = {"rope_type": "default", "rope_theta": source.config["rope_parameters"]["rope_theta"]}
    (tmp_path / "config.json").write_text(json.dumps(source.config | {"rope_parameters": rope}))
    with pytest.raises(BadInput, match=r"rope_type 'default'.*rope_freqs.*do not belong together"):
        open_checkpoint(tmp_path)


def test_which_file_a_folder_means(stories, tmp_path):
    shutil.copy(stories, tmp_path / "one.gguf")
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(str(tmp_path / "one.gguf")) == tmp_path / "one.gguf"
    assert isinstance(open_checkpoint(tmp_path), GgufCheckpoint)
    shutil.copy(stories, tmp_path / "two.gguf")
    with pytest.raises(BadInput, match=r"one\.gguf, two\.gguf"):
        open_checkpoint(tmp_path)
    assert not isinstance(open_checkpoint(STORIES), GgufCheckpoint)


def test_parts_of_a_model_are_refused(stories, tmp_path):
    whole = GgufFile(stories)
    path = tmp_path / "part-00001-of-00002.gguf"
    write_gguf(path, whole.metadata | {"split.count": 2}, [])
    with pytest.raises(BadInput, match="one part of several"):
        GgufCheckpoint(path)
    write_gguf(path, whole.metadata, [])
    with pytest.raises(BadInput, match=r"lacks tensor token_embd\.weight"):
        GgufCheckpoint(path)


def test_llama3_rope_goes_over_as_factors(tmp_path):
    source = Checkpoint(random_model(tmp_path / "source", "llama-bias"))
    file = GgufFile(write_model(source.folder, tmp_path / "out", "Q8_0"))
    factors = rope_factors(source.config)
    assert factors is not None and float(factors[0]) == 1 and float(factors.max()) <= 8
    assert config_of(file)["rope_parameters"] == source.config["rope_parameters"] | {
        "original_max_position_embeddings": 8192
    }


def test_rope_scalings(tmp_path):
    config = json.loads((STORIES / "config.json").read_text())
    linear = config | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    keys = architecture_keys(linear)
    assert keys["llama.rope.scaling.type"] == "linear"
    assert keys["llama.rope.scaling.factor"] == 2.0
    yarn = config | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    assert architecture_keys(yarn)["llama.rope.scaling.original_context_length"] == 512
    with pytest.raises(BadInput, match="rope_type 'yarn' with"):
        architecture_keys(config | {"rope_scaling": {"rope_type": "yarn", "beta_fast": 3}})


def test_what_gguf_has_no_words_for(tmp_path, model_copy):
    config = json.loads((STORIES / "config.json").read_text())
    for change, message in (
        ({"model_type": "gemma9"}, "model type 'gemma9'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"model_type": "mistral", "sliding_window": 64}, "sliding window of 64"),
    ):
        with pytest.raises(BadInput, match=message):
            architecture_keys(config | change)
    check_source(Checkpoint(model_copy))
    path = model_copy / "tokenizer.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"model": {"type": "Unigram", "vocab": []}}))
    with pytest.raises(BadInput, match="a Unigram tokenizer"):
        check_source(Checkpoint(model_copy))
    path.write_text(json.dumps(content))
    with pytest.raises(BadInput, match="has ids up to 511, the embedding has 500 rows"):
        tokenizer_keys(model_copy, 500)
    byte_level_tokenizer(tmp_path / "odd", None)
    path = tmp_path / "odd" / "tokenizer.json"
    path.write_text(path.read_text().replace('"ByteLevel","add_prefix', '"Whitespace","add_prefix'))
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"pre_tokenizer": {"type": "Digits"}}))
    with pytest.raises(BadInput, match=r"Digits.*known are gpt-2, phi-2"):
        tokenizer_keys(tmp_path / "odd", 512)


def test_tokenizers(tmp_path):
    keys = tokenizer_keys(STORIES, 514)
    assert keys["tokenizer.ggml.model"] == "llama"
    assert keys["tokenizer.ggml.tokens"][-2:] == ["[PAD512]", "[PAD513]"]
    assert keys["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]
    assert keys["tokenizer.ggml.token_type"][-3:] == [1, 5, 5]
    assert keys["tokenizer.ggml.add_bos_token"] is True
    assert keys["tokenizer.ggml.add_eos_token"] is False
    assert keys["tokenizer.ggml.add_space_prefix"] is True
    scores = keys["tokenizer.ggml.scores"]
    assert min(scores) < -100 and max(scores) == 0
    for split in (None, *SPLITS):
        byte_level_tokenizer(tmp_path / str(split), split)
        found = tokenizer_keys(tmp_path / str(split), 512)
        assert found["tokenizer.ggml.model"] == "gpt2"
        assert found["tokenizer.ggml.pre"] == (split or "gpt-2")
        assert found["tokenizer.ggml.add_bos_token"] is False
        assert len(found["tokenizer.ggml.merges"]) > 100


def test_the_tokenizer_is_read_once_until_it_changes(
    model_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def counted(folder: Path, vocab_size: int, ends: frozenset[int]) -> dict[str, Any]:
        read.append(folder)
        return tokenizer_keys(folder, vocab_size, ends)

    monkeypatch.setattr("llmopt.quant.gguf.assemble.tokenizer_keys", counted)
    source = Checkpoint(model_copy)
    check_source(source)
    before = planned_bytes(source, [], "Q4_0", "model")
    assert len(read) == 1
    (model_copy / "chat_template.jinja").write_text("{{ messages[0].content }}" * 9)
    assert planned_bytes(source, [], "Q4_0", "model") > before
    assert len(read) == 2


def test_integer_codes_become_blocks(tmp_path):
    from llmopt.quant.kinds.integer.kind import round_to_nearest
    from safetensors.torch import save_file

    source, scheme = Checkpoint(STORIES), IntScheme(4, 64, True)
    stored, expected = {}, {}
    for name, tensor in source.tensors("model.layers."):
        module = name.removesuffix(".weight")
        if module in linears_of(source):
            codes = round_to_nearest(tensor.float(), scheme, torch.float16)
            expected[module] = codes.dequantize()
            stored |= GgufFormat().pack(module, codes)
        else:
            stored[name] = tensor
    save_file(stored, tmp_path / "layers.safetensors")
    path = tmp_path / "a.gguf"
    assemble(
        source, [tmp_path / "layers.safetensors"], path, dict.fromkeys(expected, scheme), "Q4_0"
    )
    (tmp_path / "layers.safetensors").unlink()
    read = open_checkpoint(tmp_path)
    for module, weight in expected.items():
        assert torch.equal(read_quantized(read, module).dequantize(), weight)
    embedding = read.tensor("model.embed_tokens.weight")
    rounded = quantize_blocks(source.tensor("model.embed_tokens.weight"), "Q6_K")
    assert torch.equal(embedding, dequantize_blocks(rounded, "Q6_K"))


def test_the_format_refuses_what_it_cannot_hold():
    weight_format = GgufFormat()
    weight_format.check("q", 8, 64, IntScheme(8, -1, True))
    with pytest.raises(BadInput, match="cannot hold int4 g32 asym"):
        weight_format.check_scheme(IntScheme(4, 32, False))
    with pytest.raises(BadInput, match="64 inputs, no multiple of the 256 weights in a Q4_K"):
        weight_format.check("q", 8, 64, GgufScheme("Q4_K"))
    config = weight_format.config({"q": IntScheme(4, 32, True)}, ["lm_head"])
    assert config["types"] == {"q": "Q4_0"}
    assert weight_format.scheme(config, "q") == GgufScheme("Q4_0")
    with pytest.raises(BadInput, match="gives k no GGUF type"):
        weight_format.scheme(config, "k")


def test_blocks_in_the_mapped_file_outlive_its_checkpoint(stories: Path) -> None:
    checkpoint = GgufCheckpoint(stories)
    names = [name for name in checkpoint.names if name.endswith(BLOCKS_SUFFIX)]
    held = {name: checkpoint.tensor(name) for name in names}
    copies = {name: tensor.clone() for name, tensor in held.items()}
    checkpoint.release()
    del checkpoint
    gc.collect()
    assert held
    assert all(torch.equal(held[name], copy) for name, copy in copies.items())
