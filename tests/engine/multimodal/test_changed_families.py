"""From pictures to tokens, by the processors of models whose language model treats images in its own way."""

from __future__ import annotations

import pytest
import torch
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.core.llm import LLM

from ...support.changed_families import CHANGED_FAMILIES
from ...support.image_models import picture, save_image_model
from ...support.releases import skip_without_torchvision

SPECIAL = list(range(512, 576))
"""Not to be generated: transformers' Gemma 4 reads its placeholders as padding wherever they stand."""
GREEDY = SamplingParams(
    temperature=0, max_tokens=32, ignore_eos=True, logit_bias=dict.fromkeys(SPECIAL, -100.0)
)


@pytest.mark.parametrize("name", CHANGED_FAMILIES)
def test_pictures_give_the_tokens_of_transformers(tmp_path, name):
    skip_without_torchvision(name)
    family = CHANGED_FAMILIES[name]
    model = save_image_model(tmp_path, family)
    engine = LLM(
        tmp_path, dtype="float32", device="cpu", num_threads=1, block_size=4, num_blocks=400,
        max_model_len=400, enforce_eager=True,
    )  # fmt: skip
    processor = engine.engine.images.processor
    assert processor is not None, engine.engine.images.reason
    pictures = [picture(1, 24, 24), picture(2, 40, 16)]
    text = "Once upon a time" + f" there {family.placeholder} was" * 2
    inputs = processor._processor(text=text, images=pictures, return_tensors="pt")
    with torch.no_grad():
        output = model.generate(
            **inputs, max_new_tokens=32, do_sample=False, eos_token_id=None, suppress_tokens=SPECIAL
        )
    (result,) = engine.generate([{"prompt": text, "images": pictures}], GREEDY)
    assert result.prompt_token_ids == inputs["input_ids"][0].tolist()
    assert (
        list(result.completions[0].token_ids) == output[0, len(result.prompt_token_ids) :].tolist()
    )
