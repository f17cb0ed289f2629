"""Pooling of prompts, and embeddings and reranker scores from pooled vectors, as a checkpoint says.

Shares of each step's hidden states are joined to a vector. An embedding is pooled as a sentence-transformers
checkpoint says. A score comes from a classification head, or from the logits of "yes" and "no"
(Qwen3-Reranker).
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...base.errors import BadInput
from ...quant.families.config import is_classifier
from ...quant.families.registry import type_of
from ...quant.gguf.container import GgufFile
from ...quant.model.checkpoint import gguf_file_of, read_json
from ...quant.source.models import open_checkpoint
from ..base.sampling_params import PoolingParams
from ..scheduling.outputs import RequestOutput
from ..scheduling.request import Request
from ..scheduling.scheduler import Scheduler
from ..scheduling.step_plan import DecodeRows, ScheduledRow, StepPlan
from .step import StepLayout, StepResult

_FLAGS = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
}
_GGUF_MODES = {1: "mean", 2: "cls", 3: "last"}

Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Pooling:
    """Pooling, normalization, and the `dimensions` that a Matryoshka model was trained for, if named."""

    params: PoolingParams
    normalize: bool
    dimensions: tuple[int, ...] = ()

    def embedding(self, pooled: Sequence[float], dimensions: int | None = None) -> Vector:
        """Embedding, float32, of a pooled vector; cut to `dimensions`, it is normalized again
        (arXiv:2205.13147). BadInput: more dimensions than the vector has, or a number that the model was not
        trained for."""
        vector = np.asarray(pooled, dtype=np.float32)
        if dimensions is not None:
            if dimensions > len(vector):
                raise BadInput(f"dimensions = {dimensions}: this model has {len(vector)}")
            if self.dimensions and dimensions not in (len(vector), *self.dimensions):
                trained = ", ".join(map(str, self.dimensions))
                raise BadInput(f"dimensions = {dimensions}: this model was trained for {trained}")
            vector = vector[:dimensions]
        return normalized(vector) if self.normalize else vector


def normalized(vector: Vector) -> Vector:
    return vector / np.maximum(np.linalg.norm(vector), np.float32(1e-12))


def read_pooling(folder: Path) -> Pooling | None:
    """The pooling of a checkpoint, if it is an embedding model: by a GGUF file's key, normalized as in
    llama.cpp, else by the folder's modules. BadInput: an unsupported mode or module."""
    if (file := gguf_file_of(folder)) is not None:
        metadata, folder = GgufFile(file).metadata, file.parent
        if kind := metadata.get(f"{metadata.get('general.architecture')}.pooling_type"):
            if kind not in _GGUF_MODES:
                raise BadInput(f"{file}: pooling by pooling_type {kind} is not supported")
            return Pooling(PoolingParams(_GGUF_MODES[kind]), normalize=True)
    modules = read_modules(folder)
    default = folder / "1_Pooling"
    if not modules:
        has_default = (default / "config.json").is_file()
        return _pooling(folder, default, normalize=False) if has_default else None
    if strange := modules.keys() - {"Transformer", "Pooling", "Normalize"}:
        raise BadInput(f"{folder / 'modules.json'}: module {min(strange)!r} is not supported")
    if "Pooling" not in modules:
        return None
    return _pooling(folder, modules["Pooling"], normalize="Normalize" in modules)


def read_modules(folder: Path) -> dict[str, Path]:
    """Folders of a sentence-transformers checkpoint's modules by class, if it has any. BadInput: no list."""
    listing = folder / "modules.json"
    if not listing.is_file():
        return {}
    try:
        modules: Any = json.loads(listing.read_text(encoding="utf-8"))
        return {
            str(module["type"]).rpartition(".")[2]: folder / module["path"] for module in modules
        }
    except (ValueError, TypeError, KeyError) as error:
        raise BadInput(f"{listing} is not a list of modules: {error}") from error


def _pooling(folder: Path, module: Path, *, normalize: bool) -> Pooling:
    """Newer configs name the mode, older ones have a flag per mode."""
    config = read_json(module / "config.json")
    flags = [name for name, value in config.items() if name.startswith("pooling_mode_") and value]
    modes = config.get("pooling_mode") or [_FLAGS.get(name, name) for name in flags]
    modes = [modes] if isinstance(modes, str) else modes
    if len(modes) != 1:
        raise BadInput(f"pooling by {' and '.join(modes) or 'nothing'}: need one way")
    trained = read_json(folder / "config.json").get("matryoshka_dimensions") or ()
    params = PoolingParams("last" if modes[0] == "lasttoken" else modes[0])
    return Pooling(params, normalize, tuple(int(size) for size in trained))


QWEN3_RERANKER_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""The prompt of Qwen3-Reranker's model card, for its checkpoints without a template of their own."""


@dataclass(frozen=True, slots=True)
class Scorer:
    """Relevance of a document to a query, from one prompt with both.

    Attributes:
        head: weights of a sequence classifier, float32 [hidden]; None: the score is the first logit, less the
            second.
        is_probability: True if scores go through a sigmoid by default.
        template: prompt with {query} and {document} in it; None: the tokenizer joins the pair.
    """

    pooling: PoolingParams
    head: Vector | None = None
    bias: float = 0.0
    is_probability: bool = True
    template: str | None = None

    def score(self, pooled: Sequence[float], use_activation: bool | None = None) -> float:
        if self.head is None:
            logit = pooled[0] - (pooled[1] if len(pooled) > 1 else 0.0)
        else:
            logit = float(self.head @ np.asarray(pooled, dtype=np.float32)) + self.bias
        as_probability = self.is_probability if use_activation is None else use_activation
        return 0.5 * (1.0 + math.tanh(logit / 2)) if as_probability else logit


