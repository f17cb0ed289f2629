from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.quant.convert.verify import verify
from llmopt.quant.methods import sign_descent
from llmopt.quant.methods.options import MethodOptions
from llmopt.quant.pipeline import pipeline
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest, work_folder

from ...support.quant_support import STORIES, TINY
from ...support.survey.case import Case, surveyed_types

OPTIONS = MethodOptions(iters=12, batch_size=4)


def request(output: Path, model: Path = TINY, **options: Any) -> QuantizeRequest:
    settings: dict[str, Any] = {
        "method": "autoround",
        "bits": 3,
        "group_size": -1,
        "options": OPTIONS,
        "num_samples": 12,
        "seq_len": 32,
        "held_out": 2,
        "model_name": "tiny",
    }
    return QuantizeRequest(model, output, **(settings | options))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("symmetric", [True, False])
def test_every_layer_ends_nearer_to_the_float_model(
    tmp_path: Path, symmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output of each layer, on all samples, after tuning and under round-to-nearest."""
    losses: list[tuple[float, float]] = []
    plain_losses, tune = sign_descent._plain_losses, sign_descent.tune

    def measured(block: Any, roundings: Any, shapes: Any, **options: Any) -> float:
        best = tune(block, roundings, shapes, **options)
        after = {name: torch.nn.Parameter(torch.empty(shape)) for name, shape in shapes.items()}
        for name, rounding in roundings.items():
            rounding.write(after[name].data)
        with block.tuned(after):
            losses.append((float(plain_losses(block).sum()), best))
        return best

    before: list[float] = []

    def kept(block: Any) -> torch.Tensor:
        plain = plain_losses(block)
        before.append(float(plain.sum()))
        return plain

    monkeypatch.setattr(sign_descent, "_plain_losses", kept)
    monkeypatch.setattr("llmopt.quant.methods.autoround.tune", measured)
    result = quantize(request(tmp_path / "out", symmetric=symmetric))
    assert len(losses) == len(before) == len(result.layer_seconds)
    assert all(after < 0.9 * plain for (after, _), plain in zip(losses, before, strict=True))
    assert all(best < 1 for _, best in losses)
    assert verify(result.output).ok


@pytest.mark.whole
def test_a_killed_run_ends_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = quantize(request(tmp_path / "whole")).output
    written = pipeline._write_layer

    class Killed(BaseException):
        pass

    def killed(plan: Any, journal: Any, index: int, work: Any) -> Any:
        if index == 2:
            raise Killed
        return written(plan, journal, index, work)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "_write_layer", killed)
        with pytest.raises(Killed):
            quantize(request(tmp_path / "out"))
    assert work_folder(tmp_path / "out").exists()
    result = quantize(request(tmp_path / "out"))
    assert result.resumed_layers == 2
    assert contents(result.output) == contents(whole)


def test_the_descent_begins_in_weighted_ranges(tmp_path: Path) -> None:
    """One iteration moves nothing: what it measured is where it began."""
    errors: list[float] = []
    for ranges in ("weighted", "minmax"):
        options = MethodOptions(iters=1, ranges=ranges)
        result = quantize(request(tmp_path / ranges, symmetric=False, options=options))
        errors.append(result.manifest["summary"]["error"])
    assert errors[0] < 0.9 * errors[1]


def test_the_seed_decides_the_batches(tmp_path: Path) -> None:
    one, other = (
        contents(quantize(request(tmp_path / str(seed), seed=seed)).output) for seed in (0, 1)
    )
    shards = [name for name in one if name.startswith("model-layer")]
    assert shards and all(one[name] != other[name] for name in shards)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["gemma3n_text", "qwen3_moe"])
def test_layers_of_any_form_are_tuned(tmp_path: Path, name: str) -> None:
    """Experts, some of which no batch reaches; and layers with several streams, by replay."""
    model = tmp_path / "model"
    config = dict(surveyed_types()[name])
    config |= {key: 512 for key in config if key.startswith("vocab_size")} | {"vocab_size": 512}
    Case(name, config, model).model.save_pretrained(model)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / file, model / file)
    result = quantize(
        request(
            tmp_path / "out",
            model,
            num_samples=4,
            seq_len=16,
            held_out=0,
            evaluation=None,
            options=MethodOptions(iters=3, batch_size=2),
        )
    )
    modules = result.manifest["modules"]
    assert any(module.get("fallback") is None for module in modules)


def test_a_layer_without_gradients_is_rounded_where_that_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> float:
        raise RuntimeError("derivative for aten::odd is not implemented\nmore")

    monkeypatch.setattr("llmopt.quant.methods.autoround.tune", broken)
    with pytest.raises(BadInput, match="odd is not implemented: --allow-fallback"):
        quantize(request(tmp_path / "out"))
    result = quantize(request(tmp_path / "out", allow_fallback=True))
    rounded = quantize(request(tmp_path / "rtn", method="rtn", options=MethodOptions()))
    reasons = {module["fallback"] for module in result.manifest["modules"]}
    assert reasons == {
        "autoround failed: RuntimeError: derivative for aten::odd is not implemented"
    }
    assert {
        name: data
        for name, data in contents(result.output).items()
        if name.startswith("model-layer")
    } == {
        name: data
        for name, data in contents(rounded.output).items()
        if name.startswith("model-layer")
    }


def test_ggml_blocks_are_tuned(tmp_path: Path) -> None:
    result = quantize(
        request(
            tmp_path / "out",
            STORIES,
            bits=None,
            group_size=None,
            format="gguf",
            gguf_type="Q4_K",
            ignore=(r"layers\.[1-4]\.",),
        )
    )
    modules = result.manifest["modules"]
    assert {module["fallback"] for module in modules} == {None}
    assert {module["scheme"]["grid"] for module in modules} == {"gguf"}
    assert verify(result.output).ok


def test_stored_statistics_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--stats: autoround runs the layers"):
        quantize(request(tmp_path / "out", stats=tmp_path / "stats"))


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"iters": 0}, "--iters 0"), ({"lr": 2.0}, "--lr 2"), ({"batch_size": 0}, "--batch-size 0")],
)
def test_senseless_options_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        MethodOptions(**options)
