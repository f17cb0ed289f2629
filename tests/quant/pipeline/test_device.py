"""`--device`: layers run and are solved there, and nothing mixes with the host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.cli.main import main
from llmopt.quant.base import option
from llmopt.quant.convert.verify import PROVEN, verify
from llmopt.quant.methods.base import LayerResult
from llmopt.quant.pipeline import quantized_layer
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest

from ...support.model_families import FAMILIES, save_model
from ...support.pretend_device import NAME, pretended_device

TINY: dict[str, Any] = {"num_hidden_layers": 1, "num_key_value_heads": 8}


def request(output: Path, method: str, **options: Any) -> QuantizeRequest:
    """A request for the model beside the output."""
    given = {"num_samples": 2, "seq_len": 32, "compute": "float32", "group_size": -1} | options
    return QuantizeRequest(output.parent / "model", output, method, **given)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "method", ["rtn", "gptq", "awq", "hqq", "squeezellm", "smoothquant", "quip"]
)
def test_everything_is_computed_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Mixing with the host is an error there; the errors are those of a run on the host."""
    options: dict[str, Any] = {"format": "compressed-tensors"}
    if method in ("squeezellm", "quip"):
        options = {"group_size": None}
    elif method == "smoothquant":
        options["group_size"] = None
    monkeypatch.setattr(option, "KINDS", ("cpu", NAME))
    save_model(tmp_path / "model", "LlamaConfig", TINY)
    here = quantize(request(tmp_path / "here", method, **options))
    solved: set[str] = set()
    real = quantized_layer._on_host

    def on_host(result: LayerResult) -> LayerResult:
        parts = [part for weight in result.weights.values() for part in weight.parts().values()]
        solved.update(part.device.type for part in (*parts, *result.norms.values()))
        return real(result)

    monkeypatch.setattr(quantized_layer, "_on_host", on_host)
    with pretended_device() as mode:
        there = quantize(request(tmp_path / "there", method, device=NAME, **options))
    assert mode.operations > 500 and solved == {NAME}
    assert there.manifest["calibration"]["device"] == NAME
    assert verify(there.output).status == PROVEN
    errors = [run.manifest["summary"]["error"] for run in (here, there)]
    # Scales of AWQ and QuIP# differ in their last bits, and error feedback then takes other codes: with fewer
    # tokens than inputs, as here, many are about as good.
    near = 0.1 if method in ("awq", "quip") else 0.02
    assert errors[1] == pytest.approx(errors[0], rel=near)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("family", ["gemma-3", "qwen3-moe"])
def test_windows_and_experts_run_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(option, "KINDS", ("cpu", NAME))
    save_model(tmp_path / "model", *FAMILIES[family])
    options = {"format": "compressed-tensors", "seq_len": 16, "num_samples": 1}
    asked = request(tmp_path / "here", "gptq", **options)
    here = quantize(asked)
    with pretended_device():
        there = quantize(replace(asked, output=tmp_path / "there", device=NAME))
    errors = [run.manifest["summary"]["error"] for run in (here, there)]
    assert errors[1] == pytest.approx(errors[0], rel=0.05)


def test_statistics_and_kv_ranges_are_kept_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(option, "KINDS", ("cpu", NAME))
    options = {"stats": tmp_path / "stats", "kv_cache": "fp8", "format": "compressed-tensors"}
    save_model(tmp_path / "model", "LlamaConfig", TINY)
    with pretended_device():
        made = quantize(request(tmp_path / "out", "gptq", device=NAME, **options))
    assert verify(made.output).status == PROVEN


def test_a_device_that_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    for asked, words in (("cuda", "take cpu"), ("cuda:3", "take cpu"), ("tpu", "choose cpu, cuda")):
        with pytest.raises(SystemExit) as ended:
            main(["quantize", "-o", str(tmp_path / "out"), "--device", asked])
        shown = capsys.readouterr().err
        assert ended.value.code == 2
        assert f"--device {asked}: " in shown and words in " ".join(shown.split())
        assert "Traceback" not in shown
    assert not list(tmp_path.iterdir())
