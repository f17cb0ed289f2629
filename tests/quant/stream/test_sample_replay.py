"""Samples with images through the layer stream: the wrapped model's own hidden states, family by family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.quant.model.architecture import architecture_of
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.plan.selection import vision_layers
from llmopt.quant.source.load_processor import load_processor, load_tokenizer
from llmopt.quant.stream.calibration import ImageInputs, Images
from llmopt.quant.stream.image_samples import Pair, image_calibration
from llmopt.quant.stream.layer_stream import LayerStream

from ...support.releases import skip_without_torchvision
from ...support.vision_checkpoints import FAMILIES, save_pictures, save_wrapped

LENGTH = 224


def samples(folder: Path, num_samples: int = 2) -> tuple[torch.Tensor, Images]:
    """Samples with one and two images, and one of text alone."""
    pictures = save_pictures(folder)
    pairs = [
        Pair("a small boat <image> on the sea", pictures[:1], "first"),
        Pair("two: <image> and <image>", pictures[1:3], "second"),
    ]
    tokenizer = load_tokenizer(folder)
    processor = load_processor(folder, tokenizer, trust_remote_code=False)
    made = [
        image_calibration(
            "pairs", [pair], ["Once there was a dog. " * 90] * (number > 0), processor, tokenizer,
            num_samples=1 + number, seq_len=LENGTH, seed=0,
        )
        for number, pair in enumerate(pairs)
    ]  # fmt: skip
    ids = torch.cat([each.token_ids for each in made])
    return ids, tuple(image for each in made for image in each.images)


def expected(model: Any, ids: torch.Tensor, images: ImageInputs) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    handle = model.get_output_embeddings().register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0])
    )
    with torch.no_grad():
        model(input_ids=ids, **images.tensors)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_hidden_states_are_those_of_the_wrapped_model(name: str, tmp_path: Path) -> None:
    skip_without_torchvision(name)
    model = save_wrapped(tmp_path, name)
    ids, images = samples(tmp_path)
    assert [each.num_images for each in images] == [1, 2, 0]
    checkpoint = Checkpoint(tmp_path)
    stream = LayerStream(checkpoint, architecture_of(checkpoint))
    stream.prepare(ids, images)
    states = stream.embed(ids, images)
    for index in range(stream.num_layers):
        stream.load(index, stream.tensors(index))
        states = stream.run(index, states, in_place=True)
        stream.unload(index)
    for row, inputs in enumerate(stream.head_inputs(states)):
        wanted = expected(model, ids[row : row + 1], images[row])
        torch.testing.assert_close(inputs, wanted, atol=2e-5, rtol=1e-4)
        if row == 0:  # the pixels count
            plain = expected(model, ids[:1], ImageInputs())
            assert (wanted - plain).abs().max() > 1e-2


@pytest.mark.parametrize("name", FAMILIES)
def test_the_inputs_of_the_tower_are_those_of_the_wrapped_model(name: str, tmp_path: Path) -> None:
    skip_without_torchvision(name)
    model = save_wrapped(tmp_path, name)
    ids, images = samples(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    architecture = vision_layers(checkpoint, name)
    stream = LayerStream(checkpoint, architecture)
    stream.prepare(ids[:2], images[:2])
    states = stream.embed(ids[:2], images[:2])
    measured: dict[str, torch.Tensor] = {}
    for index in range(stream.num_layers):
        stream.load(index, stream.tensors(index))
        for linear, record in stream.measure(index, states).items():
            path = architecture.meta_model.paths[index]
            inner = architecture.meta_model.names_in_layer(index)[f"{linear}.weight"]
            measured[f"{path}.{inner.removesuffix('.weight')}"] = record.gram
        states = stream.run(index, states, in_place=True)
        stream.unload(index)
    grams = {linear: torch.zeros_like(gram) for linear, gram in measured.items()}

    def adding(gram: torch.Tensor) -> Any:
        def hook(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            rows = inputs[0].flatten(0, -2)
            gram.add_(rows.T @ rows)

        return hook

    for linear, gram in grams.items():
        model.get_submodule(linear).register_forward_pre_hook(adding(gram))
    for row in range(2):
        expected(model, ids[row : row + 1], images[row])
    assert len(grams) > 8
    for linear, gram in grams.items():
        assert gram.diagonal().sum() > 0, linear
        torch.testing.assert_close(measured[linear], gram, atol=1e-2, rtol=1e-3, msg=linear)


def test_a_pair_that_does_not_fit_names_its_line_and_tokens(tmp_path: Path) -> None:
    save_wrapped(tmp_path, "qwen2_5_vl")
    tokenizer = load_tokenizer(tmp_path)
    processor = load_processor(tmp_path, tokenizer, trust_remote_code=False)
    pair = Pair("a boat", save_pictures(tmp_path)[:1], "pairs.jsonl line 7")
    with pytest.raises(BadInput, match=r"pairs.jsonl line 7 takes \d+ tokens .* --seq-len"):
        image_calibration(
            "p", [pair], [], processor, tokenizer, num_samples=1, seq_len=8, seed=0
        )  # fmt: skip
