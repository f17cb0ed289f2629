"""Cached calibration statistics, mixed precision from them, and KV-cache scales."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base import atomic_io
from llmopt.base.errors import BadInput
from llmopt.base.progress import Silent
from llmopt.engine.base.units import parse_bytes
from llmopt.quant.convert.verify import PROVEN, verify
from llmopt.quant.methods.options import MethodOptions
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.pipeline import mixed_precision, pipeline
from llmopt.quant.pipeline.candidates import search_of
from llmopt.quant.pipeline.divergence import divergences
from llmopt.quant.pipeline.pipeline import QuantizeResult, quantize
from llmopt.quant.plan.plan import make_plan
from llmopt.quant.plan.request import QuantizeRequest
from llmopt.quant.stream.calls import LARGEST
from llmopt.quant.stream.layer_stream import LayerStream
from transformers import AutoModelForCausalLM

from ...support.quant_support import LENGTH, STORIES

MOST_LAYERS = (r"layers\.[1-4]\.",)


def request(folder: Path, name: str, **options: Any) -> QuantizeRequest:
    settings: dict[str, Any] = {
        "num_samples": 8,
        "seq_len": LENGTH,
        "model_name": "m",
        "method": "gptq",
    }
    return QuantizeRequest(STORIES, folder / name, **(settings | options))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, QuantizeResult]:
    """A folder of statistics, and the run that made it."""
    folder = tmp_path_factory.mktemp("measured")
    return folder, quantize(request(folder, "first", stats=folder / "stats"))


def test_later_runs_pass_nothing_through_the_model(
    measured: tuple[Path, QuantizeResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, first = measured

    def run(*_: object, **__: object) -> torch.Tensor:
        raise AssertionError("the model was run")

    monkeypatch.setattr(LayerStream, "run", run)
    again = quantize(request(tmp_path, "again", stats=folder / "stats"))
    assert contents(again.output) == contents(first.output)
    for options in ({"bits": 3, "group_size": 64}, {"method": "awq"}, {"method": "smoothquant"}):
        other = quantize(
            request(
                tmp_path, "-".join(map(str, options.values())), stats=folder / "stats", **options
            )
        )
        assert verify(other.output).status == PROVEN
        assert other.manifest["modules"][0]["held_out_error"] > 0


def test_statistics_of_other_data_are_refused(
    measured: tuple[Path, QuantizeResult], tmp_path: Path
) -> None:
    folder, _ = measured
    with pytest.raises(BadInput, match="statistics of another model, other calibration data"):
        quantize(request(tmp_path, "out", stats=folder / "stats", seed=1))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(BadInput, match="other files than statistics"):
        quantize(request(tmp_path, "out", stats=tmp_path / "mine"))
    with pytest.raises(BadInput, match="without --kv-cache do not have them"):
        quantize(
            request(
                tmp_path, "out", stats=folder / "stats", kv_cache="fp8", format="compressed-tensors"
            )
        )
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_measuring_goes_on_where_it_was_cut(
    measured: tuple[Path, QuantizeResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, first = measured
    real, calls = atomic_io.os.fsync, iter(range(1000))

    class Crash(BaseException):
        pass

    def crash(descriptor: int) -> None:
        if next(calls) > 14:
            raise Crash
        real(descriptor)

    asked = request(tmp_path, "out", stats=tmp_path / "stats")
    with monkeypatch.context() as patch:
        patch.setattr(atomic_io.os, "fsync", crash)
        with pytest.raises(Crash):
            quantize(asked)
    assert list((tmp_path / "stats").glob("layer-*")) and not (tmp_path / "out").exists()
    assert contents(quantize(asked).output) == contents(first.output)
    assert contents(tmp_path / "stats") == contents(folder / "stats")


def test_measuring_keeps_what_running_a_layer_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass after it begins at the last linears; the statistics are the same, to the bit."""
    calls: list[int] = []
    real = torch.nn.Linear.forward

    def forward(self: torch.nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
        calls.append(inputs.shape[0])
        return real(self, inputs)

    monkeypatch.setattr(torch.nn.Linear, "forward", forward)
    quantize(request(tmp_path, "kept", stats=tmp_path / "kept-stats", num_samples=16, held_out=0))
    kept = sum(calls)
    monkeypatch.setattr(LayerStream, "final_submodules", lambda *_: None)
    quantize(request(tmp_path, "plain", stats=tmp_path / "plain-stats", num_samples=16, held_out=0))
    assert kept < 0.8 * (sum(calls) - kept)
    assert contents(tmp_path / "kept-stats") == contents(tmp_path / "plain-stats")


@pytest.mark.whole
def test_mixed_precision_keeps_its_target_and_beats_one_width(
    measured: tuple[Path, QuantizeResult], tmp_path: Path
) -> None:
    folder, _ = measured
    fixed = {"stats": folder / "stats", "format": "compressed-tensors"}
    uniform = quantize(request(tmp_path, "uniform", group_size=32, **fixed)).manifest["summary"]
    auto = request(tmp_path, "auto", **fixed)
    auto = replace(auto, method="auto", target_bpw=uniform["bits_per_weight"])
    result = quantize(auto)
    summary = result.manifest["summary"]
    assert summary["bits_per_weight"] <= uniform["bits_per_weight"]
    assert summary["error"] <= uniform["error"]
    _check_search(result)
    assert any("bits per weight of at most" in note for note in result.notes)
    assert not any("vLLM refuses" in note for note in result.notes)
    assert verify(result.output).status == PROVEN

    target = 1_600_000
    result = quantize(replace(auto, output=tmp_path / "size", target_bpw=None, target_bytes=target))
    index = json.loads((result.output / "model.safetensors.index.json").read_text())
    assert 0.99 * target < index["metadata"]["total_size"] <= target
    assert result.manifest["options"]["target_bytes"] == target


def _check_search(result: QuantizeResult) -> dict[str, Any]:
    """The record of what was compared: what is taken has the smaller KL, and the notes say so."""
    search = result.manifest["search"]
    assert search["taken"] == min(("mixed", "uniform"), key=lambda kind: search[kind]["kl"])
    taken = search[search["taken"]]["bits_per_weight"]
    assert taken == pytest.approx(result.manifest["summary"]["bits_per_weight"], abs=0.01)
    assert any(note.endswith(f"{search['taken']} is taken") for note in result.notes)
    return search


def test_mixed_precision_leaves_no_statistics_behind(tmp_path: Path) -> None:
    asked = request(tmp_path, "out", num_samples=2, ignore=MOST_LAYERS)
    result = quantize(replace(asked, method="auto", target_bpw=5.5))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    search = _check_search(result)
    # No scheme alone is of this size, and bits that can be spent help.
    assert search["taken"] == "mixed"
    assert search["uniform"]["bits_per_weight"] < 4.6 < search["mixed"]["bits_per_weight"] <= 5.5
    assert "behind the quantized layers" in result.manifest["error"]


def test_a_choice_that_is_worse_by_kl_gives_way_to_one_scheme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixed_precision, "divergences", lambda *_: torch.tensor([[0.2], [0.1]]))
    asked = request(tmp_path, "out", num_samples=2, format="compressed-tensors", ignore=MOST_LAYERS)
    result = quantize(replace(asked, method="auto", target_bpw=5.5))
    assert result.manifest["search"]["taken"] == "uniform"
    assert result.manifest["scheme"] == result.manifest["search"]["uniform"]["scheme"]


