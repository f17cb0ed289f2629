"""Tiny random models of every supported family: our logits against transformers', in float32."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from llmopt.engine.config import EngineConfig
from llmopt.engine.engine import Engine
from llmopt.engine.model.families import model_spec
from llmopt.engine.model.rope import RopeSpec, rope_frequencies
from llmopt.engine.model.spec import ModelSpec
from llmopt.quant.errors import BadInput
from llmopt.recipes import MODELS

SHAPE = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
YARN_ROPE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip

FAMILIES = {
    "llama-2": ("LlamaConfig", {"num_key_value_heads": 8}),
    "llama-3.1": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "llama-biases-tied-wide-heads": (
        "LlamaConfig",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 16},
    ),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-sliding": ("MistralConfig", {"sliding_window": 7}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-sliding-top-layers": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen2-yarn": ("Qwen2Config", {"rope_parameters": YARN_ROPE}),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
}


def save_model(folder, config_class: str, overrides: dict):
    """A random model as transformers saves it, with the bundled tokenizer beside it."""
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**{**SHAPE, **overrides})
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(
                "bias"
            ):  # they start as ones and zeros, which hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(MODELS / "stories260K").save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_agree_with_transformers(family, tmp_path):
    model = save_model(tmp_path, *FAMILIES[family])
    engine = Engine(
        EngineConfig(
            tmp_path,
            dtype="float32",
            device="cpu",
            block_size=4,
            num_blocks=40,
            max_num_batched_tokens=17,
        )
    )
    tokens = torch.randint(0, 512, (1, 90), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens).logits[0]
    got = engine.prompt_logits(tokens[0].tolist())  # in chunks of 17, through the paged cache
    assert expected.std() > 0.1, "the model is too flat for the comparison to mean anything"
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_a_bf16_model_stays_close_to_float32():
    tokens = list(range(3, 200))
    exact = Engine(EngineConfig("stories3M", dtype="float32")).prompt_logits(tokens).log_softmax(-1)
    rounded = (
        Engine(EngineConfig("stories3M", dtype="bfloat16")).prompt_logits(tokens).log_softmax(-1)
    )
    divergence = (exact.exp() * (exact - rounded)).sum(-1).mean()
    assert 0 < divergence < 5e-3


def spec(**changes) -> ModelSpec:
    config = json.loads((MODELS / "stories3M" / "config.json").read_text())
    return model_spec({**config, **changes})


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not one of"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_act": "glu"}, "hidden_act 'glu'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "rope_type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "lacks low_freq_factor"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"vocab_size": "many"}, "vocab_size is .many. in the config"),
    ],
)
def test_what_the_decoder_does_not_cover_is_refused(changes, complaint):
    with pytest.raises(BadInput, match=complaint):
        spec(**changes)


def test_a_missing_key_is_named():
    config = json.loads((MODELS / "stories3M" / "config.json").read_text())
    del config["hidden_size"]
    with pytest.raises(BadInput, match="hidden_size is missing in the llama config"):
        model_spec(config)


def test_both_spellings_of_rope_are_read():
    new = RopeSpec.from_config({"rope_parameters": LLAMA3_ROPE})
    scaling = {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}
    old = RopeSpec.from_config({"rope_theta": 500000.0, "rope_scaling": scaling})
    assert torch.equal(rope_frequencies(new, 64)[0], rope_frequencies(old, 64)[0])


def test_mistrals_window_defaults_as_its_class_does():
    base = {"model_type": "mistral"}
    assert spec(**base).shape.windows == (4096,) * 5
    assert spec(**base, sliding_window=None).shape.windows == (None,) * 5
    assert (
        spec(model_type="qwen2", sliding_window=32, use_sliding_window=False).shape.windows
        == (None,) * 5
    )
