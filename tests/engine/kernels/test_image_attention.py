"""Bidirectional attention within images: the masked kernel against the definition, beside causal rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from llmopt.engine.kernels.attention import batch as pa
from llmopt.engine.kernels.attention.dispatch import attention_kernels

from ...support.attention_reference import attend_reference
from ...support.attention_world import World

LENGTHS, NEWS = [40, 30, 21, 9], [25, 30, 1, 4]
IMAGES = [(range(17, 29),), (range(5), range(9, 20)), (), ()]
"""Of the first sequence an image that began in the cached tokens, and one row of text after it."""


def attend(world: World, rule: pa.AttentionRule, kernel_of, chosen=None) -> torch.Tensor:
    rows, batch = world.batch(chosen)
    order = range(len(LENGTHS)) if chosen is None else chosen
    images = iter([IMAGES[i] for i in order if NEWS[i] > 1])
    spans = [replace(span, images=next(images)) for span in batch.spans]
    batch = pa.AttentionBatch(spans, batch.decode, world.block_size, world.dtype)
    return kernel_of(batch)(world.queries[rows], world.keys, world.values, batch, rule)


@pytest.fixture(params=[None, 8], ids=["full", "window"])
def rule(request: pytest.FixtureRequest) -> pa.AttentionRule:
    return pa.AttentionRule(0.2, window=request.param, bidirectional=True)


@pytest.fixture
def world() -> World:
    return World(LENGTHS, NEWS)


def kernels(world: World):
    return attention_kernels(world.device, world.dtype, world.keys.dim, world.values.dim)


def test_images_see_all_of_themselves_within_the_window(world, rule):
    expected = attend(world, rule, lambda batch: attend_reference)
    got = attend(world, rule, kernels(world).of)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)
    causal = attend(world, replace(rule, bidirectional=False), lambda batch: attend_reference)
    differs = (got - causal).abs().amax((1, 2)) > 1e-3

    assert differs[2:13].all(), "but for its last token, an image sees more"
    assert not differs[:2].any() and not differs[14:25].any(), "text is causal"
    assert not differs[55:].any(), "other sequences are causal"


def test_other_sequences_do_not_depend_on_an_image_in_the_batch(world, rule):
    together = attend(world, rule, kernels(world).of)
    alone = attend(world, rule, kernels(world).of, [2, 3])
    assert torch.equal(together[55:], alone)


def test_causal_layers_see_no_image(world):
    rule = pa.AttentionRule(0.2)
    got = attend(world, rule, kernels(world).of)
    torch.testing.assert_close(got, world.attend(attend_reference, rule), atol=2e-5, rtol=2e-5)
