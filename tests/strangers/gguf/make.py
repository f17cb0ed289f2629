"""Write the files of this folder by llama.cpp's converter: `python -m tests.strangers.gguf.make`.

The README names the packages that it needs. Weights are numbers that float16 holds, so that the file has the
same ones; what transformers makes of them is stored in `expected.json`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from llmopt.recipes import MODELS
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ...support.gguf_support import byte_level_tokenizer

sentencepiece: Any = import_module("sentencepiece")  # no dependency of llmopt's
FOLDER = Path(__file__).parent
TEXT = MODELS.parent / "data" / "calibration.txt"
SAMPLE = "Once upon a time,  there was a girl.\nShe said: \u00e9t\u00e9!"
SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8.0,
    "beta_slow": 2.0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-yarn": {"model_type": "llama", "rope_parameters": YARN, "tie_word_embeddings": True},
    "qwen3moe": {
        "model_type": "qwen3_moe",
        "vocab_size": 512,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
    },
    "gemma2": {"model_type": "gemma2", "query_pre_attn_scalar": 16, "sliding_window": 8},
}

# The converter knows a byte-level tokenizer by a hash of its ids, and a small one has another.
CONVERT = """
import convert_hf_to_gguf
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
convert_hf_to_gguf.main()
"""


def write_source(folder: Path, name: str) -> Any:
    """A random model as transformers saves it, with a SentencePiece vocabulary; returns the model."""
    torch.manual_seed(0)
    options = {**SIZES, **CONFIGS[name]}
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(0.0 if name == "gemma2" else 1.0, 0.2)
            elif "experts" in parameter_name or "gate.weight" in parameter_name:
                parameter.normal_(0.0, 0.2)
            parameter.copy_(parameter.half())
    model.eval().save_pretrained(folder)
    if name == "qwen3moe":
        byte_level_tokenizer(folder, "qwen2")
        return model
    sentencepiece.SentencePieceTrainer.Train(
        input=str(TEXT), model_prefix=str(folder / "tokenizer"), vocab_size=SIZES["vocab_size"],
        model_type="bpe", byte_fallback=True, pad_id=0, bos_id=1, eos_id=2, unk_id=3,
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
        add_dummy_prefix=name != "gemma2",  # the converter takes this for granted
    )  # fmt: skip
    return model


def expected(folder: Path, model: Any) -> dict[str, Any]:
    """Log-probabilities that transformers gives each token after the first, and SentencePiece's ids."""
    tokens = torch.randint(4, 320, (1, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logprobs = model(tokens).logits[0, :-1].log_softmax(-1)
    values = logprobs.gather(1, tokens[0, 1:, None])[:, 0]
    if (folder / "tokenizer.model").is_file():
        processor = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
        ids = [1, *processor.EncodeAsIds(SAMPLE)]
    else:
        ids = AutoTokenizer.from_pretrained(folder)(SAMPLE).input_ids
    return {
        "tokens": tokens[0].tolist(),
        "logprobs": [round(value, 5) for value in values.tolist()],
        "text": SAMPLE,
        "ids": ids,
    }


def main() -> None:
    results = {}
    for name in CONFIGS:
        with TemporaryDirectory() as source:
            folder = Path(source)
            results[name] = expected(folder, write_source(folder, name))
            output = FOLDER / f"{name}.gguf"
            command = [sys.executable, "-c", CONVERT, folder, "--outtype", "f16"]
            subprocess.run([*command, "--outfile", output], check=True)
    (FOLDER / "expected.json").write_text(json.dumps(results) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
