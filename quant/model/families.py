"""Smoothing maps of decoder layers: their linears, and where input scales can be folded.

A scale can be folded from a linear's input into the previous operation only where that is linear in each
channel: the weight of an RMSNorm, the rows of a projection, the `up` half of a gated MLP. Every consumer of
the input must be scaled too: all linears, and the router of a mixture of experts, or routing would change.
The pairs are those of AutoAWQ and llm-compressor, plus routers.

Names are those on disk, which for Mixtral differ from transformers' modules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from ..base.errors import BadInput

# Linears that servers fuse into one matrix, by the last part of their names.
_FUSED = {
    name: group[0]
    for group in (
        ("q_proj", "k_proj", "v_proj"),
        ("q_a_proj", "kv_a_proj_with_mqa"),
        ("gate_proj", "up_proj"),
        ("w1", "w3"),
    )
    for name in group
}


def fused_name(linear: str) -> str:
    """The name of the first of the linears that servers fuse with this one: equal for all of them."""
    parent, dot, leaf = linear.rpartition(".")
    return f"{parent}{dot}{_FUSED.get(leaf, leaf)}"


@dataclass(frozen=True, slots=True)
class Fold:
    """A foldable pair: `source` is divided by the scales, the columns of `targets` are multiplied.

    Attributes:
        source: a norm, or a linear whose rows feed the targets channel by channel.
        targets: all consumers of this input: linears, and routers.
        rows: the rows `[start, stop)` of a fused source that feed the targets; None: all of them.
        norm_offset: what is added to the norm's weight before it multiplies; 1 in Gemma.
        groups, repeats: which row feeds which column: the rows `[groups, width]` feed the columns
            `[groups, repeats, width]`. With grouped-query attention a group is a value head, repeated for the
            query heads that read it; a norm over each head is one group, repeated for every head.
    """

    source: str
    targets: tuple[str, ...]
    rows: tuple[int, int] | None = None
    norm_offset: float = 0.0
    groups: int = 1
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of decoder layer; all names are relative to the layer.

    Attributes:
        shared_inputs: the linears, grouped by their input tensor, in execution order.
        folds: pairs in the order in which they are searched.
        unclipped: linears that AWQ must not clip, because it harms attention scores.
        routers: modules with a float weight `[experts, in]` whose input may be scaled.
        mapped: whether a smoothing map is known; if not, `folds` is meaningless.
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


Config = dict[str, Any]
Names = Collection[str]
_QUERY, _KEY, _VALUE = (f"self_attn.{letter}_proj" for letter in "qkv")
_OUTPUT = "self_attn.o_proj"
_INPUT_NORM, _MLP_NORM = "input_layernorm", "post_attention_layernorm"


def _joined(*parts: Family) -> Family:
    """Concatenate the families of attention and MLP."""
    return Family(
        shared_inputs=sum((part.shared_inputs for part in parts), ()),
        folds=sum((part.folds for part in parts), ()),
        unclipped=frozenset().union(*(part.unclipped for part in parts)),
        routers=sum((part.routers for part in parts), ()),
    )


def _attention(norm: str | None = _INPUT_NORM, norm_offset: float = 0.0) -> Family:
    """Separate projections; `norm` None where it cannot be folded into."""
    scaled = (Fold(norm, (_QUERY, _KEY, _VALUE), norm_offset=norm_offset),) if norm else ()
    return Family(
        shared_inputs=((_QUERY, _KEY, _VALUE), (_OUTPUT,)),
        folds=(*scaled, Fold(_VALUE, (_OUTPUT,))),
        unclipped=frozenset({_QUERY, _KEY}),
    )


def _mlp(norm: str = _MLP_NORM, norm_offset: float = 0.0) -> Family:
    """A gated MLP with separate projections."""
    gate, up, down = (f"mlp.{name}_proj" for name in ("gate", "up", "down"))
    return Family(
        shared_inputs=((gate, up), (down,)),
        folds=(Fold(norm, (gate, up), norm_offset=norm_offset), Fold(up, (down,))),
        unclipped=frozenset(),
    )


def _experts(block: str, router: str, leaves: tuple[str, str, str], names: Names) -> Family:
    """A mixture of gated MLPs behind one norm; experts fused on disk are not quantized.

    Args:
        leaves: how gate, up and down are called in an expert.
        names: tensors of the layer.
    """
    numbers = {
        name.removeprefix(f"{block}.experts.").split(".")[0]
        for name in names
        if name.startswith(f"{block}.experts.") and name.endswith(f".{leaves[0]}.weight")
    }
    members = [f"{block}.experts.{number}" for number in sorted(numbers, key=int)]
    triples = [tuple(f"{member}.{leaf}" for leaf in leaves) for member in members]
    shared = f"{block}.shared_experts"
    if any(name.startswith(shared + ".") for name in names):
        triples.append(tuple(f"{shared}.{leaf}_proj" for leaf in ("gate", "up", "down")))
    if not members:  # the norm feeds weights that cannot be scaled
        return Family((), (), frozenset(), ())
    readers = tuple(name for gate, up, _ in triples for name in (gate, up))
    return Family(
        shared_inputs=tuple(group for gate, up, down in triples for group in ((gate, up), (down,))),
        folds=(
            Fold(_MLP_NORM, (router, *readers)),
            *(Fold(up, (down,)) for _, up, down in triples),
        ),
        unclipped=frozenset(),
        routers=(router,),
    )


_GATED = ("gate_proj", "up_proj", "down_proj")


def _llama(_: Config, __: Names) -> Family:
    return _joined(_attention(), _mlp())


def _gemma2(_: Config, __: Names) -> Family:
    return _joined(_attention(norm_offset=1.0), _mlp("pre_feedforward_layernorm", norm_offset=1.0))


def _gemma3(_: Config, __: Names) -> Family:
    """Without the fold into the q norm, which degraded Gemma 3 (llm-compressor #2522)."""
    return _joined(_attention(None), _mlp("pre_feedforward_layernorm", norm_offset=1.0))


def _phi3(config: Config, _: Names) -> Family:
    """Fused projections: the values are the last rows of one, `up` the second half of the other."""
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    kv_width = int(config.get("num_key_value_heads") or heads) * head_dim
    values = heads * head_dim + kv_width
    width = int(config["intermediate_size"])
    fused, gate_up, down = "self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj"
    return Family(
        shared_inputs=((fused,), (_OUTPUT,), (gate_up,), (down,)),
        folds=(
            Fold(_INPUT_NORM, (fused,)),
            Fold(fused, (_OUTPUT,), rows=(values, values + kv_width)),
            Fold(_MLP_NORM, (gate_up,)),
            Fold(gate_up, (down,), rows=(width, 2 * width)),
        ),
        unclipped=frozenset({fused}),
    )


def _mixtral(_: Config, names: Names) -> Family:
    block = "block_sparse_moe"
    return _joined(_attention(), _experts(block, f"{block}.gate", ("w1", "w3", "w2"), names))


def _qwen3_moe(_: Config, names: Names) -> Family:
    return _joined(_attention(), _dense_or_experts(names))


def _dense_or_experts(names: Names) -> Family:
    """Some layers of a model may be dense, such as the first ones of DeepSeek."""
    if "mlp.gate.weight" in names:
        return _experts("mlp", "mlp.gate", _GATED, names)
    return _mlp()


def _deepseek(_: Config, names: Names) -> Family:
    """Multi-head latent attention (MLA): two more norms, each before an up-projection."""
    query, query_down, query_up = (f"self_attn.q{part}_proj" for part in ("", "_a", "_b"))
    latent, widened = "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj"
    compressed = f"{query_down}.weight" in names
    first = query_down if compressed else query
    second = ((query_up,),) if compressed else ()
    fold = (Fold("self_attn.q_a_layernorm", (query_up,)),) if compressed else ()
    attention = Family(
        shared_inputs=((first, latent), *second, (widened,), (_OUTPUT,)),
        folds=(
            Fold(_INPUT_NORM, (first, latent)),
            *fold,
            Fold("self_attn.kv_a_layernorm", (widened,)),
        ),
        unclipped=frozenset({query, query_down, query_up, latent}),
    )
    return _joined(attention, _dense_or_experts(names))


def _gpt_oss(_: Config, __: Names) -> Family:
    """Attention only: the experts are 3-D tensors, which no format here stores."""
    return _attention()


FAMILIES: dict[str, Callable[[Config, Names], Family]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _llama),
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt_oss": _gpt_oss,
}


def family_of(config: Config, names: Names = ()) -> Family:
    """The family of one layer.

    Args:
        config: the `config.json`.
        names: the layer's tensors, relative to it; they tell experts from dense layers.

    Raises:
        BadInput: no smoothing map is known for this model type.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise BadInput(
            f"no smoothing map is known for model type {model_type!r}, only for {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type](config, names)
