"""Write a tiny checkpoint with the tool of its name, and the values that the tool reads back from it.

    PYTHONPATH=<folder with the tool> python tests/strangers/checkpoints/make.py KIND FOLDER

Kinds and the versions that were used: `README.md`. Nothing here is llmopt's.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    CompressedTensorsConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

EXPECTED = "expected.safetensors"
TOKENIZER = Path(__file__).parents[3] / "recipes" / "models" / "stories260K"
BITS, GROUP_SIZE, LENGTH = 4, 32, 32


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


def mixtral() -> Any:
    """A Mixtral of one layer and two experts with random weights."""
    config = MixtralConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    made: Any = MixtralForCausalLM(config)
    return made.to(torch.bfloat16).eval()


def linears(made: Any) -> dict[str, Any]:
    """The linears of the layer, by name."""
    return {name: part for name, part in made.named_modules() if name.endswith("_proj")}


def expect(
    folder: Path, weights: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32
) -> None:
    """Keep the values of three linears, [out, in]."""
    kept = {k: v for k, v in weights.items() if k.endswith(("q_proj", "up_proj", "down_proj"))}
    save_file({k: v.detach().to(dtype).contiguous() for k, v in kept.items()}, folder / EXPECTED)


def source(folder: Path, dtype: torch.dtype, made: Any = None) -> str:
    """A model and a tokenizer in a folder of their own, which `main` removes; by default the Llama."""
    plain = folder / "plain"
    (made or model(64, dtype)).save_pretrained(plain)
    for path in TOKENIZER.glob("*token*"):
        shutil.copy(path, plain)
    return str(plain)


def calibration() -> list[list[int]]:
    """Eight random sequences."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 32, (8, LENGTH), generator=generator).tolist()


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
    plain = source(folder, torch.bfloat16)
    options: dict[str, Any] = {"load_in_8bit": True}
    if kind != "bnb-int8":
        options = {"load_in_4bit": True, "bnb_4bit_quant_type": kind[4:7]}
        options["bnb_4bit_use_double_quant"] = kind.endswith("double")
    made = AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=BitsAndBytesConfig(**options), dtype=torch.bfloat16
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


LLM_COMPRESSOR: dict[str, dict[str, Any]] = {
    "llmcompressor-w4a16": {"config_groups": SCHEMES["ct-int4"]},
    "llmcompressor-w8a8": {"scheme": "W8A8"},
    "llmcompressor-fp8-dynamic": {"scheme": "FP8_DYNAMIC"},
    # It names the experts as no Mixtral does, and transformers does not read them: nothing is expected.
    "llmcompressor-mixtral": {"config_groups": SCHEMES["ct-int4"]},
    "llmcompressor-gptq-actorder": {
        "config_groups": {
            "g": {"targets": ["Linear"], "weights": weights(symmetric=False, actorder="weight")}
        }
    },
}


def llm_compressor(kind: str, folder: Path) -> None:
    """`oneshot`, and the weights as transformers decompresses them by compressed-tensors."""
    modifiers: Any = import_module("llmcompressor.modifiers.quantization")
    dtype = torch.bfloat16
    options: dict[str, Any] = {}
    modifier = modifiers.QuantizationModifier
    if "gptq" in kind:
        modifier = import_module("llmcompressor.modifiers.gptq").GPTQModifier
        rows = {"input_ids": calibration(), "attention_mask": [[1] * LENGTH] * 8}
        options["dataset"] = import_module("datasets").Dataset.from_dict(rows)
        options |= {"num_calibration_samples": 8, "max_seq_length": LENGTH}
    plain = source(folder, dtype, mixtral() if kind == "llmcompressor-mixtral" else None)
    made = AutoModelForCausalLM.from_pretrained(plain, dtype=dtype)
    ignore = ["lm_head", "re:.*mlp.gate$"]
    recipe = modifier(targets="Linear", ignore=ignore, **LLM_COMPRESSOR[kind])
    import_module("llmcompressor").oneshot(model=made, recipe=recipe, **options)
    made.save_pretrained(folder, save_compressed=True)
    if kind == "llmcompressor-mixtral":
        return
    decompressed = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=CompressedTensorsConfig(run_compressed=False), dtype=dtype
    )
    expect(folder, {name: part.weight for name, part in linears(decompressed).items()}, dtype)


