"""Write a tiny checkpoint with the tool of its name, and the values that the tool reads back from it.

    PYTHONPATH=<folder with the tool> python tests/strangers/checkpoints/make.py KIND FOLDER

Kinds and the versions that were used: `README.md`. Nothing here is llmopt's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

EXPECTED = "expected.safetensors"


def model(hidden: int = 32, dtype: torch.dtype = torch.float32) -> Any:
    """A Llama of one layer with random weights."""
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=hidden,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    made: Any = LlamaForCausalLM(config)
    made = made.to(dtype).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
    return made


def linears(made: Any) -> dict[str, Any]:
    """The linears of the layer, by name."""
    return {name: part for name, part in made.named_modules() if name.endswith("_proj")}


def expect(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Keep the values of three linears, float32 [out, in]."""
    kept = {k: v for k, v in weights.items() if k.endswith(("q_proj", "up_proj", "down_proj"))}
    save_file({k: v.detach().float().contiguous() for k, v in kept.items()}, folder / EXPECTED)


def weights(**fields: Any) -> dict[str, Any]:
    return {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
    } | fields


GROUP = {"group_size": None, "strategy": "channel"}
TOKEN = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
BLOCK = {"group_size": None, "strategy": "block", "block_structure": [128, 128]}
SCHEMES: dict[str, dict[str, dict[str, Any]]] = {
    "ct-int4": {"g": {"targets": ["Linear"], "weights": weights()}},
    "ct-int4-asymmetric": {"g": {"targets": ["Linear"], "weights": weights(symmetric=False)}},
    # The second pattern is inside the first, and only the second has zero points.
    "ct-overlap": {
        "a": {"targets": ["re:.*proj$"], "weights": weights()},
        "b": {"targets": ["re:.*down_proj$"], "weights": weights(symmetric=False)},
        "c": {"targets": ["re:.*.up_proj$"], "weights": weights(num_bits=8, **GROUP)},
    },
    "ct-w8a8": {
        "g": {
            "targets": ["Linear"],
            "weights": weights(num_bits=8, **GROUP),
            "input_activations": TOKEN | {"type": "int"},
        }
    },
    "ct-fp8": {
        "a": {"targets": ["re:.*self_attn.*_proj$"], "weights": weights(num_bits=8, type="float", **GROUP)},
        "b": {"targets": ["re:.*mlp.*_proj$"], "weights": weights(num_bits=8, type="float", **BLOCK)},
    },
}  # fmt: skip


def compressed_tensors(kind: str, folder: Path) -> None:
    """Min-max scales, then the library's own compressor, config and decompressed weights."""
    # As Any: several versions are used, with other signatures.
    library: Any = import_module("compressed_tensors.quantization")
    compressor_class: Any = import_module("compressed_tensors.compressors").ModelCompressor
    fake_quantize = import_module("compressed_tensors.quantization.lifecycle.forward").fake_quantize
    calculate_qparams = import_module("compressed_tensors.quantization.utils").calculate_qparams

    made = model()
    config = library.QuantizationConfig(config_groups=SCHEMES[kind], ignore=["lm_head"])
    library.apply_quantization_config(made, config)
    expected = {}
    for name, module in linears(made).items():
        scheme, weight = module.quantization_scheme.weights, module.weight.data
        if scheme.strategy == "block":
            low, high = weight.amin().reshape(1, 1), weight.amax().reshape(1, 1)
        else:
            rows = weight.reshape(len(weight), -1, scheme.group_size or weight.shape[1])
            low, high = rows.amin(-1), rows.amax(-1)
        scale, zero = calculate_qparams(low, high, scheme)
        module.weight_scale.data = scale.reshape(module.weight_scale.shape)
        stored_zero = getattr(module, "weight_zero_point", None)
        if stored_zero is not None:
            stored_zero.data = zero.reshape(stored_zero.shape).to(stored_zero.dtype)
        expected[name] = fake_quantize(weight, module.weight_scale, stored_zero, scheme)
        module.quantization_status = library.QuantizationStatus.FROZEN
    options = {}
    if not hasattr(compressor_class, "compress_model"):  # 0.9.4 infers no format
        options["quantization_format"] = "int-quantized" if kind == "ct-w8a8" else "pack-quantized"
    compressor = compressor_class.from_pretrained_model(made, **options)
    assert compressor is not None
    if hasattr(compressor, "compress_model"):
        compressor.compress_model(made)
        made.save_pretrained(folder)
    else:
        made.save_pretrained(folder, state_dict=compressor.compress(made))
    compressor.update_config(str(folder))
    expect(folder, expected)


def bitsandbytes(kind: str, folder: Path) -> None:
    """Through transformers, which saves the library's own tensors."""
    functional: Any = import_module("bitsandbytes.functional")
    # Rows of at least a block: bitsandbytes 0.50.2 on a CPU dequantizes shorter ones wrongly.
    model(64, torch.bfloat16).save_pretrained(folder / "plain")
    options: dict[str, Any] = {"load_in_8bit": True}
    if kind != "bnb-int8":
        options = {"load_in_4bit": True, "bnb_4bit_quant_type": kind[4:7]}
        options["bnb_4bit_use_double_quant"] = kind.endswith("double")
    made = AutoModelForCausalLM.from_pretrained(
        folder / "plain", quantization_config=BitsAndBytesConfig(**options), dtype=torch.bfloat16
    )
    made.save_pretrained(folder)
    expected = {}
    for name, module in linears(made).items():
        if kind == "bnb-int8":
            weight = module.weight
            scales = weight.SCB if weight.SCB is not None else module.state.SCB
            expected[name] = functional.int8_vectorwise_dequant(weight.data, scales)
        else:
            module.weight.quant_state.dtype = torch.float32
            expected[name] = functional.dequantize_4bit(
                module.weight.data, module.weight.quant_state
            )
    expect(folder, expected)
    for path in (folder / "plain").iterdir():
        path.unlink()
    (folder / "plain").rmdir()


KINDS: dict[str, Callable[[str, Path], None]] = {
    **dict.fromkeys(SCHEMES, compressed_tensors),
    **dict.fromkeys(("bnb-nf4-double", "bnb-fp4", "bnb-int8"), bitsandbytes),
}


def main(kind: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    KINDS[kind](kind, folder)
    for path in sorted(folder.iterdir()):
        if path.name not in ("config.json", "model.safetensors", EXPECTED):
            path.unlink()
    config = json.loads((folder / "config.json").read_text())
    print(json.dumps(config["quantization_config"], indent=1))
    print({name: tuple(part.shape) for name, part in load_file(folder / EXPECTED).items()})


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
