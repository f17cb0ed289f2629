"""An EXL3 checkpoint from end to end: written, killed and resumed, verified, converted, and run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.engine import Engine
from llmopt.quant.base.errors import BadInput
from llmopt.quant.base.progress import Silent
from llmopt.quant.convert.convert import convert
from llmopt.quant.convert.dequantized import dequantized_model
from llmopt.quant.convert.verify import PROVEN, verify
from llmopt.quant.methods.base import MethodOptions
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.pipeline.estimate import estimate_operations
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.pipeline.preflight import preflight
from llmopt.quant.pipeline.prepare import prepare
from llmopt.quant.request.request import QuantizeRequest
from llmopt.quant.tuning import sign_descent

from ...support.model_families import save_model

SHAPE = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trellis") / "model"
    save_model(folder, "LlamaConfig", SHAPE)
    return folder


TUNED = MethodOptions(asymmetric=True, finetune_steps=6, batch_size=2)


def request_for(model: Path, output: Path, **options: object) -> QuantizeRequest:
    usual = {"bits": 2, "num_samples": 4, "seq_len": 32, "held_out": 0}
    return QuantizeRequest(model, output, method="trellis", **{**usual, **options})  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def checkpoint(model: Path) -> Path:
    """Tuned towards the float model, whose states each layer needs beside the quantized ones."""
    overrides = (r"down_proj$=bits:3",)
    request = request_for(model, model.parent / "out", overrides=overrides, options=TUNED)
    return quantize(request).output


class Killed(BaseException):
    """What `kill -9` does."""


class KilledAfterALayer(Silent):
    def advance(self, count: int = 1) -> None:
        if count:  # the first call says how many layers were done
            raise Killed


def test_a_killed_run_ends_with_the_same_bytes(model: Path, checkpoint: Path) -> None:
    overrides = (r"down_proj$=bits:3",)
    request = request_for(model, model.parent / "again", overrides=overrides, options=TUNED)
    killed = KilledAfterALayer()
    with pytest.raises(Killed):
        quantize(request, killed)
    result = quantize(request)
    assert result.resumed_layers == 1
    for file in checkpoint.iterdir():
        assert (result.output / file.name).read_bytes() == file.read_bytes(), file.name


def test_finetuning_brings_each_layer_nearer_to_the_float_model(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the layer's output, on the calibration samples, after tuning as a share of before."""
    shares: list[float] = []
    tune = sign_descent.tune

    def measured(block: Any, parts: Any, shapes: Any, **given: Any) -> float:
        sums = []
        for steps in (0, given["iters"]):
            best = tune(block, parts, shapes, **{**given, "iters": steps})
            weights = {name: torch.nn.Parameter(torch.empty(shapes[name])) for name in shapes}
            with torch.no_grad(), block.tuned(weights):
                for name, part in parts.items():
                    part.write(weights[name].data)
                sums.append(float(block.losses(torch.arange(block.num_samples)).sum()))
        shares.append(sums[1] / sums[0])
        return best

    monkeypatch.setattr("llmopt.quant.methods.transformed.tune", measured)
    options = MethodOptions(finetune_steps=40, batch_size=4)
    request = request_for(model, model.parent / "tuned", options=options, ignore=("mlp",))
    result = quantize(request)
    assert len(shares) == 2 and max(shares) < 0.95
    assert verify(result.output).status == PROVEN


def test_tuning_alone_leaves_the_targets_of_the_codes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The float model's states, behind the layer by then, are what scales are tuned to, and no more."""

    def shifted(*_: object) -> None:
        raise AssertionError("GPTAQ was not asked for")

    monkeypatch.setattr("llmopt.quant.methods.transformed.asymmetric_shift", shifted)
    options = MethodOptions(asymmetric=False, finetune_steps=1, batch_size=2)
    quantize(request_for(model, model.parent / "own-targets", options=options, ignore=("mlp",)))


def test_tuning_beside_gptaq_is_expected_to_hold_its_targets_too(model: Path) -> None:
    hidden = []
    for options in (MethodOptions(asymmetric=True), TUNED):
        session = prepare(request_for(model, model.parent / "expected", options=options))
        hidden.append(preflight(session).memory.hidden)
    assert hidden[1] == 1.5 * hidden[0]


def test_both_config_files_name_every_module(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    assert config == json.loads((checkpoint / "quantization_config.json").read_text())
    assert (config["quant_method"], config["codebook"], config["head_bits"]) == ("exl3", "mul1", 16)
    entry = config["tensor_storage"]["model.layers.1.mlp.down_proj"]
    assert entry["bits_per_weight"] == 3 and entry["mul1_multiplier"] == 0x83DCD12D
    stored = entry["stored_tensors"]["model.layers.1.mlp.down_proj.trellis"]
    assert stored["shape"] == [16, 8, 48] and stored["torch_dtype"] == "int16"
    assert stored["n_bytes"] == 16 * 8 * 48 * 2
    assert config["bits"] == pytest.approx(15 / 7, abs=1e-3)


def test_it_is_proven_and_has_the_logits_of_the_dequantized_weights(checkpoint: Path) -> None:
    report = verify(checkpoint)
    assert report.status == PROVEN, report.failures
    tokens = [1, 7, 30, 5, 44, 12]
    with torch.inference_mode():
        expected = dequantized_model(checkpoint)(torch.tensor([tokens])).logits[0]
    engine = Engine(EngineConfig(checkpoint, dtype="float32", device="cpu"))
    # The C kernel does not round a codebook's values to float16.
    assert (engine.prompt_logits(tokens) - expected).norm() < 2e-3 * expected.norm()


def test_integers_convert_to_it_only_with_loss(model: Path, tmp_path: Path) -> None:
    request = QuantizeRequest(
        model, tmp_path / "gptq", method="gptq", num_samples=4, seq_len=32, held_out=0
    )
    source = quantize(request).output
    with pytest.raises(BadInput, match="exl3"):
        convert(Checkpoint(source), "exl3", tmp_path / "exl3")
    convert(Checkpoint(source), "exl3", tmp_path / "exl3", allow_loss=True)
    assert verify(tmp_path / "exl3").status == PROVEN


def test_the_dry_run_counts_the_searches_and_what_stages_share(model: Path, tmp_path: Path) -> None:
    predicted = preflight(prepare(request_for(model, tmp_path / "out")))
    assert predicted.memory.kept > 0
    asked = [
        replace(request_for(model, tmp_path / "out", format=None), method=method, bits=4)
        for method in ("trellis", "gptq")
    ]
    plans = [prepare(each).plan for each in asked]
    trellis, gptq = (estimate_operations(plan, tokens=128) for plan in plans)
    weights = sum(out * inputs for out, inputs in plans[0].modules.values())
    assert trellis - gptq > 65536 * weights


def test_widths_that_the_transforms_do_not_divide_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "narrow", "LlamaConfig", {})
    with pytest.raises(BadInput, match=r"Hadamard transforms of 128 channels.*--ignore it"):
        quantize(request_for(tmp_path / "narrow", tmp_path / "out"))
