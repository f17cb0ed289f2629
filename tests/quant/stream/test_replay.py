"""Layers that are no plain chain, and models of more than text, run one by one against transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.quant.model.architecture import architecture_of
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.pipeline import pipeline
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest
from llmopt.quant.stream.chain import Chain
from llmopt.quant.stream.layer_stream import LayerStream
from llmopt.quant.stream.replay import Replay
from safetensors.torch import load_file, save_file

from tools.survey.stream_column import head_inputs, streamed_head_inputs

from ...support.quant_support import STORIES
from ...support.releases import skip_before
from ...support.survey.case import Case, surveyed_types

# Shared keys and values with per-layer inputs, indices handed on, hyper-connections with token ids, and
# cross-attention layers that a text leaves out.
REPLAYED = ("gemma3n_text", "glm_moe_dsa", "deepseek_v4", "mllama")
# States of linear attention and of convolutions, vision towers, a mask with a row for each sample.
CHAINED = ("qwen3_next", "lfm2_vl", "qwen3_vl", "idefics3", "xglm")


class Streamed(NamedTuple):
    folder: Path
    model: Any
    stream: LayerStream


def token_ids(samples: int = 3) -> torch.Tensor:
    return torch.randint(5, 100, (samples, 20), generator=torch.Generator().manual_seed(1))


def save_case(model_type: str, folder: Path, **changes: Any) -> Any:
    """The tiny model of a surveyed type, saved as transformers saves it."""
    model = Case(model_type, surveyed_types()[model_type] | changes, folder).model
    model.save_pretrained(folder)
    return model


def streamed(model_type: str, folder: Path) -> Streamed:
    model = save_case(model_type, folder)
    checkpoint = Checkpoint(folder)
    stream = LayerStream(checkpoint, architecture_of(checkpoint))
    stream.prepare(token_ids())
    return Streamed(folder, model, stream)


@pytest.mark.parametrize("model_type", [*REPLAYED, *CHAINED])
def test_layers_one_by_one_give_what_the_whole_model_gives(tmp_path: Path, model_type: str) -> None:
    _, model, stream = streamed(model_type, tmp_path)
    assert isinstance(stream._walk, Replay if model_type in REPLAYED else Chain)
    expected = head_inputs(model, token_ids())
    given = streamed_head_inputs(stream, token_ids())
    assert (given - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_layer_that_shares_keys_is_measured_as_in_the_whole_model(tmp_path: Path) -> None:
    """The last layers read the keys and values of earlier ones: wrong ones would show in what o_proj reads."""
    _, model, stream = streamed("gemma3n_text", tmp_path)
    ids, last = token_ids(), stream.num_layers - 1
    states = stream.embed(ids)
    for index in range(last):
        stream.load(index, stream.tensors(index))
        states = stream.run(index, states)
        stream.unload(index)
    assert len(states.tensors) > 1
    stream.load(last, stream.tensors(last))
    read: list[torch.Tensor] = []
    linear = model.get_submodule(f"model.layers.{last}.self_attn.o_proj")
    linear.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    head_inputs(model, ids)
    measured = stream.measure(last, states)["self_attn.o_proj"]
    expected = read[0].flatten(0, 1)
    gram = expected.T @ expected
    assert (measured.gram - gram).abs().max() < 1e-4 * gram.abs().max()


def test_nothing_is_carried_that_no_later_layer_reads(tmp_path: Path) -> None:
    stream = streamed("glm_moe_dsa", tmp_path).stream
    states = stream.embed(token_ids())
    assert states.tensors == {}
    for index in range(stream.num_layers):
        stream.load(index, stream.tensors(index))
        states = stream.run(index, states, in_place=True)
        stream.unload(index)
        assert sum(tensor.is_floating_point() for tensor in states.tensors.values()) == 1


def test_layers_that_run_several_times_are_refused_in_a_line(tmp_path: Path) -> None:
    save_case("hrm_text", tmp_path)
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(BadInput, match="'hrm_text' cannot be run one by one") as caught:
        LayerStream(checkpoint, architecture_of(checkpoint)).prepare(token_ids())
    assert "\n" not in str(caught.value)


def request(model: Path, output: Path, **options: Any) -> QuantizeRequest:
    settings: dict[str, Any] = {
        "method": "rtn",
        "format": "compressed-tensors",
        "group_size": -1,
        "num_samples": 2,
        "seq_len": 8,
        "held_out": 1,
        "model_name": "tiny",
    }
    return QuantizeRequest(model, output, **(settings | options))


def source(model_type: str, folder: Path, **changes: Any) -> Path:
    """A saved model with a tokenizer."""
    save_case(model_type, folder, **changes)
    for path in STORIES.glob("*token*"):
        shutil.copy(path, folder)
    return folder


def test_a_resumed_run_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_before("5.23", "Gemma 3n reads no token beyond the vocabulary of its layers' inputs")
    model = source("gemma3n_text", tmp_path / "model", vocab_size=512, num_hidden_layers=10)
    whole = quantize(request(model, tmp_path / "whole", method="gptq")).output
    layer = pipeline._quantize_layer

    def interrupted(plan: Any, stage: Any, source: Any, index: int, solve: Any) -> Any:
        if index == 8:  # its keys and values are those of an earlier layer
            raise KeyboardInterrupt
        return layer(plan, stage, source, index, solve)

    monkeypatch.setattr(pipeline, "_quantize_layer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantize(request(model, tmp_path / "again", method="gptq"))
    monkeypatch.setattr(pipeline, "_quantize_layer", layer)
    result = quantize(request(model, tmp_path / "again", method="gptq"))
    assert result.resumed_layers == 8
    for path in whole.iterdir():
        assert (result.output / path.name).read_bytes() == path.read_bytes()


def test_of_a_vision_model_only_the_language_layers_change(tmp_path: Path) -> None:
    model = source("qwen3_vl", tmp_path / "model", **{"text_config.vocab_size": 512})
    before, output = Checkpoint(model), quantize(request(model, tmp_path / "out")).output
    after = Checkpoint(output)
    architecture = architecture_of(before)
    quantized = {
        f"{architecture.layer_prefix(index)}.{linear}.weight"
        for index, family in enumerate(architecture.layers)
        for linear in family.linears
    }
    assert len(quantized) == 28 and architecture.prefix == "model.language_model.layers"
    for name in before.names:
        assert (name in after) == (name not in quantized)
        if name in after:
            assert torch.equal(before.tensor(name), after.tensor(name))
    config = json.loads((output / "config.json").read_text())
    config.pop("quantization_config")
    assert config == json.loads((model / "config.json").read_text())


def test_linears_that_are_left_alone_are_listed(tmp_path: Path) -> None:
    save_case("qwen2_moe", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["model.mtp.0.eh_proj.weight"] = torch.zeros(64, 128)
    stored["model.mtp.0.embed_tokens.weight"] = torch.zeros(128, 64)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    architecture = architecture_of(Checkpoint(tmp_path))
    assert set(architecture.unquantized) == {"model.mtp.0.eh_proj"} | {
        f"model.layers.{index}.mlp.{name}"
        for index in range(4)
        for name in ("gate", "shared_expert_gate")
    }
    folder = tmp_path / "vision"
    save_case("qwen3_vl", folder)
    listed = architecture_of(Checkpoint(folder)).unquantized
    assert listed and all(name.startswith("model.visual.") for name in listed)