def test_divergence_is_that_of_the_whole_model(tmp_path: Path) -> None:
    """Against transformers' logits of both models, in float32."""
    asked = request(
        tmp_path,
        "out",
        method="rtn",
        format="compressed-tensors",
        compute="float32",
        held_out=0,
        options=MethodOptions(ranges="minmax"),
    )
    result = quantize(asked)
    session = pipeline.prepare(replace(asked, output=tmp_path / "other"))
    ids = session.calibration.token_ids[:2]
    ours = divergences(session.plan, session.stream, ids, [session.plan.schemes], Silent()).mean()
    logs = []
    for folder in (STORIES, result.output):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.inference_mode():
            logs.append(model(ids).logits.log_softmax(-1))
    expected = float((logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean())
    assert ours == pytest.approx(expected, rel=1e-2)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
@pytest.mark.parametrize("kind", LARGEST)
def test_scales_of_the_cache_are_those_of_the_model(
    tmp_path: Path, kind: str, strategy: Any
) -> None:
    """Largest keys (after rotation) and values of transformers' own cache, on the calibration tokens."""
    from transformers import DynamicCache

    asked = request(
        tmp_path,
        "out",
        method="rtn",
        bits=8,
        num_samples=4,
        held_out=0,
        format="compressed-tensors",
        compute="float32",
        kv_cache=kind,
        kv_cache_strategy=strategy,
    )
    result = quantize(asked)
    assert verify(result.output).status == PROVEN
    token_ids = pipeline.prepare(replace(asked, output=tmp_path / "other")).calibration.token_ids
    checkpoint = Checkpoint(result.output)
    scheme = (checkpoint.quantization_config or {})["kv_cache_scheme"]
    assert scheme["num_bits"] == 8 and scheme["type"] == "float"
    assert scheme["strategy"] == strategy
    config = json.loads((result.output / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = None  # or it would quantize what is compared
    (result.output / "config.json").write_text(json.dumps(config))
    cache = DynamicCache()
    model = AutoModelForCausalLM.from_pretrained(result.output, dtype=torch.float32)
    with torch.inference_mode():
        model(token_ids, past_key_values=cache)
    layers: list[Any] = cache.layers
    for index, layer in enumerate(layers):
        for letter, states in (("k", layer.keys), ("v", layer.values)):
            stored = checkpoint.tensor(f"model.layers.{index}.self_attn.{letter}_scale")
            per_head = strategy == "attn_head"
            expected = states.abs().amax(dim=(0, 2, 3) if per_head else (0, 1, 2, 3))
            assert stored.shape == ((4, 1, 1) if per_head else (1,))
            assert stored.dtype == torch.float32
            assert torch.allclose(stored.flatten() * LARGEST[kind], expected.view(-1), rtol=1e-3)


def test_a_layer_worse_than_rtn_falls_back_to_rtn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantized: Callable[..., QuantizeResult]
) -> None:
    from llmopt.quant.methods import gptq
    from llmopt.quant.methods.rounding import round_weight

    real = gptq.quantize_layer

    def spoiled(problem: Any) -> Any:
        """The values of every layer, made twice as wrong."""
        result = real(problem)
        name = "self_attn.v_proj"
        bad = round_weight(problem, name, problem.weights[name] * 1.5)
        rounded = round_weight(problem, name, problem.weights[name]).dequantize()
        report = problem.report(name, bad.dequantize(), rounded)
        reports = [report if one.module.endswith(name) else one for one in result.reports]
        return replace(result, weights=result.weights | {name: bad}, reports=reports)

    monkeypatch.setattr(gptq, "quantize_layer", spoiled)
    kept = quantize(request(tmp_path, "kept", num_samples=2)).manifest
    assert kept["summary"]["num_worse"] == 5
    back = quantize(request(tmp_path, "back", num_samples=2, revert_worse=True)).manifest
    assert back["summary"]["num_worse"] == 0
    for module in back["modules"]:
        reverted = module["module"].endswith("v_proj")
        assert (module["fallback"] == "worse than plain rounding") == reverted
        assert (module["error"] == module["rtn_error"]) == reverted


@pytest.mark.parametrize("target", [{"target_bytes": 200_000}, {"target_bpw": 1.0}], ids=str)
def test_a_target_that_is_too_small_names_the_least(tmp_path: Path, target: dict[str, Any]) -> None:
    asked = QuantizeRequest(STORIES, tmp_path / "out", format="compressed-tensors", method="gptq")
    plan = make_plan(asked)
    sizes = target.get("target_bpw"), target.get("target_bytes")
    with pytest.raises(BadInput, match="the target is too small") as caught:
        search_of(plan, *sizes)
    option, least = str(caught.value).rsplit("the least is ", 1)[1].split()
    found = (
        search_of(plan, None, parse_bytes(least))
        if option == "--target-size"
        else search_of(plan, float(least), None)
    )
    assert (
        0 <= found.budget - sum(found.sizes[found.uniform].values()) < 2_048 + found.budget // 1000
    )