AUTO_ROUND = {
    "autoround-gptq": ("auto_gptq", True),
    "autoround-awq": ("auto_awq", False),
    "autoround-awq-symmetric": ("auto_awq", True),
    "autoround-native": ("auto_round", True),
}


def auto_round(kind: str, folder: Path) -> None:
    """One step of tuning; GPTQModel reads what auto-round exports for it."""
    form, symmetric = AUTO_ROUND[kind]
    plain = source(folder, torch.float16)
    made = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float16)
    tuner = import_module("auto_round").AutoRound(
        made, AutoTokenizer.from_pretrained(plain), bits=BITS, group_size=GROUP_SIZE, sym=symmetric, iters=1,
        dataset=[torch.tensor([row]) for row in calibration()], seqlen=LENGTH, nsamples=4, batch_size=1,
    )  # fmt: skip
    tuned, _ = tuner.quantize()
    # The tuned weights went through bfloat16, so that they are near the file's and not the same.
    near = {name: part.weight.detach().clone() for name, part in linears(tuned).items()}
    tuner.save_quantized(str(folder), format=form)
    if form == "auto_round":  # llmopt refuses that one
        return
    read = gptq_model_weights(folder)
    for name, weight in near.items():
        torch.testing.assert_close(read[name].float(), weight.float(), rtol=2**-7, atol=0)
    expect(folder, read, torch.float16)


def gptq_model_weights(folder: Path) -> dict[str, Any]:
    """The weights that GPTQModel's torch kernels multiply by: their products with the identity."""
    library: Any = import_module("gptqmodel")
    loaded = library.GPTQModel.load(
        str(folder), backend=library.BACKEND.TORCH, device="cpu", dtype=torch.float16
    )
    with torch.no_grad():
        return {
            name: part(torch.eye(part.in_features, dtype=torch.float16)).t()
            for name, part in linears(loaded.model).items()
        }


GPTQ_MODEL: dict[str, dict[str, Any]] = {
    "gptqmodel-v1": {"format": "gptq"},
    "gptqmodel-v1-asymmetric": {"format": "gptq", "sym": False},
    "gptqmodel-v2-asymmetric": {"format": "gptq_v2", "sym": False},
    "gptqmodel-v1-desc-act": {"format": "gptq", "desc_act": True},
}


def gptq_model(kind: str, folder: Path) -> None:
    """GPTQ on random sequences."""
    library: Any = import_module("gptqmodel")
    config = library.QuantizeConfig(
        bits=BITS, group_size=GROUP_SIZE, offload_to_disk=False, **GPTQ_MODEL[kind]
    )
    plain = source(folder, torch.float16)
    made = library.GPTQModel.load(plain, config, device="cpu", dtype=torch.float16)
    rows = [{"input_ids": row, "attention_mask": [1] * LENGTH} for row in calibration()]
    made.quantize(rows, batch_size=1)
    made.save(str(folder))
    expect(folder, gptq_model_weights(folder), torch.float16)


KINDS: dict[str, Callable[[str, Path], None]] = {
    **dict.fromkeys(SCHEMES, compressed_tensors),
    **dict.fromkeys(("bnb-nf4-double", "bnb-fp4", "bnb-int8"), bitsandbytes),
    **dict.fromkeys(LLM_COMPRESSOR, llm_compressor),
    **dict.fromkeys(AUTO_ROUND, auto_round),
    **dict.fromkeys(GPTQ_MODEL, gptq_model),
}


def main(kind: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    KINDS[kind](kind, folder)
    shutil.rmtree(folder / "plain", ignore_errors=True)
    for path in sorted(folder.iterdir()):
        if path.name not in ("config.json", "model.safetensors", EXPECTED):
            path.unlink()
    config = json.loads((folder / "config.json").read_text())
    print(json.dumps(config["quantization_config"], indent=1))
    if (folder / EXPECTED).is_file():
        print({name: tuple(part.shape) for name, part in load_file(folder / EXPECTED).items()})


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
