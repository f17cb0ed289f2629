"""Header keys of GGUF files: what each does to the model, and that none is left out in silence."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.quant.families.spec_parts import yarn_scale
from llmopt.quant.gguf.architecture import architecture_keys
from llmopt.quant.gguf.container import GgufFile, TensorToWrite, write_gguf
from llmopt.quant.gguf.keys import end_keys, end_tokens
from llmopt.quant.gguf.read_config import config_of, stored_config
from llmopt.quant.gguf.read_tokenizer import read_tokenizer
from llmopt.quant.source.models import open_checkpoint
from transformers import AutoConfig

from ...support.gguf_support import RANDOM_MODELS, STORIES, random_model, write_model

SIZES = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def header(folder: Path, name: str, sizes: dict[str, int] = SIZES, **changes: Any) -> GgufFile:
    """A file with the keys of one of `RANDOM_MODELS` and as many tensors as a config needs.

    `changes` are keys of the architecture, `__` for a point; None takes one away.
    """
    options: dict[str, Any] = {**sizes, **RANDOM_MODELS[name], "head_dim": 16}
    if "query_pre_attn_scalar" in options:
        options["query_pre_attn_scalar"] = 144 if sizes["num_hidden_layers"] == 46 else 16
    config = AutoConfig.for_model(options.pop("model_type"), **options).to_dict()
    keys = architecture_keys(config)
    prefix = keys["general.architecture"]
    for key, value in changes.items():
        full = f"{prefix}.{key.replace('__', '.')}"
        keys = {k: v for k, v in keys.items() if k != full}
        keys |= {} if value is None else {full: value}
    tensors = [
        TensorToWrite(name, (32, 64), "F32", lambda: [bytes(4 * 32 * 64)])
        for name in ("token_embd.weight", "output_norm.weight")
    ]
    write_gguf(folder / "m.gguf", keys, tensors)
    return GgufFile(folder / "m.gguf")


def test_a_mixture_of_qwen_is_normalised_as_llama_cpp_does(tmp_path: Path) -> None:
    assert config_of(header(tmp_path, "qwen3_moe"))["norm_topk_prob"] is True
    config = {"model_type": "qwen3_moe", "head_dim": 16, "num_experts": 4, **SIZES}
    with pytest.raises(BadInput, match="norm_topk_prob False cannot be written"):
        architecture_keys(config)  # transformers' default


def test_gemma_2_of_46_layers_scales_by_its_hidden_size(tmp_path: Path) -> None:
    large = SIZES | {"num_hidden_layers": 46, "hidden_size": 576}
    read = config_of(header(tmp_path, "gemma2", large))
    assert (read["head_dim"], read["query_pre_attn_scalar"]) == (16, 144)
    assert config_of(header(tmp_path, "gemma2"))["query_pre_attn_scalar"] == 16
    config = {"model_type": "gemma2", "head_dim": 16, **large, "query_pre_attn_scalar": 16}
    with pytest.raises(
        BadInput, match="query_pre_attn_scalar 16 cannot be written as GGUF: only 144"
    ):
        architecture_keys(config)


def test_granite_without_multipliers_has_those_of_llama_cpp(tmp_path: Path) -> None:
    none = {"attention__scale": None, "embedding_scale": 0.0, "residual_scale": None}
    read = config_of(header(tmp_path, "granite", **none))
    names = ("attention_multiplier", "embedding_multiplier", "residual_multiplier")
    assert [read[name] for name in names] == [0.25, 1.0, 1.0]
    with pytest.raises(BadInput, match=r"finetuned is False.*Granite without RoPE"):
        config_of(header(tmp_path, "granite", rope__scaling__finetuned=False))
    with pytest.raises(BadInput, match=r"lacks the key granite\.logit_scale"):
        config_of(header(tmp_path, "granite", logit_scale=None))


def test_of_two_spellings_of_rope_the_one_is_written_that_transformers_takes() -> None:
    both = {
        "rope_parameters": {"rope_type": "default"},
        "rope_scaling": {"type": "linear", "factor": 4.0},
    }
    keys = architecture_keys({"model_type": "llama", **SIZES, **both})
    assert keys["llama.rope.scaling.factor"] == 4.0
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    lengths = {"rope_parameters": yarn, "original_max_position_embeddings": 32}
    keys = architecture_keys({"model_type": "qwen2", **SIZES, **lengths})
    assert keys["qwen2.rope.scaling.original_context_length"] == 32
    part = {"rope_type": "default", "partial_rotary_factor": 0.75}
    with pytest.raises(BadInput, match=r"partial_rotary_factor 0\.75 cannot be written"):
        architecture_keys({"model_type": "phi3", **SIZES, "rope_parameters": part})


def test_models_that_attend_to_later_tokens_are_refused() -> None:
    config = {"model_type": "qwen2", **SIZES, "is_causal": False}
    with pytest.raises(BadInput, match="is_causal False cannot be written as GGUF"):
        architecture_keys(config)


def test_phi_3_keeps_its_window(tmp_path: Path) -> None:
    assert config_of(header(tmp_path, "phi", attention__sliding_window=64))["sliding_window"] == 64
    assert config_of(header(tmp_path, "phi", attention__sliding_window=0))["sliding_window"] is None


YARN = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 4.0,
    "rope__scaling__original_context_length": 64,
}
IN_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {"rope_type": "default"}),
    "factor alone": ({"rope__scaling__factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "older name": ({"rope__scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "both names": (
        {"rope__scale_linear": 4.0, "rope__scaling__factor": 2.0},
        {"rope_type": "linear", "factor": 2.0},
    ),
    "zero": ({"rope__scaling__factor": 0.0}, {"rope_type": "default"}),
    "none": (
        {"rope__scaling__type": "none", "rope__scaling__factor": 4.0},
        {"rope_type": "default"},
    ),
    "yarn": (YARN, IN_YARN),
    "betas": (
        YARN | {"rope__scaling__yarn_beta_fast": 8.0, "rope__scaling__yarn_beta_slow": 2.0},
        IN_YARN | {"beta_fast": 8.0, "beta_slow": 2.0},
    ),
    "log multiplier": (
        YARN | {"rope__scaling__yarn_log_multiplier": 0.1},
        IN_YARN | {"attention_factor": 1.0},
    ),
    "log multiplier of Mistral": (
        YARN | {"rope__scaling__yarn_log_multiplier": 1.0},
        IN_YARN | {"attention_factor": 1.0},
    ),
    "attention factor": (
        YARN | {"rope__scaling__yarn_attn_factor": 1.5},
        IN_YARN | {"attention_factor": 1.5},
    ),
    "usual attention factor": (
        YARN | {"rope__scaling__yarn_attn_factor": yarn_scale(4.0)},
        IN_YARN,
    ),
    "attn_factor": (
        YARN | {"rope__scaling__attn_factor": 0.5},
        IN_YARN | {"attention_factor": 0.5 * yarn_scale(4.0)},
    ),
    "extrapolation": (YARN | {"rope__scaling__yarn_ext_factor": 1.0}, IN_YARN),
}


@pytest.mark.parametrize("kind", ROPES)
def test_rope_keys_are_those_of_the_config(tmp_path: Path, kind: str) -> None:
    keys, expected = ROPES[kind]
    read = config_of(header(tmp_path, "llama", **keys))["rope_parameters"]
    assert read == {"rope_theta": 10000.0, **expected}


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "unknown": ("llama", {"warp_factor": 9}),
    "of another family": ("llama", {"attn_logit_softcapping": 50.0}),
    "window": ("llama", {"attention__sliding_window": 64}),
    "experts of another kind": ("qwen3_moe", {"expert_weights_scale": 2.5}),
    "sigmoid": ("qwen3_moe", {"expert_gating_func": 2}),
    "not normalised": ("qwen3_moe", {"expert_weights_norm": False}),
    "shared experts": ("mixtral", {"expert_shared_count": 1}),
    "clamped": ("llama", {"attention__clamp_kqv": 8.0}),
    "both ways": ("llama", {"attention__causal": False}),
    "reranker": ("qwen3", {"pooling_type": 4}),
    "sections": ("qwen2", {"rope__dimension_sections": [4, 2, 2, 0]}),
    "another pattern": ("gemma2", {"attention__sliding_window_pattern": 6}),
    "another base": ("gemma2", {"rope__freq_base_swa": 500.0}),
    "part of a head": ("llama", {"rope__dimension_count": 8}),
    "narrow values": ("llama", {"attention__value_length": 8}),
    "text for a number": ("llama", {"rope__freq_base": "big"}),
    "no number": ("llama", {"attention__layer_norm_rms_epsilon": float("nan")}),
    "heads of each layer": ("llama", {"attention__head_count_kv": [2, 1]}),
    "OLMo 3": ("olmo2", {"attention__sliding_window": 64}),
    "longrope": ("phi", {"rope__scaling__type": "longrope"}),
    "factor without yarn": ("llama", {"rope__scaling__attn_factor": 1.2}),
    "extrapolation without yarn": ("llama", {"rope__scaling__yarn_ext_factor": 1.0}),
    "multiplier": ("llama", YARN | {"rope__scaling__yarn_log_multiplier": 0.7}),
    "attention": ("llama", YARN | {"rope__scaling__yarn_attn_factor": 1.0}),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_key_that_is_not_followed_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    name, changes = WRONG[kind]
    key = list(changes)[-1].replace("__", ".")
    file = header(tmp_path, name, **changes)
    with pytest.raises(BadInput, match=rf"m\.gguf: .*\.{key} is ") as error:
        config_of(file)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_keys_that_change_nothing_are_read_over(tmp_path: Path) -> None:
    harmless = {
        "vocab_size": 99,
        "expert_count": 0,
        "expert_used_count": 0,
        "attention__sliding_window": 0,
        "attention__clamp_kqv": 0.0,
        "attention__causal": True,
        "tensor_data_layout": "Meta AI original pth",
        "rope__scaling__finetuned": False,
    }
    plain = config_of(header(tmp_path, "llama"))
    assert config_of(header(tmp_path, "llama", **harmless)) == plain


def test_a_config_next_to_the_file_answers_for_its_keys(tmp_path: Path) -> None:
    file = header(tmp_path, "llama", warp_factor=9)
    config = {**SIZES, "model_type": "llama", "pad_token_id": 7}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert stored_config(file) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_type": "default"}, "rope_type 'default', but m.gguf beside it has yarn"),
        ({"rope_type": "linear"}, "rope_type 'linear', but m.gguf beside it has yarn"),
        ({"factor": 8.0}, "factor 8.0, but m.gguf beside it has 4.0"),
        (
            {"original_max_position_embeddings": 128},
            "original_max_position_embeddings 128, but m.gguf beside it has 64.0",
        ),
    ],
)
def test_a_config_of_another_scaling_does_not_belong_to_the_file(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    file = header(tmp_path, "llama", **YARN)
    rope = {"rope_theta": 10000.0, **IN_YARN}
    config = {**SIZES, "model_type": "llama", "head_dim": 16, "rope_parameters": rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert stored_config(file) == config
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_parameters": rope | change}))
    with pytest.raises(BadInput, match=re.escape(message)):
        stored_config(file)


def test_longrope_is_read_from_the_config_next_to_the_file(tmp_path: Path) -> None:
    """The converter writes no type, half of the heads' widths, and the factors as tensors."""
    source = random_model(tmp_path / "source", "phi")
    written = GgufFile(write_model(source, tmp_path / "out", "Q8_0"))
    tensors = [
        TensorToWrite(name, info.shape, info.type, lambda name=name: [written.data(name).tobytes()])
        for name, info in written.tensors.items()
    ]
    ones = [1.0] * 16
    for kind in ("long", "short"):
        factors = TensorToWrite(f"rope_factors_{kind}.weight", (16,), "F32", lambda: [bytes(64)])
        tensors.append(factors)
    path = tmp_path / "phi" / "m.gguf"
    path.parent.mkdir()
    write_gguf(path, written.metadata | {"phi3.rope.dimension_count": 32}, tensors)
    with pytest.raises(BadInput, match=r"rope\.dimension_count is 32.*config\.json next to"):
        open_checkpoint(path)
    write_gguf(path, written.metadata, tensors)
    with pytest.raises(BadInput, match="rope_factors_long"):
        open_checkpoint(path)
    write_gguf(path, written.metadata | {"phi3.rope.dimension_count": 32}, tensors)
    config = json.loads((source / "config.json").read_text())
    rope = {"rope_type": "longrope", "short_factor": ones, "long_factor": ones}
    config["rope_parameters"] |= rope | {"partial_rotary_factor": 0.5}
    (path.parent / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(path).config["rope_parameters"] == config["rope_parameters"]


def test_the_table_in_the_documentation_is_the_present_one() -> None:
    tool = Path(__file__).parents[3] / "tools" / "gguf_keys.py"
    checked = subprocess.run([sys.executable, tool, "--check"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_every_key_of_the_gguf_package_has_a_treatment() -> None:
    gguf = pytest.importorskip("gguf")
    page = (Path(__file__).parents[3] / "docs" / "measured" / "gguf-keys.md").read_text(
        encoding="utf-8"
    )
    keys = gguf.constants.Keys
    groups = (keys.LLM, keys.Attention, keys.Rope, keys.SSM, keys.Classifier, keys.Tokenizer)
    names = [name for group in groups for name in vars(group).values() if isinstance(name, str)]
    for prefix in ("{arch}.", "tokenizer.ggml."):
        short = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        assert len(short) > 20
        assert [name for name in short if f"`{name}`" not in page and "{" not in name] == []


def test_an_unknown_key_of_the_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    written = write_model(STORIES, tmp_path / "written", "Q8_0")
    metadata = GgufFile(written).metadata
    path = tmp_path / "odd.gguf"
    for key, value in (("warp", True), ("normalizer.lowercase", True), ("suppress_tokens", [5])):
        write_gguf(path, metadata | {f"tokenizer.ggml.{key}": value}, [])
        with pytest.raises(BadInput, match=rf"tokenizer\.ggml\.{key} is .*tokenizer\.json next to"):
            read_tokenizer(GgufFile(path))
    harmless = {"normalizer.lowercase": False, "fim_pre_token_id": 5, "add_unknown_token": False}
    more = {f"tokenizer.ggml.{key}": value for key, value in harmless.items()}
    foreign = {"tokenizer.huggingface.json": "{}", "quantize.imatrix.file": "x", "warp.key": 1}
    write_gguf(path, metadata | more | foreign, [])
    assert read_tokenizer(GgufFile(path)).eos_token_id == 2


def test_texts_that_two_tokens_have_are_refused(tmp_path: Path) -> None:
    """The official Gemma 4 files of ggml-org/llama.cpp#25739 have three; llama.cpp refuses them too."""
    metadata = GgufFile(write_model(STORIES, tmp_path / "written", "Q8_0")).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    path = tmp_path / "odd.gguf"
    write_gguf(path, metadata | {"tokenizer.ggml.tokens": [*tokens[:-1], tokens[-2]]}, [])
    with pytest.raises(BadInput, match=rf"tokens 510 and 511 are both '{tokens[-2]}'"):
        read_tokenizer(GgufFile(path))
    write_gguf(path, metadata | {"tokenizer.ggml.tokens": [*tokens[:-2], "", ""]}, [])
    assert read_tokenizer(GgufFile(path)).convert_ids_to_tokens(511) == "[EMPTY_511]"


def test_more_tokens_than_embeddings_are_refused(tmp_path: Path) -> None:
    keys = header(tmp_path, "llama").metadata | {"tokenizer.ggml.tokens": ["a"] * 33}
    tensors = [
        TensorToWrite(name, (32, 64), "F32", lambda: [bytes(4 * 32 * 64)])
        for name in ("token_embd.weight", "output_norm.weight")
    ]
    write_gguf(tmp_path / "odd.gguf", keys, tensors)
    with pytest.raises(BadInput, match="33 tokens and 32 embeddings"):
        config_of(GgufFile(tmp_path / "odd.gguf"))


def keys_of(tokens: list[str], types: list[int] | None = None, **ids: int) -> dict[str, Any]:
    named = {f"tokenizer.ggml.{kind}_token_id": number for kind, number in ids.items()}
    types = types or [3] * len(tokens)
    return named | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}


def test_what_ends_an_answer_is_what_llama_cpp_ends_it_at() -> None:
    letters = ["a", "b", "c", "d"]
    assert end_tokens(keys_of(letters)) == ()
    assert end_tokens(keys_of(letters, eos=2)) == (2,)
    assert end_tokens(keys_of(letters, eos=2, eot=0, eom=3)) == (2, 0, 3)
    assert (
        end_tokens(keys_of(letters, eos=2, eot=9))
        == end_tokens(keys_of(letters, eos=2, eot=-1))
        == (2,)
    )
    assert end_tokens(keys_of(letters, eos=2) | {"tokenizer.ggml.eos_token_ids": [2, 3]}) == (2, 3)
    assert end_tokens(keys_of(letters) | {"tokenizer.ggml.model": "llama"}) == (2,)
    for text in ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|endoftext|>"):
        assert end_tokens(keys_of([*letters, text], eos=1)) == (1, 4)
    assert end_tokens(keys_of([*letters, "<|fim_pad|>", "<|file_sep|>"], eos=1)) == (1, 4, 5)
    # Harmony ends messages with <|end|>, and answers with the other two.
    assert end_tokens(keys_of(["<|end|>", "<|return|>", "<|call|>"], eos=1)) == (1, 2)
    # Gemma's </s> is the HTML tag.
    assert end_tokens(keys_of(["a", "</s>"], [1, 4], eos=0)) == (0,)
    assert end_tokens(keys_of(["a", "</s>"], [1, 3], eos=0)) == (0, 1)


def test_end_tokens_have_the_keys_that_a_file_has() -> None:
    tokens = ["a", "b", "c", "d", "<|eot_id|>"]
    assert end_keys({1}, 1, tokens) == {}
    assert end_keys({1, 4}, 1, tokens) == {"tokenizer.ggml.eot_token_id": 4}
    both = {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 2}
    assert end_keys({0, 1, 2, 4}, 1, tokens) == both
    assert end_tokens(keys_of(tokens, eos=1, eot=0, eom=2)) == (1, 0, 2, 4)
    with pytest.raises(BadInput, match="two end tokens next to EOS, and the model has a, c, d"):
        end_keys({0, 1, 2, 3, 4}, 1, tokens)


def test_a_file_keeps_every_end_token(tmp_path: Path) -> None:
    source = random_model(tmp_path / "source", "llama")
    path = source / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [2, 7, 9]}))
    written = write_model(source, tmp_path / "out", "Q8_0")
    alone = open_checkpoint(written)
    assert alone.config["eos_token_id"] == [2, 7, 9]
    for file in (*source.glob("*token*"), source / "config.json"):
        shutil.copy(file, written.parent)
    folder = open_checkpoint(written.parent)
    assert folder.config["eos_token_id"] == 2
    assert alone.end_token_ids() == folder.end_token_ids() == {2, 7, 9}
