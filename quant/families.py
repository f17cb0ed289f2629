"""The decoder layers that quantization knows: their linears, and where a scale may be folded.

A scale may move from a linear's input into the operation before it only where that operation is linear
in each channel: the weight of an RMSNorm, the rows of a projection, the `up` half of a gated MLP. The
pairs are those of AutoAWQ for the Llama shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .checkpoint import Checkpoint
from .errors import BadInput


@dataclass(frozen=True, slots=True)
class Fold:
    """One place where scales may be folded: `source` is divided, the inputs of `targets` multiplied.

    Attributes:
        source: a norm, or a linear whose rows feed the targets channel by channel.
        targets: linears that share this input.
    """

    source: str
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """One shape of decoder layer; all names are relative to `model.layers.N`.

    Attributes:
        shared_inputs: the linears, grouped by the tensor that they read, in the order of execution.
        folds: pairs in the order in which they are searched.
        unclipped: linears whose clipping harms attention scores more than it helps the rounding.
        routers: weights that stay floats but read an input that folds may scale.
        mapped: whether the folds are known; without them no method may move scales.
    """

    shared_inputs: tuple[tuple[str, ...], ...]
    folds: tuple[Fold, ...]
    unclipped: frozenset[str]
    routers: tuple[str, ...] = ()
    mapped: bool = True

    @property
    def linears(self) -> tuple[str, ...]:
        """Every linear of a layer."""
        return tuple(name for group in self.shared_inputs for name in group)


_QUERY, _KEY, _VALUE = (f"self_attn.{letter}_proj" for letter in "qkv")
_OUTPUT = "self_attn.o_proj"
_GATE, _UP, _DOWN = (f"mlp.{name}_proj" for name in ("gate", "up", "down"))

_LLAMA = Family(
    shared_inputs=((_QUERY, _KEY, _VALUE), (_OUTPUT,), (_GATE, _UP), (_DOWN,)),
    folds=(
        Fold("input_layernorm", (_QUERY, _KEY, _VALUE)),
        Fold(_VALUE, (_OUTPUT,)),
        Fold("post_attention_layernorm", (_GATE, _UP)),
        Fold(_UP, (_DOWN,)),
    ),
    unclipped=frozenset({_QUERY, _KEY}),
)

FAMILIES: dict[str, Family] = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA)


def family_of(config: dict[str, Any]) -> Family:
    """The family of a `config.json`.

    Raises:
        BadInput: a model type that quantization does not know.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise BadInput(
            f"model type {model_type!r} cannot be quantized: supported are {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


def layer_families(checkpoint: Checkpoint) -> tuple[Family, ...]:
    """The family of every decoder layer of a checkpoint.

    Raises:
        BadInput: a model type that quantization does not know, or no usable number of layers.
    """
    num_layers = checkpoint.config.get("num_hidden_layers")
    if not isinstance(num_layers, int) or num_layers < 1:
        raise BadInput(f"{checkpoint.folder}/config.json has no usable num_hidden_layers")
    return (family_of(checkpoint.config),) * num_layers
