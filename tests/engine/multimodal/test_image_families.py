"""Images in every family: the tokens and log-probabilities of transformers' own pass, however they are scheduled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.core.llm import LLM
from PIL import Image

from ...support.image_models import IMAGE_FAMILIES, picture, save_image_model
from ...support.releases import skip_without_torchvision

NUM_TOKENS = 32
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
IMAGES = [picture(1), picture(2, 30, 50), picture(3, 64, 64)]


@dataclass
class World:
    """A family's checkpoint, prompts with no, one and two images, and what transformers makes of them."""

    folder: Any
    model: Any
    placeholder: str
    prompts: list[dict[str, Any]]
    inputs: list[dict[str, torch.Tensor]]
    tokens: list[list[int]]

    def prompt(self, *images: Image.Image) -> dict[str, Any]:
        text = "Once upon a time" + "".join(f" there {self.placeholder} was" for _ in images)
        return {"prompt": f"{text} a cat", "images": list(images)}


@pytest.fixture(scope="module", params=IMAGE_FAMILIES)
def world(request, tmp_path_factory) -> World:
    skip_without_torchvision(request.param)
    folder = tmp_path_factory.mktemp("images")
    family = IMAGE_FAMILIES[request.param]
    model = save_image_model(folder, family)
    made = World(folder, model, family.placeholder, [], [], [])
    made.prompts = [made.prompt(), made.prompt(IMAGES[0]), made.prompt(*IMAGES[1:])]
    processor = llm(made).engine.images.processor
    assert processor is not None
    for prompt in made.prompts:
        arguments = {"images": prompt["images"]} if prompt["images"] else {}
        inputs = dict(processor._processor(text=prompt["prompt"], return_tensors="pt", **arguments))
        if "pixel_values" in inputs:
            inputs["pixel_values"] = inputs["pixel_values"].float()
        made.inputs.append(inputs)
        with torch.no_grad():
            output = model.generate(
                **inputs, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
            )
        made.tokens.append(output[0, inputs["input_ids"].shape[1] :].tolist())
    return made


def llm(world: World, **options: Any) -> LLM:
    fixed = {"dtype": "float32", "device": "cpu", "num_threads": 1, "block_size": 4}
    sizes = {"num_blocks": 400, "max_model_len": 400, "enforce_eager": True}
    return LLM(world.folder, **{**fixed, **sizes, **options})


def tokens_of(results) -> list[list[int]]:
    return [list(result.completions[0].token_ids) for result in results]


@pytest.mark.sweep(4)
def test_a_mixed_batch_gives_the_tokens_of_transformers(world):
    assert len({tuple(tokens) for tokens in world.tokens}) == 3
    results = llm(world).generate(world.prompts, GREEDY)
    assert [r.prompt_token_ids for r in results] == [
        inputs["input_ids"][0].tolist() for inputs in world.inputs
    ]
    assert tokens_of(results) == world.tokens


@pytest.mark.sweep(4)
def test_log_probabilities_of_prompts_are_those_of_transformers(world):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    for result, inputs in zip(
        llm(world).generate(world.prompts, params), world.inputs, strict=True
    ):
        with torch.no_grad():
            logits = world.model(**inputs).logits[0].float().log_softmax(-1)
        ids = inputs["input_ids"][0]
        expected = logits[:-1].gather(1, ids[1:, None])[:, 0]
        assert result.prompt_logprobs is not None
        got = [each.logprob for each in result.prompt_logprobs if each is not None]
        torch.testing.assert_close(torch.tensor(got), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("chunk", [3, 17])
def test_a_chunk_may_end_within_an_image(world, chunk):
    results = llm(world, prefill_chunk_size=chunk).generate(world.prompts, GREEDY)
    assert tokens_of(results) == world.tokens


@pytest.mark.sweep(4)
def test_a_prefix_hits_with_the_same_image_and_misses_with_another(world):
    model = llm(world)
    cache = model.engine.scheduler.cache
    assert tokens_of(model.generate(world.prompts[1], GREEDY)) == world.tokens[1:2]
    same = tokens_of(model.generate(world.prompts[1], GREEDY))
    hits = cache.num_hit_tokens
    image = model.engine.images.processor.prepare("a" + world.placeholder, [IMAGES[0]]).images[0]
    assert hits >= image.num_tokens
    assert same == world.tokens[1:2]
    other = IMAGES[0].copy()
    other.putpixel((0, 0), (1, 2, 3))
    model.generate(world.prompt(other), GREEDY)
    assert cache.num_hit_tokens - hits < 20  # what is before the image
    assert cache.num_hit_tokens > hits


@pytest.mark.sweep(4)
def test_preempted_sequences_are_recomputed_with_their_images(world):
    lengths = [inputs["input_ids"].shape[1] for inputs in world.inputs]
    blocks = max(sum(lengths) // 4 + 10, (max(lengths) + NUM_TOKENS) // 4 + 4)
    model = llm(world, num_blocks=blocks, enable_prefix_caching=False, encoder_cache_bytes=0)
    order = [2, 1, 0]
    results = model.generate([world.prompts[index] for index in order], GREEDY)
    assert tokens_of(results) == [world.tokens[index] for index in order]
    assert model.engine.stats.num_preemptions > 0
