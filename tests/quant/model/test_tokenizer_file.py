"""The file tokenizer.json decides, where the class that a folder declares would cut texts in another way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llmopt.quant.source.load_processor import load_tokenizer
from llmopt.quant.source.tokenizer_file import PROBE
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

# The split of cl100k, with up to three digits a token, and of GPT-2.
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TEXTS = [PROBE, "IT'S 12345 tests.\n\nYes. 2024-01-02"] * 20


def byte_level(expression: str, special: str = "<|endoftext|>") -> Tokenizer:
    made = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(expression), "isolated")
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, whole])  # type: ignore[assignment]
    made.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=[special]
    )
    made.train_from_iterator(TEXTS, trainer)
    return made


def pieces(model: models.Model, trainer: trainers.Trainer) -> Tokenizer:
    """SentencePiece's, as transformers 4 converted it."""
    made = Tokenizer(model)
    marked = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    made.normalizer = normalizers.Sequence(marked)  # type: ignore[assignment]
    made.train_from_iterator(TEXTS, trainer)
    return made


def saved(made: Tokenizer, folder: Path, kind: str, model_type: str) -> Path:
    end = "<|endoftext|>" if made.token_to_id("<|endoftext|>") is not None else "</s>"
    made.save(str(folder / "tokenizer.json"))
    declared = {"tokenizer_class": kind, "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(declared))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


@pytest.mark.parametrize(
    ("kind", "model_type"),
    [
        ("GPT2Tokenizer", "llama"),
        ("PreTrainedTokenizerFast", "qwen2"),
        ("Qwen2Tokenizer", "llama"),
        ("CohereTokenizerFast", "cohere2"),
        ("PreTrainedTokenizerFast", "qwen3"),
    ],
)
def test_the_split_of_the_file_is_kept(kind: str, model_type: str, tmp_path: Path) -> None:
    made = byte_level(CL100K)
    ours = load_tokenizer(saved(made, tmp_path, kind, model_type))
    for text in TEXTS[:2]:
        assert ours.encode(text, add_special_tokens=False) == made.encode(text).ids
    assert ours.eos_token == "<|endoftext|>"


def test_a_default_of_the_class_that_the_file_lacks_is_not_taken(tmp_path: Path) -> None:
    """`<|endoftext|>` of GPT-2's class has no id here: looking it up would not end."""
    saved(byte_level(CL100K, "</s>"), tmp_path, "GPT2Tokenizer", "llama")
    ours = load_tokenizer(tmp_path)
    assert ours.eos_token == "</s>" and ours.unk_token_id is None
    assert ours.encode(TEXTS[1], add_special_tokens=False)


def test_a_unigram_model_is_none_of_merges(tmp_path: Path) -> None:
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>")
    made = pieces(models.Unigram(), trainer)
    ours = load_tokenizer(saved(made, tmp_path, "LlamaTokenizer", "llama"))
    assert ours.encode(TEXTS[1], add_special_tokens=False) == made.encode(TEXTS[1]).ids


def test_a_class_that_cuts_as_the_file_does_stays(tmp_path: Path) -> None:
    special = ["<unk>", "<s>", "</s>"]
    merges = pieces(
        models.BPE(unk_token="<unk>"),
        trainers.BpeTrainer(vocab_size=150, special_tokens=special),
    )
    for made, kind, model_type in (
        (byte_level(GPT2), "GPT2Tokenizer", "llama"),
        (merges, "LlamaTokenizer", "llama"),
    ):
        folder = tmp_path / kind
        folder.mkdir()
        ours = load_tokenizer(saved(made, folder, kind, model_type))
        assert type(getattr(ours, "whole", ours)).__name__ == kind
