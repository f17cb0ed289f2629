"""Quantization by names and shapes alone, for a model type that no library knows."""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.quant.check.damage import damage
from llmopt.quant.convert.verify import PROVEN, verify
from llmopt.quant.formats.registry import quantized_modules, read_quantized
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.pipeline import model_free
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from ...support.quant_support import STORIES, save_layer

METHODS: dict[str, dict[str, Any]] = {
    "rtn": {"method": "rtn"},
    "asymmetric": {"method": "rtn", "format": "gptq", "symmetric": False},
    "awq": {"method": "rtn", "format": "awq"},
    "fp8": {"method": "fp8"},
    "fp8-block": {"method": "fp8", "granularity": "block"},
    "fp8-tensor": {"method": "fp8", "granularity": "tensor"},
    "nvfp4": {"method": "nvfp4"},
    "mxfp4": {"method": "mxfp4"},
    "int8": {"method": "int8", "outlier_threshold": 6.0},
    "nf4": {"method": "nf4"},
    "nf4-double": {"method": "nf4", "double_quant": True},
    "hqq": {"method": "hqq", "bits": 2},
}
UNIT = "model.layers.0"
SHAPES = {
    "mixer.q_proj": (128, 128),
    "mixer.k_proj": (64, 128),
    "mixer.v_proj": (64, 128),
    "mixer.out_proj": (128, 128),
    "mixer.conv1d": (128, 4),
    "ffn.gate": (4, 128),
    "ffn.experts.0.up": (256, 128),
    "ffn.experts.0.down": (128, 256),
}
LINEARS = {name for name in SHAPES if name not in ("mixer.conv1d", "ffn.gate")}


def made_up(folder: Path, layers: int = 2, **shapes: tuple[int, int]) -> Path:
    """A checkpoint of a model type that is made up."""
    folder.mkdir()
    config = {"model_type": "madeup", "hidden_size": 128, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 512}))
    generator = torch.Generator().manual_seed(0)
    names = {"model.embed_tokens": (512, 128), "lm_head": (512, 128), "model.norm": (128,)}
    for index in range(layers):
        names |= {f"model.layers.{index}.{name}": size for name, size in SHAPES.items()}
        names |= {f"model.layers.{index}.{name}": size for name, size in shapes.items()}
        names[f"model.layers.{index}.norm"] = (128,)
    tensors = {
        f"{name}.weight": torch.randn(size, generator=generator).mul_(0.02).bfloat16()
        for name, size in names.items()
    }
    tensors[f"{UNIT}.mixer.q_proj.bias"] = torch.ones(128)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", METHODS)
