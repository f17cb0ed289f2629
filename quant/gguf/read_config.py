"""The `config.json` of a GGUF file, from its keys and tensors or from the file next to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...base.errors import BadInput
from ..families.config import check_kinds
from ..families.family import GgufRules, ModelFamily
from ..families.registry import all_families, type_of
from ..families.spec_parts import yarn_scale
from ..model.checkpoint import read_json
from .architecture import (
    ROPE_FACTORS,
    SHAPE_KEYS,
    completed,
    family_rules,
    gguf_families,
    query_scalar,
    rope_factors,
    rope_of,
)
from .container import GgufFile
from .keys import ARCHITECTURE_KEYS, TOKENIZER, HeaderKeys, end_tokens

_REMEDY = "put the model's config.json next to the file"
# RoPE scaling of Llama 3.1 to 3.3; GGUF stores only the resulting frequency factors.
_LLAMA3_ROPE: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_ROPE |= {"original_max_position_embeddings": 8192}
# Keys that llama.cpp requires, though transformers has a default.
_REQUIRED = ("logit_scale", "expert_count", "expert_used_count")


def stored_config(file: GgufFile) -> dict[str, Any]:
    """The `config.json` next to a file, or that of its keys; BadInput: split, or another model's."""
    if file.metadata.get("split.count", 0) not in (0, 1):
        raise BadInput(f"{file.path} is one part of several: merge them with llama-gguf-split")
    path = file.path.parent / "config.json"
    if not path.is_file():
        return config_of(file)
    config = read_json(path)
    check_kinds(config)
    for name, ours, theirs in _contradictions(file, config):
        raise BadInput(
            f"{path} has {name} {ours!r}, but {file.path.name} beside it has {theirs}: they do not belong "
            "together"
        )
    for name in ("quantization_config", "compression_config", "quantization"):
        config.pop(name, None)
    return config


