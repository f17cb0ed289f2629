"""M-RoPE: cos and sin of three axes as transformers' modules compute them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from llmopt.base.errors import BadInput
from llmopt.engine.model.decoder.reader import model_spec
from llmopt.engine.model.layers.embedding import RotaryEmbedding
from llmopt.engine.scheduling.request import RopePositions
from transformers.models.glm4v.modeling_glm4v import Glm4vTextRotaryEmbedding
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from ...support.model_families import SHAPE

MODULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "Qwen2_5_VLTextConfig": (Qwen2_5_VLRotaryEmbedding, {"mrope_section": [1, 1, 2]}),
    "Qwen3VLTextConfig": (Qwen3VLTextRotaryEmbedding, {"mrope_section": [2, 1, 1]}),
    "Qwen3_5TextConfig": (Qwen3_5TextRotaryEmbedding, {"mrope_section": [2, 1, 1]}),
    "Glm4vTextConfig": (Glm4vTextRotaryEmbedding, {"mrope_section": [1, 2, 1]}),
}


def config_of(name: str, **rope: Any) -> Any:
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0, **rope}
    return getattr(transformers, name)(**{**SHAPE, "head_dim": 8, "rope_parameters": rope})


def rotary_embedding(config: Any) -> RotaryEmbedding:
    spec = model_spec(config.to_dict())
    ropes = [rope for rope in spec.ropes[:1] if rope is not None]
    width, device = spec.rotary_width, torch.device("cpu")
    return RotaryEmbedding(ropes, width, 64, device, torch.float32, None)


@pytest.mark.parametrize("name", MODULES)
def test_cos_and_sin_of_three_axes_are_transformers(name):
    module, rope = MODULES[name]
    config = config_of(name, **rope)
    positions = torch.randint(0, 64, (3, 20), generator=torch.Generator().manual_seed(0))
    embedding = rotary_embedding(config)
    expected = module(config)(torch.zeros(1), positions[:, None])
    got = embedding.of(positions)[0]
    interleaved = name.startswith("Glm")  # its pairs are (2i, 2i + 1), which the engine reorders
    half = slice(0, None, 2) if interleaved else slice(0, 4)
    torch.testing.assert_close(got[0][:, 0, :4], expected[0][0][:, half])
    torch.testing.assert_close(got[1][:, 0, 4:], expected[1][0][:, half])


@pytest.mark.parametrize("name", MODULES)
def test_equal_axes_are_plain_rope(name):
    embedding = rotary_embedding(config_of(name, **MODULES[name][1]))
    positions = torch.arange(5, 25)
    for one, three in zip(
        embedding.of(positions)[0], embedding.of(positions.expand(3, -1))[0], strict=True
    ):
        assert torch.equal(one, three)


def test_sections_that_do_not_cover_a_head_are_refused():
    with pytest.raises(BadInput, match=r"mrope_section \[1, 1, 1\] does not add up to the 4"):
        rotary_embedding(config_of("Qwen2_5_VLTextConfig", mrope_section=[1, 1, 1]))


def test_text_behind_an_image_goes_on_behind_its_largest_position():
    positions = RopePositions(((0, 1, 1, 1, 1, 3), (0, 1, 1, 2, 2, 3), (0, 1, 2, 1, 2, 3)), -2)
    assert positions.of(range(3, 8)) == ([1, 1, 3, 4, 5], [2, 2, 3, 4, 5], [1, 2, 3, 4, 5])
