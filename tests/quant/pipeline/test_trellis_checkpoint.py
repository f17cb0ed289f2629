"""What EXL3 checkpoints have alone: widths mixed by linear, the config files, and the dry run of searches."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.engine.planner.catalog import find_model
from llmopt.quant.convert.verify import PROVEN, verify
from llmopt.quant.kinds.trellis.formats import Exl3Format
from llmopt.quant.methods import sign_descent
from llmopt.quant.methods.options import MethodOptions
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.pipeline.estimate import estimate_operations
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.pipeline.preflight import preflight
from llmopt.quant.pipeline.prepare import prepare
from llmopt.quant.plan.request import QuantizeRequest

from ...support.model_families import save_model
from ...support.native_paths import needs_compiler

pytestmark = needs_compiler  # the search of trellis codes

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
    """Layers at 2 bits, but for one linear of each, and the output projection at 6."""
    overrides = (r"down_proj$=bits:3", "lm_head=bits:6")
    request = request_for(model, model.parent / "out", overrides=overrides, lm_head=True)
    return quantize(request).output


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
    assert (config["quant_method"], config["codebook"], config["head_bits"]) == ("exl3", "mul1", 6)
    entry = config["tensor_storage"]["model.layers.1.mlp.down_proj"]
    assert entry["bits_per_weight"] == 3 and entry["mul1_multiplier"] == 0x83DCD12D
    stored = entry["stored_tensors"]["model.layers.1.mlp.down_proj.trellis"]
    assert stored["shape"] == [16, 8, 48] and stored["torch_dtype"] == "int16"
    assert stored["n_bytes"] == 16 * 8 * 48 * 2
    assert config["bits"] == pytest.approx(15 / 7, abs=1e-3)  # exllamav3 counts the head apart


def test_a_codebook_with_another_multiplier_is_refused(checkpoint: Path) -> None:
    """The values would be others than those that the codes were searched with."""
    opened, module = Checkpoint(checkpoint), "model.layers.0.self_attn.q_proj"

    class Altered:
        __contains__ = opened.__contains__

        @staticmethod
        def tensor(name: str) -> torch.Tensor:
            return opened.tensor(name) + (2 if name.endswith(".mul1") else 0)

    source: Any = Altered
    assert Exl3Format().unpack(module, opened, {}).scheme.codebook == "mul1"
    with pytest.raises(BadInput, match=r"q_proj\.mul1 is 0x83dcd12f, another multiplier"):
        Exl3Format().unpack(module, source(), {})


def test_the_plan_of_its_config_has_the_bytes_of_its_files(checkpoint: Path) -> None:
    planned = find_model(str(checkpoint))
    recipe = planned.as_stored()
    assert recipe.label == "trellis2.2 per channel" and recipe.head_bits == 6
    # But for the rounding up of each linear's share of the mean.
    assert planned.stored_bytes == pytest.approx(recipe.bytes_of(planned.shape.tensors()), abs=15)


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
