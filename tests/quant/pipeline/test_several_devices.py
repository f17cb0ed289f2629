"""`--device a,b`: groups of linears are solved apart, with the bytes of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.quant.base import device as devices
from llmopt.quant.base.device import devices_of
from llmopt.quant.methods import gptq
from llmopt.quant.methods.options import MethodOptions
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest

from ...support.model_families import FAMILIES, save_model


def written(folder: Path, device: str, **given: Any) -> dict[str, bytes]:
    output = folder / device.replace(",", "-")
    request = QuantizeRequest(
        folder / "model",
        output,
        **{"method": "gptq", "format": "compressed-tensors", "group_size": 32} | given,
        device=device,
        compute="float32",
        num_samples=4,
        seq_len=32,
        held_out=1,
    )
    quantize(request)
    return {path.name: path.read_bytes() for path in output.glob("*.safetensors")}


@pytest.mark.parametrize(
    ("family", "given", "least"),
    [
        ("qwen3-moe-unnormalised", {}, 4),
        ("qwen3-moe-unnormalised", {"method": "awq"}, 4),
        ("llama-2", {"options": MethodOptions(true_sequential=False)}, 4),
    ],
)
def test_several_devices_give_the_bytes_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, given: Any, least: int
) -> None:
    """Experts of a stage, and all groups of a layer that is measured whole."""
    config, overrides = FAMILIES[family]
    save_model(tmp_path / "model", config, {**overrides, "num_hidden_layers": 2})
    apart: list[int] = []
    real = gptq.spread

    def spread(tasks: Any, *rest: Any) -> Any:
        apart.append(len(tasks))
        return real(tasks, *rest)

    monkeypatch.setattr(gptq, "spread", spread)
    alone = written(tmp_path, "cpu", **given)
    assert not apart
    assert written(tmp_path, "cpu,cpu", **given) == alone
    assert max(apart) >= least


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    two = {0: None, 1: None}
    monkeypatch.setattr(devices, "cuda_problem", lambda index: two.get(index, "there are 2"))
    assert devices_of("cuda:0,cuda:1") == (torch.device("cuda:0"), torch.device("cuda:1"))
    assert devices_of("cpu") == (devices.HOST,)
    for asked, said in {
        "cuda:0,cuda:2": "cuda:2.*take cpu",
        "cuda,cuda:0": "each device once",
        "cpu,cuda:1": "one kind",
        "cuda:0,": "choose cpu",
    }.items():
        with pytest.raises(BadInput, match=said):
            devices_of(asked)