def read_scorer(folder: Path, config: dict[str, Any], tokenizer: Any) -> Scorer | None:
    """The scorer of a reranker's checkpoint, or None. BadInput: several labels, or a contradictory config."""
    if is_classifier(config):
        return _classifier(folder, config)
    modules = read_modules(folder)
    # vLLM's key: the words for no and for yes; their ids, yes first.
    labels = config.get("classifier_from_token") or ()
    token_ids = tuple(tokenizer.convert_tokens_to_ids(word) for word in reversed(labels))
    if any(not isinstance(token, int) for token in token_ids) or len(token_ids) > 2:
        raise BadInput(f"config.json: classifier_from_token: {labels} are not two tokens")
    if "LogitScore" in modules:
        named = read_json(modules["LogitScore"] / "config.json")
        ids = (named.get("true_token_id"), named.get("false_token_id"))
        token_ids = tuple(int(token) for token in ids if token is not None)
    if not token_ids:
        return None
    is_qwen = type_of(config) == "qwen3" and len(token_ids) == 2
    return Scorer(
        PoolingParams("last", token_ids),
        is_probability=_wants_sigmoid(folder, config),
        template=QWEN3_RERANKER_TEMPLATE if is_qwen else None,
    )


def _classifier(folder: Path, config: dict[str, Any]) -> Scorer:
    checkpoint = open_checkpoint(folder)
    head = checkpoint.tensor("score.weight").float()
    if head.shape[0] != 1:
        raise BadInput(f"{folder} classifies by {head.shape[0]} labels: a score needs a head of 1")
    if head.shape[1] != config.get("hidden_size"):
        raise BadInput(f"{folder}: score.weight takes {head.shape[1]} inputs, not hidden_size")
    bias = float(checkpoint.tensor("score.bias")) if "score.bias" in checkpoint.shard_of else 0.0
    return Scorer(PoolingParams("last"), head[0].numpy(), bias, _wants_sigmoid(folder, config))


def _wants_sigmoid(folder: Path, config: dict[str, Any]) -> bool:
    """sentence-transformers' activation; a sigmoid where the checkpoint names none, as in vLLM."""
    path = folder / "config_sentence_transformers.json"
    named = read_json(path).get("activation_fn") if path.is_file() else None
    named = named or (config.get("sentence_transformers") or {}).get("activation_fn")
    return named is None or str(named).endswith("Sigmoid")


Logits = Callable[[torch.Tensor], torch.Tensor]

_SHARES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda states: states.sum(dim=0, dtype=torch.float32),
    "max": lambda states: states.amax(dim=0),
    "cls": lambda states: states[0],
    "last": lambda states: states[-1],
}

_JOINED: dict[str, Callable[[float, float], float]] = {"mean": operator.add, "max": max}
"""Two steps' shares of an element; other modes keep the later share."""


def pooled_rows(
    layout: StepLayout, hidden: torch.Tensor, width: int | None, logits: Logits
) -> dict[str, list[float]]:
    """The share of each pooled row of the step, by sequence: a sum, a maximum or a state, float32 [width].
    `hidden` [tokens, ...] holds the final states in its first `width` columns; None: it holds logits. One
    copy to the host brings them all. Rows that contribute nothing have no entry."""
    names: list[str] = []
    shares: list[torch.Tensor] = []
    for row, begin in zip(layout.rows, layout.begins, strict=True):
        if row.pooling is None:
            continue
        mode = row.pooling.mode
        if (mode == "cls" and row.start) or (mode == "last" and row.end != row.num_prompt_tokens):
            continue
        rows = hidden[begin : begin + row.num_tokens]
        if row.pooling.token_ids:
            share = logits(rows[-1:])[0, list(row.pooling.token_ids)]
        else:
            share = _SHARES[mode](rows[:, :width])
        names.append(row.sequence_id)
        shares.append(share.float())
    if not shares:
        return {}
    values = torch.cat(shares).cpu().split([share.numel() for share in shares])
    return {name: share.tolist() for name, share in zip(names, values, strict=True)}


class PooledPrompts:
    """Vectors of pooled prompts that are being computed, by sequence. A prompt may take several steps, and
    starts again after a preemption: a row from position 0 drops the earlier shares."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._pooled: dict[str, tuple[Request, list[float]]] = {}

    def keep(self, plan: StepPlan, result: StepResult) -> None:
        """Take the shares of a step, before the scheduler's update ends its requests."""
        if isinstance(plan.rows, DecodeRows):
            return
        for row in plan.rows:
            if row.pooling is None or (request := self._scheduler.request_of(row)) is None:
                continue
            _, vector = self._pooled.get(row.sequence_id, (request, []))
            vector = vector if row.start else []
            if (share := result.pooled.get(row.sequence_id)) is not None:
                join = _JOINED.get(row.pooling.mode)
                vector = [*map(join, vector, share)] if vector and join is not None else share
            self._pooled[row.sequence_id] = request, vector

    def outputs(self, plan: StepPlan) -> list[RequestOutput]:
        if not self._pooled:
            return []
        return [
            _output(row, *pooled)
            for row in plan.rows
            if row.pooling is not None and row.end == row.num_prompt_tokens
            if (pooled := self._pooled.pop(row.sequence_id, None)) is not None
        ]

    def forget(self, sequence_id: str) -> None:
        self._pooled.pop(sequence_id, None)


def _output(row: ScheduledRow, request: Request, vector: list[float]) -> RequestOutput:
    if row.pooling is not None and row.pooling.mode == "mean":
        vector = [value / row.num_prompt_tokens for value in vector]
    return RequestOutput(
        *(request.request_id, 0, (), "", None, None, request.finish_reason, None),
        *(request.num_prompt_tokens, request.num_cached_tokens, 0, request.times),
        pooled=tuple(vector),
    )
