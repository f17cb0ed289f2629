"""Feature compatibility: the features of the engine, and the incompatible pairs.

The checks at start-up and docs/measured/feature-pairs.md are made from these lists, so they cannot
differ. A feature is of the engine (an option enables it), of the checkpoint, or of a request.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import combinations

from ...base.errors import BadInput


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature that can be enabled.

    Attributes:
        source: the option that enables it (`EngineConfig.features` says when), or its other origin.
    """

    name: str
    source: str


FEATURES: Mapping[str, Feature] = {
    "chunks": Feature("chunked prefill", "`--prefill-chunk-size`"),
    "no-prefix-cache": Feature("no prefix cache", "`--no-enable-prefix-caching`"),
    "policy": Feature("a scheduling policy", "`--scheduling-policy`"),
    "overlap": Feature("async scheduling", "`--async-scheduling`"),
    "eager": Feature("eager steps", "`--enforce-eager`"),
    "swap": Feature("a swap space", "`--swap-space`"),
    "kv-fp8": Feature("a KV cache in fp8", "`--kv-cache-dtype fp8`"),
    "kv-int8": Feature("a KV cache in int8", "`--kv-cache-dtype int8`"),
    "ngram": Feature("prompt lookup", "`--speculative ngram`"),
    "draft": Feature("a draft model", "`--speculative draft`"),
    "medusa": Feature("Medusa heads", "`--speculative medusa`"),
    "eagle": Feature("an EAGLE head", "`--speculative eagle`"),
    "rejection": Feature("rejection sampling", "`--speculative-acceptance rejection`"),
    "streams": Feature("attention sinks", "`--window`, `--attention-sinks`"),
    "kv-budget": Feature("KV eviction", "`--kv-budget`, `--kv-eviction`"),
    "lora": Feature("LoRA adapters", "`--lora`"),
    "tensor-parallel": Feature("tensor parallelism", "`--tensor-parallel-size`"),
    "activations-8": Feature("8-bit activations", "`--cpu-activations 8`"),
    "windows": Feature("sliding windows", "the checkpoint"),
    "latents": Feature("latent attention", "a checkpoint with multi-head latent attention"),
    "quantized": Feature("quantized weights", "the checkpoint"),
    "transformers": Feature(
        "a model that runs through transformers", "a checkpoint of another model type"
    ),
    "states": Feature(
        "a model with constant state", "a checkpoint with Mamba, linear attention or the like"
    ),
    "completions": Feature("several completions", "`n`, `best_of`"),
    "mask": Feature("token masks and processors", "`token_mask`, `logits_processors`"),
    "prompt-logprobs": Feature("logprobs of the prompt", "`prompt_logprobs`"),
    "images": Feature("images", "`images` of a prompt"),
}

_DRAFTING = ("rejection", "ngram", "draft", "medusa", "eagle")
_REASONS: Mapping[str, Mapping[str, str]] = {
    "streams": {
        "draft": "the draft model would end at its own context; use prompt lookup",
        "eagle": "the head would end at its own context; use prompt lookup or Medusa heads",
        "windows": "layers of this model have windows of their own",
        "transformers": "window and attention_sinks are for the decoder's own model types",
        "states": "a state has no window and no sinks",
    },
    "rejection": dict.fromkeys(
        ("medusa", "eagle"),
        "a tree of top-k tokens has no draft distribution to sample from; use coupled",
    ),
    "transformers": dict.fromkeys(
        ("medusa", "eagle"), "heads read the hidden states of the decoder's own layers"
    ),
    "states": {
        **dict.fromkeys(
            _DRAFTING, "a state cannot go back to before a draft token that is rejected"
        ),
        "swap": "a state is not swapped out; preempted sequences are recomputed",
        "tensor-parallel": "states are not divided between devices",
    },
    "kv-budget": {
        **dict.fromkeys(_DRAFTING, "a draft token that is rejected has voted on what is kept"),
        "streams": "both choose which tokens stay: give kv_budget, or window with attention_sinks",
        "swap": "scores of keys are not swapped out; preempted sequences are recomputed",
        "tensor-parallel": "scores of keys are kept in one process, and its heads are divided",
        "windows": "layers of this model have windows of their own",
        "latents": "all heads share one latent, which has no heads to choose for",
        "transformers": "kv_budget is for the decoder's own model types, whose attention weights can "
        "be read",
        "states": "a state has no tokens to evict",
    },
    "images": dict.fromkeys(
        ("draft", "eagle"), "the draft has no vision tower and would see placeholders"
    ),
}
REFUSALS: Mapping[frozenset[str], str] = {
    frozenset({first, other}): reason
    for first, others in _REASONS.items()
    for other, reason in others.items()
}
"""Reasons why two features are incompatible."""

ALTERNATIVES = frozenset(
    {
        frozenset({"kv-fp8", "kv-int8"}),
        *(frozenset(two) for two in combinations(("ngram", "draft", "medusa", "eagle"), 2)),
    }
)
"""Pairs that are alternatives of one option. All other pairs are compatible."""


def refuse(features: Collection[str], because: str = "") -> None:
    """Raise BadInput for incompatible features, one of which `because` brings."""
    for pair, reason in REFUSALS.items():
        if pair <= set(features):
            line = refusal_line(pair)
            raise BadInput(f"{line}: {reason} ({because})" if because else f"{line}: {reason}")


NOT_ON_MPS: Mapping[str, str] = {
    "swap": "it moves blocks through pinned memory, which CUDA has",
    "kv-fp8": "torch has no float8 there",
    "streams": "their angles are computed in float64, which it does not have",
    "tensor-parallel": "there is one of them",
    "activations-8": "they are for the C kernels of a CPU",
}
"""Features that an Apple GPU does not have, with the reason."""


def refuse_on_mps(features: Collection[str]) -> None:
    for name in sorted(set(features) & NOT_ON_MPS.keys()):
        feature = FEATURES[name]
        raise BadInput(
            f"{feature.name} ({feature.source}) is not for --device mps: {NOT_ON_MPS[name]}"
        )


def refusal_line(pair: frozenset[str]) -> str:
    return (
        " and ".join(FEATURES[key].name for key in FEATURES if key in pair) + " do not go together"
    )
