"""Mock checkpoints: the layout of the real one, without its work."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.atomic_io import HOLLOW_BYTES
from llmopt.base.errors import BadInput
from llmopt.cli.main import main
from llmopt.quant.formats.registry import quantized_modules, read_quantized
from llmopt.quant.gguf.container import GgufFile
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.kinds.registry import format_names
from llmopt.quant.methods.options import MethodOptions
from llmopt.quant.methods.registry import METHODS
from llmopt.quant.model.checkpoint import Checkpoint, read_json
from llmopt.quant.pipeline.model_free import random_weight
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.plan import make_plan
from llmopt.quant.plan.request import QuantizeRequest
from llmopt.quant.source.models import open_checkpoint
from llmopt.quant.stream.layer_stream import LayerStream

from ...support.quant_support import QUICK, STORIES, TINY, save_layer


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_layer(tmp_path_factory.mktemp("source") / "layer")


GIVEN: dict[str, dict[str, Any]] = {
    "fp8": {"granularity": "block"},
    "autoround": {"options": MethodOptions(iters=1)},
}


def layout(folder: Path) -> dict[str, Any]:
    """Names, dtypes and shapes of a checkpoint's tensors, by file, and the content of its JSON files."""
    files: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".safetensors":
            with path.open("rb") as file:
                files[name] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        elif path.suffix == ".gguf":
            file = GgufFile(path)
            files[name] = file.metadata, [(t.name, t.type, t.shape) for t in file.tensors.values()]
        elif path.suffix == ".json" and path.name != "llmopt_quantization.json":
            files[name] = read_json(path)
        elif path.is_file():
            files[name] = None
    return files


def without_counts(files: dict[str, Any]) -> dict[str, Any]:
    """The layout with names and dtypes alone, for shapes that differ."""
    named = {name: part for name, part in files.items() if name.endswith(".safetensors")}
    index = files["model.safetensors.index.json"]["weight_map"]
    return {
        file: {name: tensor.get("dtype") for name, tensor in tensors.items()}
        for file, tensors in named.items()
    } | {"index": index, "config": files["config.json"], "files": sorted(files)}


@pytest.mark.parametrize("method", METHODS)
def test_a_mock_has_the_layout_of_the_real_checkpoint(
    layer: Path, tmp_path: Path, method: str
) -> None:
    written = []
    for weight_format in format_names():
        given = {"method": method, "format": weight_format, **QUICK, **GIVEN.get(method, {})}
        try:
            make_plan(QuantizeRequest(layer, tmp_path / "none", **given))
        except BadInput:
            continue
        real, mock = tmp_path / "real" / weight_format, tmp_path / "mock" / weight_format
        quantize(QuantizeRequest(layer, real, **given))
        quantize(QuantizeRequest(layer, mock, mock=True, **given))
        if method == "squeezellm":  # the data decide how many weights are sparse
            assert without_counts(layout(mock)) == without_counts(layout(real))
        else:
            assert layout(mock) == layout(real), weight_format
        written.append(weight_format)
        checkpoint = open_checkpoint(mock)
        for module in quantized_modules(checkpoint):
            weight = read_quantized(checkpoint, module).dequantize()
            assert bool(torch.isfinite(weight).all()), (weight_format, module)
    assert written


@pytest.mark.parametrize(
    "options",
    [
        {"method": "Q4_K_M"},
        {"method": "int8", "outlier_threshold": 6.0},
        {"method": "gptq", "options": MethodOptions(act_order="dynamic")},
        {"method": "gptq", "format": "gptq,compressed-tensors"},
        {"method": "awq", "kv_cache": "fp8", "format": "compressed-tensors"},
        {"method": "rtn", "bits": 8, "kv_cache": "fp8", "kv_cache_strategy": "attn_head"},
        {"method": "fp8", "granularity": "tensor", "activations": "static"},
        {"method": "nvfp4", "activations": "static", "format": "modelopt"},
        {"method": "rtn", "overrides": ("down_proj$=bits:8",), "ignore": ("o_proj$",)},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_options_change_a_mock_as_they_change_the_real_checkpoint(
    layer: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    quantize(QuantizeRequest(layer, tmp_path / "real" / "m", **options, **QUICK))
    quantize(QuantizeRequest(layer, tmp_path / "mock" / "m", mock=True, **options, **QUICK))
    assert layout(tmp_path / "mock") == layout(tmp_path / "real")


def test_a_mock_reads_no_weight_of_a_linear_and_runs_no_layer(
    layer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    plain = Checkpoint.tensor
    monkeypatch.setattr(
        Checkpoint, "tensor", lambda self, name: read.append(name) or plain(self, name)
    )
    monkeypatch.setattr(LayerStream, "load", lambda *_: pytest.fail("a layer was loaded"))
    result = quantize(QuantizeRequest(layer, tmp_path / "mock", mock=True))
    assert result.manifest["mock"] is True and not any("_proj" in name for name in read)
    assert all(file["bytes"] and "sha256" not in file for file in result.manifest["files"].values())


def test_large_codes_of_a_mock_are_holes_and_its_scales_are_not(tmp_path: Path) -> None:
    quantize(QuantizeRequest(STORIES, tmp_path / "mock", "rtn", bits=8, mock=True))
    checkpoint = Checkpoint(tmp_path / "mock")
    name = "model.layers.0.mlp.up_proj"
    codes = checkpoint.tensor(f"{name}.weight_packed").view(torch.uint8).flatten()
    assert codes.numel() > HOLLOW_BYTES
    assert codes[:HOLLOW_BYTES].any() and not codes[HOLLOW_BYTES:].any()
    assert bool((checkpoint.tensor(f"{name}.weight_scale") > 0).all())


@pytest.mark.parametrize(
    "words",
    [
        ("verify", "mock"),
        ("serve-local", "mock", "--port", "0"),
        ("bench", "mock", "--num-prompts", "1"),
        ("bench", str(TINY), "--reference", "mock"),
        ("convert", "mock", "--format", "hf"),
    ],
    ids=lambda words: words[0],
)
def test_commands_that_need_the_weights_refuse_a_mock(
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    quantize(QuantizeRequest(TINY, tmp_path / "mock", "rtn", bits=8, group_size=-1, mock=True))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["llmopt", *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    text = capsys.readouterr().err.strip()
    assert stopped.value.code == 2
    assert text.startswith("error: mock is a mock: its codes are random") and "\n" not in text


def test_a_method_that_searches_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--mock: --method auto measures the model"):
        QuantizeRequest(TINY, tmp_path / "mock", "auto", target_bpw=4.5, mock=True)


def test_random_weights_have_the_deviation_of_real_ones() -> None:
    weight = random_weight(IntScheme(4, 32, True), (1024, 64), torch.float16).dequantize()
    assert weight.shape == (1024, 64) and 0.015 < float(weight.std()) < 0.025
