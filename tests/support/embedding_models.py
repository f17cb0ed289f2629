"""The bundled model as an embedding model and as rerankers, and what transformers computes with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from llmopt.recipes import MODELS
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer

NAME = "stories3M"
HIDDEN = 256


def write_modules(folder: Path, mode: str, *more: str, **config: Any) -> Path:
    """The model with the files that make it an embedding model to sentence-transformers."""
    shutil.copytree(MODELS / NAME, folder)
    kinds = ["Transformer", "Pooling", "Normalize", *more]
    modules = [
        {"path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    flags = {"lasttoken": "pooling_mode_lasttoken", "mean": "pooling_mode_mean_tokens"}
    pooling = {"word_embedding_dimension": HIDDEN, **dict.fromkeys(flags.values(), False)}
    pooling[flags.get(mode, f"pooling_mode_{mode}")] = True
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    add_to_config(folder, **config)
    return folder


def write_classifier(folder: Path, num_labels: int = 1) -> Path:
    """The model as a sequence classifier with a random head."""
    shutil.copytree(MODELS / NAME, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors.pop("lm_head.weight", None)
    generator = torch.Generator().manual_seed(3)
    tensors["score.weight"] = torch.randn(num_labels, HIDDEN, generator=generator) * 0.1
    save_file(tensors, path, metadata={"format": "pt"})
    labels = {str(label): f"LABEL_{label}" for label in range(num_labels)}
    add_to_config(
        folder,
        architectures=["LlamaForSequenceClassification"],
        id2label=labels,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    return folder


def write_logit_scorer(folder: Path, true_id: int, false_id: int | None, template: str) -> Path:
    """The model as a reranker by the logits of two tokens, with a chat template for pairs."""
    shutil.copytree(MODELS / NAME, folder)
    names = {"": "base.models.Transformer", "1_LogitScore": "cross_encoder.modules.LogitScore"}
    modules = [
        {"path": path, "type": f"sentence_transformers.{name}"} for path, name in names.items()
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir()
    ids = {"true_token_id": true_id, "false_token_id": false_id}
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(ids))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def add_to_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def token_ids(text: str, *pair: str) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / NAME)
    return tokenizer(text, *pair).input_ids


def expected_vector(ids: list[int], mode: str) -> torch.Tensor:
    """transformers' hidden states, pooled and normalized."""
    model = AutoModel.from_pretrained(MODELS / NAME, dtype=torch.float32).eval()
    with torch.no_grad():
        hidden = model(torch.tensor([ids])).last_hidden_state[0]
    vector = hidden.mean(0) if mode == "mean" else hidden[-1]
    return vector / vector.norm()