def test_a_known_model_gets_the_bytes_of_the_usual_run(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, options = save_layer(tmp_path / "source"), METHODS[name]
    monkeypatch.setattr(model_free, "_VALUES", 128)  # chunks of 128 rows
    usual, free = tmp_path / "usual" / "m", tmp_path / "free" / "m"
    quantize(QuantizeRequest(source, usual, errors=False, **options))
    quantize(QuantizeRequest(source, free, model_free=True, **options))
    for path in usual.glob("model*.safetensors"):
        assert path.read_bytes() == (free / path.name).read_bytes()
    ours, theirs = (json.loads((f / "config.json").read_text()) for f in (free, usual))
    assert ours == theirs
    assert {path.name for path in free.iterdir()} == {path.name for path in usual.iterdir()}


@pytest.mark.parametrize("method", ["rtn", "fp8", "nvfp4", "mxfp4", "int8", "hqq"])
def test_a_made_up_model_type(tmp_path: Path, method: str) -> None:
    source = made_up(tmp_path / "source")
    result = quantize(QuantizeRequest(source, tmp_path / "m", method, model_free=True))
    checkpoint = Checkpoint(tmp_path / "m")
    expected = {f"model.layers.{index}.{name}" for index in range(2) for name in LINEARS}
    assert quantized_modules(checkpoint) == expected
    (note,) = (note for note in result.notes if "told by name and shape" in note)
    for left in ("model.embed_tokens", "layers.*.ffn.gate", "layers.*.mixer.conv1d"):
        assert left in note
    config = checkpoint.quantization_config
    assert config is not None and {"lm_head", f"{UNIT}.ffn.gate"} <= set(config["ignore"])
    assert verify(tmp_path / "m").status == PROVEN
    assert list(damage(checkpoint, Checkpoint(source))) == []
    bias = f"{UNIT}.mixer.q_proj.bias"
    assert torch.equal(checkpoint.tensor(bias), Checkpoint(source).tensor(bias))


def test_linears_that_one_scale_covers_share_it(tmp_path: Path) -> None:
    source = made_up(tmp_path / "source")
    quantize(QuantizeRequest(source, tmp_path / "m", "nvfp4", model_free=True))
    checkpoint = Checkpoint(tmp_path / "m")
    parts = [
        read_quantized(checkpoint, f"{UNIT}.mixer.{name}_proj").parts()["global_scale"]
        for name in "qkv"
    ]
    assert torch.equal(parts[0], parts[1]) and torch.equal(parts[1], parts[2])


class LiveBytes(TorchDispatchMode):
    """Bytes of storages that operations make, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.most = dict[int, int](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.live:
                    self.live[storage.data_ptr()] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, storage.data_ptr(), None)
        self.most = max(self.most, sum(self.live.values()))
        return result


@pytest.mark.parametrize("name", ["rtn", "fp8", "nvfp4", "mxfp4", "hqq", "awq"])
def test_memory_is_below_three_times_the_largest_tensor(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = (4096, 512)
    source = made_up(tmp_path / "source", layers=1, big=shape)
    monkeypatch.setattr(model_free, "_VALUES", shape[0] * shape[1] // 32)
    memory = LiveBytes()
    with memory:
        quantize(QuantizeRequest(source, tmp_path / "m", model_free=True, **METHODS[name]))
    assert shape[0] * shape[1] < memory.most < 3 * 2 * shape[0] * shape[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "awq"}, "--model-free: method awq is calibrated"),
        ({"method": "rtn", "vision": True}, "--model-free knows no vision tower"),
        ({"method": "rtn", "kv_cache": "fp8"}, "--model-free: --kv-cache scales are measured"),
        ({"method": "Q8_0"}, "model type 'madeup' cannot be written as GGUF"),
    ],
)
def test_refusals(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    source = made_up(tmp_path / "source")
    with pytest.raises(BadInput, match=message):
        quantize(QuantizeRequest(source, tmp_path / "m", model_free=True, **options))


def test_a_checkpoint_without_layers_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "madeup"}')
    save_file({"head.weight": torch.ones(64, 64)}, folder / "model.safetensors")
    with pytest.raises(BadInput, match="has no matrices in numbered layers"):
        quantize(QuantizeRequest(folder, tmp_path / "m", "rtn", model_free=True))


@pytest.mark.parametrize("lm_head", [False, True])
def test_a_mock_of_a_made_up_model_type(tmp_path: Path, lm_head: bool) -> None:
    source = made_up(tmp_path / "source")
    options: dict[str, Any] = {"method": "rtn", "model_free": True, "lm_head": lm_head}
    quantize(QuantizeRequest(source, tmp_path / "m", **options))
    assert ("lm_head" in quantized_modules(Checkpoint(tmp_path / "m"))) == lm_head
    quantize(QuantizeRequest(source, tmp_path / "mock", mock=True, **options))
    ours, theirs = Checkpoint(tmp_path / "mock"), Checkpoint(tmp_path / "m")
    assert ours.names == theirs.names and ours.config == theirs.config
    for name in ours.names:
        assert ours.shape(name) == theirs.shape(name), name


def test_a_killed_run_resumes_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = made_up(tmp_path / "source")
    request = QuantizeRequest(source, tmp_path / "m", "rtn", model_free=True)
    whole = QuantizeRequest(source, tmp_path / "whole", "rtn", model_free=True)
    quantize(whole)
    plain, calls = save_file, []

    def once(tensors: Any, path: Path) -> None:
        calls.append(path)
        if len(calls) == len(LINEARS) + 2:
            raise KeyboardInterrupt
        plain(tensors, path)

    monkeypatch.setattr(model_free, "save_file", once)
    with pytest.raises(KeyboardInterrupt):
        quantize(request)
    assert quantize(request).resumed_layers == 1
    for path in (tmp_path / "whole").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "m" / path.name).read_bytes()
    assert not (tmp_path / "m.partial").exists()


def test_stories_by_name_are_all_its_linears(tmp_path: Path) -> None:
    model = shutil.copytree(STORIES, tmp_path / "model")
    quantize(QuantizeRequest(model, tmp_path / "m", "rtn", model_free=True))
    assert len(quantized_modules(Checkpoint(tmp_path / "m"))) == 35
