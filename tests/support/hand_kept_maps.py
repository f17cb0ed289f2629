"""Hand-kept maps of decoder layers, the oracle of discovery: the pairs of AutoAWQ and llm-compressor, plus routers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from llmopt.quant.families.layer_map import Fold, LayerMap
from llmopt.quant.model.architecture import Architecture

Config = dict[str, Any]
Names = Collection[str]
_QUERY, _KEY, _VALUE = (f"self_attn.{letter}_proj" for letter in "qkv")
_OUTPUT = "self_attn.o_proj"
_INPUT_NORM, _MLP_NORM = "input_layernorm", "post_attention_layernorm"


def _joined(*parts: LayerMap) -> LayerMap:
    """Concatenate the families of attention and MLP."""
    return LayerMap(
        shared_inputs=sum((part.shared_inputs for part in parts), ()),
        folds=sum((part.folds for part in parts), ()),
        unclipped=frozenset().union(*(part.unclipped for part in parts)),
        routers=sum((part.routers for part in parts), ()),
    )


def _attention(norm: str | None = _INPUT_NORM, norm_offset: float = 0.0) -> LayerMap:
    """Separate projections; `norm` None where it cannot be folded into."""
    scaled = (Fold(norm, (_QUERY, _KEY, _VALUE), norm_offset=norm_offset),) if norm else ()
    return LayerMap(
        shared_inputs=((_QUERY, _KEY, _VALUE), (_OUTPUT,)),
        folds=(*scaled, Fold(_VALUE, (_OUTPUT,))),
        unclipped=frozenset({_QUERY, _KEY}),
    )


def _mlp(norm: str = _MLP_NORM, norm_offset: float = 0.0) -> LayerMap:
    """A gated MLP with separate projections."""
    gate, up, down = (f"mlp.{name}_proj" for name in ("gate", "up", "down"))
    return LayerMap(
        shared_inputs=((gate, up), (down,)),
        folds=(Fold(norm, (gate, up), norm_offset=norm_offset), Fold(up, (down,))),
        unclipped=frozenset(),
    )


def _experts(block: str, router: str, leaves: tuple[str, str, str], names: Names) -> LayerMap:
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
        return LayerMap((), (), frozenset(), ())
    readers = tuple(name for gate, up, _ in triples for name in (gate, up))
    return LayerMap(
        shared_inputs=tuple(group for gate, up, down in triples for group in ((gate, up), (down,))),
        folds=(
            Fold(_MLP_NORM, (router, *readers)),
            *(Fold(up, (down,)) for _, up, down in triples),
        ),
        unclipped=frozenset(),
        routers=(router,),
    )


_GATED = ("gate_proj", "up_proj", "down_proj")


def _llama(_: Config, __: Names) -> LayerMap:
    return _joined(_attention(), _mlp())


def _gemma2(_: Config, __: Names) -> LayerMap:
    return _joined(_attention(norm_offset=1.0), _mlp("pre_feedforward_layernorm", norm_offset=1.0))


def _gemma3(_: Config, __: Names) -> LayerMap:
    """Without the fold into the q norm, which degraded Gemma 3 (llm-compressor #2522)."""
    return _joined(_attention(None), _mlp("pre_feedforward_layernorm", norm_offset=1.0))


def _phi3(config: Config, _: Names) -> LayerMap:
    """Fused projections: the values are the last rows of one, `up` the second half of the other."""
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    kv_width = int(config.get("num_key_value_heads") or heads) * head_dim
    values = heads * head_dim + kv_width
    width = int(config["intermediate_size"])
    fused, gate_up, down = "self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj"
    return LayerMap(
        shared_inputs=((fused,), (_OUTPUT,), (gate_up,), (down,)),
        folds=(
            Fold(_INPUT_NORM, (fused,)),
            Fold(fused, (_OUTPUT,), rows=(values, values + kv_width)),
            Fold(_MLP_NORM, (gate_up,)),
            Fold(gate_up, (down,), rows=(width, 2 * width)),
        ),
        unclipped=frozenset({fused}),
    )


def _mixtral(_: Config, names: Names) -> LayerMap:
    block = "block_sparse_moe"
    return _joined(_attention(), _experts(block, f"{block}.gate", ("w1", "w3", "w2"), names))


def _qwen3_moe(_: Config, names: Names) -> LayerMap:
    return _joined(_attention(), _dense_or_experts(names))


def _dense_or_experts(names: Names) -> LayerMap:
    """Some layers of a model may be dense, such as the first ones of DeepSeek."""
    if "mlp.gate.weight" in names:
        return _experts("mlp", "mlp.gate", _GATED, names)
    return _mlp()


def _deepseek(_: Config, names: Names) -> LayerMap:
    """Multi-head latent attention (MLA): two more norms, each before an up-projection."""
    query, query_down, query_up = (f"self_attn.q{part}_proj" for part in ("", "_a", "_b"))
    latent, widened = "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj"
    compressed = f"{query_down}.weight" in names
    first = query_down if compressed else query
    second = ((query_up,),) if compressed else ()
    fold = (Fold("self_attn.q_a_layernorm", (query_up,)),) if compressed else ()
    attention = LayerMap(
        shared_inputs=((first, latent), *second, (widened,), (_OUTPUT,)),
        folds=(
            Fold(_INPUT_NORM, (first, latent)),
            *fold,
            Fold("self_attn.kv_a_layernorm", (widened,)),
        ),
        unclipped=frozenset({query, query_down, query_up, latent}),
    )
    return _joined(attention, _dense_or_experts(names))


def _gpt_oss(_: Config, __: Names) -> LayerMap:
    """Attention only: the experts are 3-D tensors, which no format here stores."""
    return _attention()


MAPS: dict[str, Callable[[Config, Names], LayerMap]] = {
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


def maps_of(architecture: Architecture) -> tuple[LayerMap, ...]:
    """The maps of all layers of a model."""
    model = architecture.meta_model
    return tuple(
        map_of(model.config.to_dict(), model.names_in_layer(index))
        for index in range(len(architecture.layers))
    )


def map_of(config: Config, names: Names = ()) -> LayerMap:
    """The map of one layer.

    Args:
        config: the `config.json`.
        names: the layer's tensors, relative to it; they tell experts from dense layers.
    """
    return MAPS[config["model_type"]](config, names)
