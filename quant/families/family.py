"""A model family: all that llmopt knows of a model type beyond what its modules and tensors tell.

Every field has a default that means "ask": transformers' config class for defaults, its modules for the
forward pass, discovery for layers and foldable pairs, its processor for the tokens of images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .shape_rules import Config, ShapeRules
from .shapes import ModelShape

Choices = dict[str, Any]
Choose = Callable[[ModelShape, Config], Choices]


@dataclass(frozen=True, slots=True)
class GgufRules:
    """How a model type lies in GGUF, and what it has beyond Llama (`convert_hf_to_gguf.py`).

    Attributes:
        architecture: `general.architecture`.
        stems: modules of a layer that have tensors, by the name after `model.layers.N.`.
        permuted: True if rows of q and k change places, for llama.cpp's interleaved RoPE.
        norm_offset: number added to norm weights, which the model itself adds at run time.
        activations: activations of the MLP that llama.cpp computes.
        epsilon: names of the norms' epsilon in `config.json` and in GGUF.
        keys: further fields of `config.json`, and their keys in GGUF.
        constants: fields that llama.cpp assumes, with the value that is right.
        defaults: fields that count where `config.json` lacks them, beside those of `ShapeRules`.
        slides: True if layers slide without `use_sliding_window`; llama.cpp keeps no such window unless the
            window is among `keys`.
    """

    architecture: str
    stems: tuple[str, ...]
    permuted: bool = False
    norm_offset: float = 0.0
    activations: tuple[str, ...] = ("silu",)
    epsilon: tuple[str, str] = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
    keys: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    slides: bool = False


GGUF_NORMS = ("input_layernorm", "post_attention_layernorm")
GGUF_ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
GGUF_QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
GGUF_MLP = tuple(f"mlp.{name}_proj" for name in ("gate", "up", "down"))
GGUF_DENSE = (*GGUF_NORMS, *GGUF_ATTENTION, *GGUF_MLP)
GGUF_LAYER_NORM = "attention.layer_norm_epsilon"
GGUF_EXPERTS = {
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """Size of one image: its tokens in the prompt, with the processor's separators between rows and tiles,
    and its patches in the tower, whose tiles attend only within themselves; 1 tile is a whole image."""

    num_tokens: int
    num_patches: int
    num_tiles: int
    formula: str


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """`config.json` and `preprocessor_config.json`, in the processor's order, then the family's defaults."""

    config: Mapping[str, Any]
    processor: Mapping[str, Any]

    @property
    def vision(self) -> Mapping[str, Any]:
        return self.config.get("vision_config") or {}

    def side(self, name: str, default: int) -> int:
        value = self.processor.get(name, default)
        return int(max(value.values()) if isinstance(value, Mapping) else value)

    def vision_size(self, name: str, default: int) -> int:
        value = self.vision.get(name, default)
        return int(max(value) if isinstance(value, list) else value)


ImageRule = Callable[[ImageSettings, int, int], ImageTokens]
"""The tokens of an image of a width and a height; raises BadInput for an aspect ratio that is refused."""


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """A model type, or the wrapper of one with a vision tower.

    Attributes:
        name: the model type in `config.json`.
        rules: rules of its shape; None: its modules are measured.
        choices: fields of the engine's `ModelSpec` that the shape does not tell, from shape and completed
            config; None: the engine runs it through transformers' modules.
        with_states: layers may mix tokens with a constant state. Its shape is that of a model with attention
            in their place.
        prepare: changes a completed config before shape and choices read it.
        gguf: layout in GGUF; None: it cannot be written there.
        image_tokens: rule for the tokens of an image; None: the processor is asked.
        other_names: former names of the type, and the fields that each implies.
        ties_wrapped: default of a wrapper's `tie_word_embeddings`.
        splits_experts: loaders take each of its experts by itself, though its files hold them fused.
        plain_tokenizer: `AutoTokenizer` takes its `tokenizer.json` as it is, where the folder says so.
    """

    name: str
    rules: ShapeRules | None = None
    choices: Choose | None = None
    with_states: bool = False
    prepare: Callable[[Config], Config] = dict
    gguf: GgufRules | None = None
    image_tokens: ImageRule | None = None
    other_names: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    ties_wrapped: bool | None = None
    splits_experts: bool = False
    plain_tokenizer: bool = False

    def shape(self, config: Config) -> ModelShape:
        assert self.rules is not None
        if self.with_states:
            kinds = ["full_attention"] * len(config["layer_types"])
            config = {**config, "layer_types": kinds, "num_hidden_layers": len(kinds)}
        return ModelShape.from_completed(self.name, self.rules, config)
