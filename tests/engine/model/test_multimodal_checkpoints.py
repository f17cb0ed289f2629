"""Text models inside multimodal checkpoints: transformers' logits, whatever the files call their tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.model.decoder.reader import decoder_base, model_spec
from llmopt.quant.families.spec_parts import NotCovered
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.recipes import MODELS
from safetensors.torch import load_file, save_file

from ...support.model_families import FAMILIES, SHAPE

MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip
QWEN_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64,
}  # fmt: skip

# The class of the config, the text model's and the vision model's fields, and fields of its own.
WRAPPED: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma-3": (
        "Gemma3Config", FAMILIES["gemma-3"][1], VISION,
        {"mm_tokens_per_image": 4, "image_token_index": 500, "boi_token_index": 501, "eoi_token_index": 502},
    ),
    "mistral-3": (
        "Mistral3Config", {**FAMILIES["ministral-3"][1], "model_type": "ministral3"},
        {**VISION, "model_type": "pixtral", "head_dim": 8}, {"image_token_index": 500},
    ),
    "qwen-2.5-vl": ("Qwen2_5_VLConfig", {"rope_parameters": MROPE}, QWEN_VISION, {}),
    "qwen-3-vl-moe": (
        "Qwen3VLMoeConfig",
        {
            "head_dim": 8, "rope_parameters": MROPE, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "mlp_only_layers": [1],
        },
        {**QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}, {},
    ),
}  # fmt: skip


def save_wrapped(folder: Path, name: str) -> Any:
    """A random multimodal model, saved by transformers, with the bundled tokenizer beside it."""
    kind, text, vision, fields = WRAPPED[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(
        text_config={**SHAPE, **text}, vision_config=vision, **fields
    )
    model: Any = transformers.AutoModelForImageTextToText.from_config(
        config, attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.eval().save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(MODELS / "stories260K").save_pretrained(folder)
    return model


def engine(folder: Path) -> Engine:
    options = {"dtype": "float32", "device": "cpu", "num_threads": 1, "block_size": 4}
    return Engine(EngineConfig(folder, max_model_len=128, **options))


TOKENS = torch.randint(3, 490, (1, 40), generator=torch.Generator().manual_seed(1))


def assert_logits_are(folder: Path, model: Any) -> None:
    with torch.no_grad():
        expected = model(TOKENS).logits[0]
    assert expected.std() > 0.1
    got = engine(folder).prompt_logits(TOKENS[0].tolist())
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def rename(folder: Path, **prefixes: str) -> None:
    """Rename tensors of the file by their prefixes, `__` for a dot."""
    path, tensors = folder / "model.safetensors", load_file(folder / "model.safetensors")
    for old, new in prefixes.items():
        old, new = old.replace("__", "."), new.replace("__", ".")
        tensors = {
            new + name.removeprefix(old) if name.startswith(old) else name: tensor
            for name, tensor in tensors.items()
        }
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("name", WRAPPED)
def test_a_multimodal_checkpoint_gives_its_text_model(tmp_path, name):
    model = save_wrapped(tmp_path, name)
    decoder_base(Checkpoint(tmp_path), model_spec(Checkpoint(tmp_path).config))
    assert_logits_are(tmp_path, model)


@pytest.mark.parametrize(
    ("name", "prefixes"),
    [
        ("qwen-2.5-vl", {"model__language_model__": "model__", "model__visual__": "visual__"}),
        ("qwen-2.5-vl", {"model__language_model__": "model__"}),
        ("mistral-3", {"language_model__model__": "decoder__text__"}),
    ],
)
def test_the_prefix_of_the_tensors_is_discovered(tmp_path, name, prefixes):
    model = save_wrapped(tmp_path, name)
    rename(tmp_path, **prefixes)
    assert_logits_are(tmp_path, model)


def test_the_outer_tie_is_honoured_unless_the_file_has_another_head(tmp_path):
    model = save_wrapped(tmp_path, "mistral-3")
    config = json.loads((tmp_path / "config.json").read_text())
    assert not config["text_config"]["tie_word_embeddings"]
    assert model_spec(config).shape.tied  # the outer default, which the file leaves out
    tensors = load_file(tmp_path / "model.safetensors")
    head = torch.randn(model.lm_head.weight.shape) * 0.2
    save_file(
        {**tensors, "language_model.lm_head.weight": head},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    assert torch.equal(loaded.lm_head.weight, head)
    assert_logits_are(tmp_path, loaded.eval())


def test_a_text_model_under_other_names_is_not_covered(tmp_path):
    save_wrapped(tmp_path, "mistral-3")
    rename(tmp_path, language_model__model__layers__="language_model__model__blocks__")
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(NotCovered, match=r"no language_model\.model\.layers\.0\.self_attn\.q_proj"):
        decoder_base(checkpoint, model_spec(checkpoint.config))


def test_generated_tokens_are_those_of_transformers(tmp_path):
    model = save_wrapped(tmp_path, "qwen-2.5-vl")
    expected = model.generate(
        TOKENS, attention_mask=torch.ones_like(TOKENS), do_sample=False, max_new_tokens=8, min_new_tokens=8
    )  # fmt: skip
    built, tokens = engine(tmp_path), []
    built.add_request(
        "a", TOKENS[0].tolist(), SamplingParams(temperature=0.0, max_tokens=8, min_tokens=8)
    )
    while built.has_unfinished():
        tokens += [token for output in built.step() for token in output.new_token_ids]
    assert tokens == expected[0, TOKENS.shape[1] :].tolist()
