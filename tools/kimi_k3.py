"""The sizes of Kimi-K3, which transformers 5.23 does not have, by its published layers.

Sources: moonshotai/Kimi-K3 as released on 2026-07-27, its config.json and shard headers as read by
sqliteai/waste@d9b919a (docs/K3.md, src/model.c) and JustVugg/colibri@779d044 (docs/kimi_k3.md). Both name
2.8T parameters, 104B of them active, and 1.56 TB in bfloat16 with experts in MXFP4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmopt.engine.probe.facts import CachedTensor, Parameters, ProbedModel


def sizes(config: Mapping[str, Any]) -> ProbedModel:
    """The text model's parameters and cache; its vision tower has no published sizes and is left out."""
    text = config["text_config"]
    layers = text["num_hidden_layers"]
    return ProbedModel(
        family=config["model_type"],
        transformers_version="",
        num_layers=layers,
        hidden_size=text["hidden_size"],
        num_heads=text["num_attention_heads"],
        num_kv_heads=1,
        head_dim=text["kv_lora_rank"],
        intermediate_size=text["intermediate_size"],
        vocab_size=text["vocab_size"],
        max_context=text["max_position_embeddings"],
        tied=False,
        num_experts=text["num_experts"],
        experts_per_token=text["num_experts_per_token"],
        expert_width=text["moe_intermediate_size"],
        num_shared_layers=0,
        parameters=tuple(_parameters(text)),
        cache=tuple(_cache(text)),
    )


def _parameters(text: Mapping[str, Any]) -> Iterator[Parameters]:
    def row(
        layer: int, role: str, shard: str, out: int, inputs: int = 1, count: int = 1
    ) -> Parameters:
        return Parameters("text", role, shard, layer, out, inputs, count, count)

    hidden, vocab = text["hidden_size"], text["vocab_size"]
    yield row(-1, "embedding", "ranks", vocab, hidden)
    for layer in range(text["num_hidden_layers"]):
        yield from _attention(row, layer, text)
        # Two norms, and for each half of the layer the norm and the scores of its attention residual.
        yield row(layer, "norm", "whole", hidden, count=6)
        if layer < text["first_k_dense_replace"]:
            yield from _glu(row, layer, text["intermediate_size"], hidden)
            continue
        latent, width, experts = (
            text[key]
            for key in ("routed_expert_hidden_size", "moe_intermediate_size", "num_experts")
        )
        yield row(layer, "router", "whole", experts, hidden)
        yield row(layer, "bias", "whole", experts)
        yield row(layer, "linear", "ranks", latent, hidden)
        yield row(layer, "linear", "ranks", hidden, latent)
        yield row(layer, "norm", "whole", latent)
        yield from _glu(row, layer, text["num_shared_experts"] * width, hidden)
        used = text["num_experts_per_token"]
        for out, inputs in ((2 * width, latent), (latent, width)):
            yield Parameters("text", "expert", "ranks", layer, out, inputs, experts, used)
    yield row(-1, "norm", "whole", hidden, count=3)
    yield row(-1, "head", "ranks", vocab, hidden)


def _glu(row: Any, layer: int, width: int, hidden: int) -> Iterator[Parameters]:
    yield row(layer, "linear", "ranks", width, hidden, 2)
    yield row(layer, "linear", "ranks", hidden, width)


def _attention(row: Any, layer: int, text: Mapping[str, Any]) -> Iterator[Parameters]:
    hidden, linear = text["hidden_size"], text["linear_attn_config"]
    if layer + 1 in linear["kda_layers"]:
        heads, dim = linear["num_heads"], linear["head_dim"]
        inner = heads * dim
        yield row(layer, "linear", "ranks", inner, hidden, 2)  # queries and the full-rank gate
        yield row(layer, "linear", "kv_heads", inner, hidden, 2)
        yield row(layer, "linear", "ranks", 3 * inner, linear["short_conv_kernel_size"])
        yield row(layer, "linear", "ranks", dim, hidden)  # the decay's two factors
        yield row(layer, "linear", "ranks", inner, dim)
        yield row(layer, "linear", "ranks", heads, hidden)
        yield row(layer, "bias", "whole", inner)
        yield row(layer, "norm", "whole", dim, count=2)  # of the output, and A_log, padded to it
    else:
        heads, rank = text["num_attention_heads"], text["kv_lora_rank"]
        nope, rope, values = (
            text[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        inner, queries = heads * values, text["q_lora_rank"]
        yield row(layer, "linear", "whole", queries, hidden)
        yield row(layer, "norm", "whole", queries)
        yield row(layer, "linear", "ranks", heads * (nope + rope), queries)
        yield row(layer, "linear", "whole", rank + rope, hidden)
        yield row(layer, "norm", "whole", rank)
        yield row(layer, "linear", "ranks", heads * (nope + values), rank)
        yield row(layer, "linear", "ranks", inner, hidden)  # the output's gate
    yield row(layer, "linear", "ranks", hidden, inner)


def _cache(text: Mapping[str, Any]) -> Iterator[CachedTensor]:
    linear = text["linear_attn_config"]
    heads, dim = linear["num_heads"], linear["head_dim"]
    window = 3 * heads * dim * linear["short_conv_kernel_size"]
    for layer in range(text["num_hidden_layers"]):
        if layer + 1 in linear["kda_layers"]:
            yield CachedTensor("conv_states", layer, window, 1, 2, "constant")
            yield CachedTensor("recurrent_states", layer, heads * dim * dim, 1, 4, "constant")
        else:
            yield CachedTensor("keys", layer, 1, text["kv_lora_rank"], 2, "growing")
            yield CachedTensor("values", layer, 1, text["qk_rope_head_dim"], 2, "growing")
