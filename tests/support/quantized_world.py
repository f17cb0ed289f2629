"""Small random checkpoints in any format and scheme, written linear by linear without the pipeline."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from llmopt.quant.formats.registry import FORMATS
from llmopt.quant.kinds.base.kind import kind_of
from llmopt.quant.kinds.base.tensor import QuantizedTensor
from llmopt.quant.kinds.e8p.scheme import E8pScheme
from llmopt.quant.kinds.integer.kind import round_to_nearest
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.kinds.trellis.scheme import TrellisScheme
from llmopt.recipes import MODELS
from safetensors.torch import save_file

from .format_support import trellis_tensor

INPUT_SCALE = {"int8": 0.05, "fp8": 0.02, "nvfp4": 448.0}


def random_model(**overrides: Any) -> Any:
    """A Llama in float32 with a bias in every linear; outliers in its norms, as trained models have."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": 512, "hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.1,
        "attention_bias": True, "mlp_bias": True,
    }  # fmt: skip
    config = transformers.LlamaConfig(**{**shape, **overrides})
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
            elif name.endswith("layernorm.weight"):
                parameter.normal_(1.0, 0.2)[5::64] *= 8
    return model


def quantized(weight: torch.Tensor, scheme: Any, dtype: torch.dtype) -> QuantizedTensor:
    """RTN; permuted groups get a random order, static activations a fixed scale."""
    static = scheme.activations is not None and not scheme.activations.dynamic
    fixed = torch.tensor([INPUT_SCALE[scheme.activations.kind]]) if static else None
    if isinstance(scheme, IntScheme):
        if not scheme.permuted:
            return replace(round_to_nearest(weight, scheme, dtype), input_scale=fixed)
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
        sorted_ = round_to_nearest(weight[:, order], scheme, dtype)
        assert sorted_.group_index is not None
        back = order.argsort()
        return replace(sorted_, codes=sorted_.codes[:, back], group_index=sorted_.group_index[back])
    if isinstance(scheme, E8pScheme):
        return kind_of(scheme).round(weight, torch.float16, name="the weight")
    if isinstance(scheme, TrellisScheme):  # random: a search takes minutes
        out, inner = weight.shape
        return trellis_tensor(scheme, out, inner, torch.Generator().manual_seed(inner))
    return kind_of(scheme).round(weight, dtype, input_scale=fixed)


def write_checkpoint(
    folder: Path, model: Any, format_name: str, scheme: Any, *, head: bool = False
) -> dict[str, QuantizedTensor]:
    """Save `model` with all its linears as codes (the head only if asked); returns them by module."""
    weight_format = FORMATS[format_name]
    weights = {
        name: quantized(
            module.weight.data, scheme, weight_format.scale_dtype(torch.float32, scheme)
        )
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and (head or name != "lm_head")
    }
    stored: dict[str, torch.Tensor] = {}
    for name, parameter in model.state_dict().items():
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and module in weights:
            stored |= weight_format.pack(module, weights[module])
        elif not (name == "lm_head.weight" and model.config.tie_word_embeddings):
            stored[name] = parameter
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in stored.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    ignore = [] if head else ["lm_head"]
    schemes: dict[str, Any] = dict.fromkeys(weights, scheme)
    config["quantization_config"] = weight_format.config(schemes, ignore)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODELS / "stories3M" / name, folder)
    return weights
