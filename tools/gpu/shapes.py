"""Checkpoints of real shapes with random weights, and the sizes of a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from llmopt.engine.doctor.self_test import ONE_LAUNCH, WHOLE, Sizes
from llmopt.engine.planner.catalog import find_model
from llmopt.quant.base.scheme import Activations
from llmopt.quant.formats.registry import FORMATS
from llmopt.quant.kinds.fp8.kind import round_to_fp8
from llmopt.quant.kinds.fp8.scheme import FloatScheme
from llmopt.quant.kinds.integer.kind import round_to_nearest
from llmopt.quant.kinds.integer.scheme import IntScheme
from safetensors.torch import load_file, save_file

FORMAT = "compressed-tensors"
INT4 = IntScheme(4, 128, True)
FP8 = FloatScheme("channel", Activations("fp8"))


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of a run.

    Attributes:
        config: what replaces fields of a model's config.
        contexts: (batch, context, steps) of decode.
        batches: at which kinds of weights are compared, with `short` tokens of context.
        prefill: tokens of a prompt.
        num_requests, lengths: the throughput benchmark, and how many tokens its requests bring and get.
        layers: of the models too large or too slow to make whole.
        bundled, answer: the bundled model that answers, and with how many tokens.
        self_test: sizes of the kernels' self-test.
    """

    contexts: tuple[tuple[int, int, int], ...] = ((32, 4096, 32), (256, 1024, 32))
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    short: int = 128
    steps: int = 32
    prefill: int = 8192
    repeats: int = 3
    num_requests: int = 256
    lengths: tuple[int, int] = (100, 1024)
    layers: int = 4
    bundled: str = "stories3M"
    answer: int = 24
    self_test: Sizes = WHOLE
    config: Mapping[str, Any] = field(default_factory=dict)


FULL = Scale()
SMALL = Scale(
    contexts=((2, 24, 2),),
    batches=(1, 3),
    short=8,
    steps=2,
    prefill=24,
    repeats=1,
    num_requests=3,
    lengths=(2, 16),
    layers=2,
    bundled="stories260K",
    answer=3,
    self_test=ONE_LAUNCH,
    config={
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 256,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
    },
)


def config_of(name: str, scale: Scale, layers: int | None = None) -> dict[str, Any]:
    """The config of a shape of the planner's table, at that scale; with `layers` of its layers only."""
    config = dict(find_model(name).config) | {"dtype": "bfloat16"}
    config |= {key: value for key, value in scale.config.items() if key in config}
    return config if layers is None else config | {"num_hidden_layers": layers}


def write_checkpoint(
    folder: Path, config: dict[str, Any], scheme: IntScheme | FloatScheme | None, device: str
) -> None:
    """Random bf16 weights, the layers' linears quantized (RTN) to `scheme`; all layers are equal.

    Equal layers are as slow as different ones: each has memory of its own, larger than any cache.
    """
    folder.mkdir(parents=True)
    first = _first_layer(config, folder / "first", device)
    rest = {name: tensor for name, tensor in first.items() if ".layers.0." not in name}
    layer = {name: tensor for name, tensor in first.items() if name not in rest}
    linears = [name.removesuffix(".weight") for name in layer if name.endswith("proj.weight")]
    if scheme is not None:
        for module in linears:
            weight = layer.pop(f"{module}.weight").float()
            rounded = (
                round_to_nearest(weight, scheme, torch.bfloat16)
                if isinstance(scheme, IntScheme)
                else round_to_fp8(weight, scheme, torch.bfloat16)
            )
            layer |= FORMATS[FORMAT].pack(module, rounded.to("cpu"))
    count = config["num_hidden_layers"]
    shards = {"rest.safetensors": rest}
    shards |= {f"layer-{i}.safetensors": _renamed(layer, i) for i in range(count)}
    for shard, tensors in shards.items():
        held = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        save_file(held, folder / shard, metadata={"format": "pt"})
    weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if scheme is not None:
        schemes = {
            name: scheme for i in range(count) for name in _renamed(dict.fromkeys(linears), i)
        }
        own = FORMATS[FORMAT].config(schemes, ["lm_head"])
        config = config | {"quantization_config": own}
    (folder / "config.json").write_text(json.dumps(config))
    _write_tokenizer(folder, config["vocab_size"])


def _renamed(named: Mapping[str, Any], index: int) -> dict[str, Any]:
    return {name.replace(".layers.0.", f".layers.{index}."): named[name] for name in named}


def _first_layer(config: dict[str, Any], folder: Path, device: str) -> dict[str, torch.Tensor]:
    """The tensors of a model of one layer, by the names that checkpoints give them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    fields = {**config, "num_hidden_layers": 1}
    with torch.device(device):
        own = AutoConfig.for_model(fields.pop("model_type"), **fields)
        model = AutoModelForCausalLM.from_config(own, dtype=torch.bfloat16, trust_remote_code=False)
    model.save_pretrained(folder)
    del model
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard, device=device)
    shutil.rmtree(folder)
    return tensors


def _write_tokenizer(folder: Path, size: int) -> None:
    """A tokenizer with a word for each token, so that detokenization has text."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{index}": index for index in range(size)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
