"""Measure a model on the meta device: parameters, cache, and the sizes that FLOP depend on."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging as transformers_logging

from ...base.errors import BadInput, reported_as
from ...quant.families.registry import type_of
from ...quant.model import auto
from .facts import ProbedModel
from .measure import measure_cache, measure_parameters


def build_on_meta(config: Any, *, trust_remote_code: bool = False) -> torch.nn.Module:
    """A config's model with its head on the meta device. BadInput: no decoder, or it cannot be built."""
    if getattr(config, "is_encoder_decoder", False):
        raise BadInput(f"{type_of(config)} is an encoder-decoder: only decoders are planned")
    model = auto.build_on_meta(
        config,
        dtype=text_dtype(config),
        trust_remote_code=trust_remote_code,
        attn_implementation="eager",
    )
    # Experts as one batched GEMM: the loop over hit experts depends on the routing's values.
    for module in model.modules():
        part = getattr(module, "config", None)
        if part is not None and hasattr(part, "_experts_implementation"):
            part._experts_implementation = "batched_mm"
    return model.eval()


def text_dtype(config: Any) -> torch.dtype:
    """The dtype of a config, or of its text model; bfloat16 without one."""
    dtype = getattr(config, "dtype", None)
    if not dtype:
        dtype = getattr(config.get_text_config(decoder=True), "dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else torch.bfloat16


_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "embedding_dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_CONTEXT = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"),
)
_WIDTH = ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim", "intermediate_dim")
_EXPERT_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size", *_WIDTH)
_EXPERTS = (
    *("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    *("num_routed_experts",),
)
_PER_TOKEN = (
    *("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k"),
    *("top_k_experts", "moe_top_k"),
)


def probe(
    raw: Mapping[str, Any], folder: Path | None = None, *, trust_remote_code: bool = False
) -> ProbedModel:
    """Sizes of a raw config's model, run on the meta device at a few lengths. BadInput: unknown to
    transformers, refused by it, or its cache follows no law of the planner's."""
    with _quiet():
        config = auto.read_config(raw, folder, trust_remote_code=trust_remote_code)
        model = build_on_meta(config, trust_remote_code=trust_remote_code)
        name = f"transformers {transformers.__version__}"
        refusal = f"{name} does not run a {type_of(config)} without weights"
        with reported_as(refusal, keeping=BadInput):
            return measure(model)


def measure(model: Any) -> ProbedModel:
    text = model.config.get_text_config(decoder=True)
    experts = _number(text, _EXPERTS)
    per_token = min(_number(text, _PER_TOKEN), experts) or (1 if experts else 0)
    cache = measure_cache(model)
    parameters = measure_parameters(model, experts, per_token)
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    # Heads of the widest growing cache layer; 0 without attention.
    heads = kv_heads = head_dim = 0
    grown = [t for t in cache if t.law == "growing" and t.is_float and t.stride == 1]
    if grown:
        widest = max(grown, key=lambda t: t.heads * t.width)
        kv_heads, head_dim = widest.heads, widest.width
        heads = max(_number(text, _HEADS), kv_heads)
    linears = [p for p in parameters if (p.part, p.role) == ("text", "linear") and p.layer >= 0]
    widths = [p.in_features for p in linears]
    routed = [p for p in parameters if p.role == "expert"]
    hidden = table.weight.shape[1]
    return ProbedModel(
        family=type_of(model.config),
        transformers_version=transformers.__version__,
        num_layers=_number(text, _LAYERS) or 1 + max((t.layer for t in cache), default=0),
        hidden_size=_number(text, _HIDDEN) or hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=_number(text, _WIDTH) or max(widths, default=hidden),
        vocab_size=table.weight.shape[0],
        max_context=_number(text, _CONTEXT),
        tied=head is not None and getattr(head, "weight", None) is table.weight,
        num_experts=experts if routed else 0,
        experts_per_token=per_token if routed else 0,
        expert_width=_number(text, _EXPERT_WIDTH) if routed else 0,
        num_shared_layers=_number(text, ("num_kv_shared_layers",)),
        parameters=parameters,
        cache=cache,
    )


def _number(config: Any, names: tuple[str, ...]) -> int:
    """The first of these fields that holds a number, or the largest of a list of them."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, list | tuple) and value and all(isinstance(v, int) for v in value):
            value = max(value)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


@contextmanager
def _quiet() -> Iterator[None]:
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(level)
