"""Language models that change with images: transformers' logits and greedy tokens, however steps are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import SpeculationConfig
from llmopt.engine.core.engine import Engine

from ...support import image_oracle as im

COUNT = 32


class Case(NamedTuple):
    name: str
    folder: Path
    model: Any
    prompts: list[im.Prompt]
    tokens: list[list[int]]

    def engine(self, **options: Any) -> Engine:
        return im.image_engine(self.folder, **options)


def prompts_of(name: str) -> list[im.Prompt]:
    """Prompts with no image, with one, and with two of different sizes where the model has sizes."""
    small, large = im.image(name, 1), im.image(name, 2, 4, 10)
    return [im.prompt(0, 14), im.prompt(1, 5, small, 7), im.prompt(2, 3, large, 4, small, 6)]


def case_of(name: str, folder: Path) -> Case:
    model = im.save_image_model(folder, name)
    prompts = prompts_of(name)
    return Case(
        name, folder, model, prompts, [im.expected_tokens(model, p, COUNT) for p in prompts]
    )


@pytest.fixture(scope="module", params=im.IMAGE_MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return case_of(request.param, tmp_path_factory.mktemp(request.param))


def assert_logits_are_transformers(case: Case) -> None:
    engine = case.engine()
    for given in case.prompts:
        expected = im.expected_logits(case.model, given)
        assert expected.std() > 0.1
        torch.testing.assert_close(im.engine_logits(engine, given), expected, atol=2e-4, rtol=2e-4)


def test_logits_are_transformers(case):
    assert_logits_are_transformers(case)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", im.OTHERS)
def test_models_that_share_these_mechanisms(tmp_path, name):
    case = case_of(name, tmp_path)
    assert_logits_are_transformers(case)
    engine = case.engine(max_num_batched_tokens=11, max_num_seqs=4)
    assert im.generated(engine, case.prompts, COUNT) == case.tokens


@pytest.mark.sweep(3)
def test_greedy_tokens_of_a_mixed_batch_are_transformers(case):
    engine = case.engine()
    assert im.generated(engine, case.prompts, COUNT) == case.tokens
    # The second time all prompts are prefix hits, some of which end within an image.
    assert im.generated(engine, case.prompts, COUNT) == case.tokens
    assert engine.stats.prefix_cache_hits > 0


@pytest.mark.sweep(3)
def test_chunks_and_eager_steps_change_nothing(case):
    engine = case.engine(max_num_batched_tokens=11, max_num_seqs=4, enforce_eager=True)
    assert im.generated(engine, case.prompts, COUNT) == case.tokens
    engine = case.engine(max_num_batched_tokens=32, prefill_chunk_size=10)
    assert im.generated(engine, case.prompts, COUNT) == case.tokens


@pytest.mark.sweep(3)
def test_preemption_and_async_scheduling_change_nothing(case):
    engine = case.engine(num_blocks=26, async_scheduling=True)
    assert im.generated(engine, case.prompts, COUNT) == case.tokens
    assert engine.stats.num_preemptions > 0
    engine.close()


@pytest.mark.sweep(3)
def test_another_image_in_the_same_text_is_no_prefix_hit(case):
    one, other = (im.prompt(1, 5, im.image(case.name, seed), 7) for seed in (1, 3))
    assert one.token_ids == other.token_ids
    engine = case.engine()
    assert im.generated(engine, [one], 8) == [case.tokens[1][:8]]
    assert im.generated(engine, [other], 8) == [im.expected_tokens(case.model, other, 8)]
    assert engine.stats.prefix_cache_hits == 4, "the block of text before the image"


def test_the_image_after_an_image_is_part_of_what_a_prefix_holds(tmp_path):
    name = "gemma-3"  # whose images see each other where no text is between them
    model = im.save_image_model(tmp_path, name)
    first = im.image(name, 1)
    prompts = [im.prompt(1, 5, first, im.image(name, seed), 7) for seed in (2, 3)]
    engine = im.image_engine(tmp_path)
    for given in prompts:
        assert im.generated(engine, [given], 8) == [im.expected_tokens(model, given, 8)]
    assert engine.stats.prefix_cache_hits == 4, "the block of text before the images"


@pytest.mark.sweep(3)
def test_completions_of_a_prompt_share_its_positions(case):
    engine = case.engine()
    assert im.generated(engine, case.prompts[2:], 12, n=2) == [case.tokens[2][:12]] * 2


@pytest.mark.sweep(3)
def test_draft_tokens_take_positions_behind_the_images(case):
    engine = case.engine(speculation=SpeculationConfig("ngram"))
    assert im.generated(engine, case.prompts, COUNT) == case.tokens


def test_an_image_that_no_step_holds_is_refused(case):
    engine = case.engine(max_num_batched_tokens=8, max_num_seqs=2)
    given, params = case.prompts[1], SamplingParams(max_tokens=4)
    if case.name in ("gemma-3", "gemma-4"):
        with pytest.raises(BadInput, match="an image of 9 tokens"):
            engine.add_request("0", given.token_ids, params, images=given.images)
    else:
        assert im.generated(engine, [given], 4) == [case.tokens[1][:4]]


def test_images_without_text_between_them(tmp_path):
    name = "qwen-2.5-vl"
    im.save_image_model(tmp_path, name)
    given = im.prompt(0, 3, im.image(name, 1), im.image(name, 2), 2)
    engine = im.image_engine(tmp_path)
    with pytest.raises(BadInput, match="2 images: transformers cannot place them"):
        engine.add_request("0", given.token_ids, SamplingParams(max_tokens=4), images=given.images)


def test_images_beside_attention_sinks(tmp_path):
    im.save_image_model(tmp_path, "qwen-2.5-vl")
    given = im.prompt(0, 3, im.image("qwen-2.5-vl", 1), 2)
    engine = im.image_engine(tmp_path, window=16, attention_sinks=4)
    with pytest.raises(BadInput, match="attention sinks rotate by places in the cache"):
        engine.add_request("0", given.token_ids, SamplingParams(max_tokens=4), images=given.images)