def _contradictions(file: GgufFile, config: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Fields that a config and a file both have, with their values, where these differ."""
    keys = _opened(file)[1]
    shape = _shape(file, keys)
    same = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    for name in (*same, "vocab_size"):
        if config.get(name) != shape[name]:
            yield name, config.get(name), shape[name]
    if type_of(config) not in gguf_families():
        return  # planned all the same, and refused where it is loaded
    rules, complete = family_rules(config), completed(config)
    epsilon, epsilon_key = rules.epsilon
    rope = rope_of(config)
    numbers = {"rope.freq_base": ("rope_theta", rope["rope_theta"])}
    numbers[epsilon_key] = (epsilon, complete.get(epsilon))
    kind = rope.get("rope_type", rope.get("type", "default"))
    stored_kind, factor = _scaling(keys)
    if stored_kind in ("linear", "yarn") and factor != 1.0:
        if kind != stored_kind:
            yield "rope_type", kind, stored_kind
        length = "original_max_position_embeddings"
        original = rope.get(length) or config.get("max_position_embeddings")
        if not np.isclose(rope.get("factor", 1.0), factor, rtol=1e-6, atol=0):
            yield "factor", rope.get("factor"), factor
        if kind == "yarn":
            numbers["rope.scaling.original_context_length"] = (length, original)
    for key, (name, value) in numbers.items():
        stored = keys.number(key, 0.0)
        if value and stored and not np.isclose(value, stored, rtol=1e-6, atol=0):
            yield name, value, stored
    for name in ("num_key_value_heads", "head_dim"):
        if (value := complete.get(name)) is not None and value != shape[name]:
            yield name, value, shape[name]
    if ROPE_FACTORS in file.tensors and kind in ("default", "llama3"):
        stored, expected = file.data(ROPE_FACTORS).view(np.float32), rope_factors(config)
        expected = np.ones_like(stored) if expected is None else expected
        if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
            yield "rope_type", kind, f"other factors in {ROPE_FACTORS}"


def config_of(file: GgufFile) -> dict[str, Any]:
    """The `config.json` of a file's keys and tensors. BadInput: an architecture or key is not covered."""
    family, keys = _opened(file)
    rules = family.gguf
    assert rules is not None
    biased = "blk.0.attn_q.bias" in file.tensors
    config: dict[str, Any] = {
        "model_type": family.name,
        "hidden_act": rules.activations[-1],
        **_shape(file, keys),
        rules.epsilon[0]: keys.number(rules.epsilon[1], keys.need(rules.epsilon[1])),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": biased,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "use_bias": biased,
        "dtype": "bfloat16",
        **rules.constants,
    }
    config |= _further_fields(keys, config, rules)
    if rules.norm_offset:  # Gemma's, whose classes have another name for it
        config["hidden_activation"] = config["hidden_act"]
        config["query_pre_attn_scalar"] = query_scalar(config, rules)
    config["rope_parameters"] = _rope_parameters(file, keys, config)
    for other in ("layer_norm_rms_epsilon", "layer_norm_epsilon"):
        keys.get(f"attention.{other}")  # of the norms that the family does not have
    keys.check()
    tokens, rows = file.metadata.get(f"{TOKENIZER}.tokens"), config["vocab_size"]
    if isinstance(tokens, list) and len(tokens) > rows:
        raise BadInput(f"{file.path}: {len(tokens)} tokens and {rows} embeddings: it is damaged")
    if isinstance(bos := file.metadata.get(f"{TOKENIZER}.bos_token_id"), int):
        config["bos_token_id"] = bos
    if ends := end_tokens(file.metadata):
        config["eos_token_id"] = ends[0] if len(ends) == 1 else list(ends)
    return config


def _opened(file: GgufFile) -> tuple[ModelFamily, HeaderKeys]:
    """The family of a file's architecture, and its keys. BadInput: not read, or no language model."""
    metadata = file.metadata
    if "general.architecture" not in metadata:
        raise BadInput(f"{file.path} lacks the key general.architecture: it is no whole model")
    name = str(metadata["general.architecture"])
    if metadata.get("general.type") == "mmproj" or name == "clip":
        raise BadInput(
            f"{file.path} holds the vision side of a model (mmproj): give the file of its language model"
        )
    keys = HeaderKeys(file.path, metadata, name, ARCHITECTURE_KEYS, _REMEDY)
    has_experts = bool(keys.get("expert_count"))
    for family in all_families():
        rules = family.gguf
        if rules is None or rules.architecture != name:
            continue
        if ("num_experts_per_tok" in rules.keys) == has_experts:
            return family, keys
    if has_experts:
        raise BadInput(f"{file.path}: a mixture of experts of {name!r} is not read here")
    known = ", ".join(dict.fromkeys(rules.architecture for rules in gguf_families().values()))
    raise BadInput(f"{file.path}: architecture {name!r} is not read here: {known} are")


def _shape(file: GgufFile, keys: HeaderKeys) -> dict[str, Any]:
    for needed in ("token_embd.weight", "output_norm.weight"):
        if needed not in file.tensors:
            raise BadInput(f"{file.path} lacks tensor {needed}: it is no whole model")
    shape: dict[str, Any] = {name: keys.size(key) for name, key in SHAPE_KEYS.items()}
    heads = shape["num_attention_heads"]
    shape["num_key_value_heads"] = keys.size("attention.head_count_kv", heads)
    shape["head_dim"] = keys.size("attention.key_length", shape["hidden_size"] // heads)
    shape["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    return shape


def _further_fields(keys: HeaderKeys, config: dict[str, Any], rules: GgufRules) -> dict[str, Any]:
    """The fields that a family has beyond Llama's, and checks of what it shares with Llama."""
    fields: dict[str, Any] = {}
    for width in ("attention.value_length", "rope.dimension_count"):
        if keys.size(width, config["head_dim"]) != config["head_dim"]:
            raise keys.refuse(width, f"heads are {config['head_dim']} wide")
    for name, key in rules.keys.items():
        value = keys.need(key) if key in _REQUIRED else keys.get(key)
        if value is not None:
            fields[name] = value if isinstance(value, int) else keys.number(key, 0.0)
    if "attention_multiplier" in rules.keys:  # Granite's: 0 or none is no multiplier in llama.cpp
        for name in ("attention_multiplier", "embedding_multiplier", "residual_multiplier"):
            usual = config["head_dim"] ** -0.5 if name == "attention_multiplier" else 1.0
            fields[name] = fields.get(name) or usual
        if keys.get("rope.scaling.finetuned", True) is False:
            raise keys.refuse("rope.scaling.finetuned", "Granite without RoPE")
    if rules.slides and "sliding_window" not in rules.keys:
        fields["sliding_window"] = keys.get("attention.sliding_window") or None
    return fields


def _rope_parameters(file: GgufFile, keys: HeaderKeys, config: dict[str, Any]) -> dict[str, Any]:
    theta = keys.number("rope.freq_base", 10000.0)
    if keys.number("rope.freq_base_swa", theta) != theta:
        raise keys.refuse("rope.freq_base_swa")
    kind, factor = _scaling(keys)
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    yarn = _yarn_parameters(keys, kind, factor)
    if kind == "yarn":
        parameters |= {"rope_type": kind, "factor": factor} | yarn
    elif kind not in ("none", "linear"):
        raise keys.refuse("rope.scaling.type")
    elif kind == "linear" and factor != 1.0:
        parameters |= {"rope_type": kind, "factor": factor}
    if ROPE_FACTORS in file.tensors:
        parameters |= _llama3_parameters(file, config | {"rope_parameters": parameters})
    return parameters


def _scaling(keys: HeaderKeys) -> tuple[Any, float]:
    """The kind of RoPE scaling and its factor, 1 for none."""
    older = keys.number("rope.scale_linear", 1.0)
    factor = keys.number("rope.scaling.factor", older) or 1.0
    return keys.get("rope.scaling.type", "linear"), factor


def _yarn_parameters(keys: HeaderKeys, kind: str, factor: float) -> dict[str, Any]:
    """YaRN's numbers, if any; llama.cpp's `attn_factor` multiplies them (src/llama-context.cpp)."""
    is_yarn = kind == "yarn"
    keys.get("rope.scaling.finetuned")
    original = keys.number("rope.scaling.original_context_length", 0.0)
    multiplier = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    usual = yarn_scale(factor)
    given = keys.number("rope.scaling.yarn_attn_factor", 0.0)
    attn_factor = keys.number("rope.scaling.attn_factor", 1.0)
    names = ("beta_fast", "beta_slow")
    betas = {name: keys.number(f"rope.scaling.yarn_{name}", 0.0) for name in names}
    if keys.get("rope.scaling.yarn_ext_factor", -1.0) not in (-1.0, float(is_yarn)):
        raise keys.refuse("rope.scaling.yarn_ext_factor")
    if not is_yarn:
        if attn_factor != 1.0:
            raise keys.refuse("rope.scaling.attn_factor", "only with YaRN")
        return {}
    if multiplier not in (0.0, 0.1, 1.0):
        raise keys.refuse("rope.scaling.yarn_log_multiplier", "only 0.1 and 1")
    attention = 1.0 if multiplier else usual
    if given and not np.isclose(given, attention):
        if multiplier or given == 1.0:
            raise keys.refuse("rope.scaling.yarn_attn_factor", "llama.cpp does not read it")
        attention = given
    parameters = {name: value for name, value in betas.items() if value}
    if original:
        parameters["original_max_position_embeddings"] = int(original)
    if (attention := attention * attn_factor) != usual:
        parameters["attention_factor"] = attention
    return parameters


def _llama3_parameters(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Llama 3's scaling, whose frequency factors a file holds; raises BadInput for other factors."""
    stored = file.data(ROPE_FACTORS).view(np.float32)
    candidate = {"rope_type": "llama3", "factor": float(stored.max()), **_LLAMA3_ROPE}
    parameters = config["rope_parameters"] | candidate
    expected = rope_factors(config | {"rope_parameters": parameters})
    if (
        config["rope_parameters"]["rope_type"] != "default"
        or expected is None
        or stored.shape != expected.shape
        or not np.allclose(stored, expected, rtol=1e-4)
    ):
        raise BadInput(f"{file.path}: its rope_freqs are not Llama 3's: {_REMEDY}")
    return candidate
