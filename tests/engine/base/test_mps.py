"""Apple GPUs, as far as a machine without one can tell: what is chosen, what is refused, how memory is counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.bench.machine.kernel_table import table
from llmopt.cli.main import main
from llmopt.engine.base.device import choose_device, choose_dtype
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.execution.decode_graphs import graph_sizes
from llmopt.engine.execution.start_up import memory_of

MPS = torch.device("mps")
TORCH_PATHS = {"torch", "torch-sdpa", "torch-rows", "loop", "tiled-dequant"}
TORCH_PATHS |= {"torch-trellis", "torch-e8p"}


@pytest.fixture
def apple(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A machine whose torch says that it has an Apple GPU."""

    def answer(**answers: object) -> None:
        for name, value in answers.items():
            owner: Any = torch.backends.mps if hasattr(torch.backends.mps, name) else torch.mps
            monkeypatch.setattr(owner, name, lambda *_, value=value: value)

    answer(is_available=True, is_macos_or_newer=True, recommended_max_memory=16 << 30)
    return answer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_operation_has_a_torch_path_or_a_reason(dtype: torch.dtype) -> None:
    choices = table(MPS, dtype)
    missing = [choice for choice in choices if choice.chosen is None]
    assert {choice.chosen for choice in choices} - {None} == TORCH_PATHS
    assert missing and all("fp8" in c.kernel_query or "nvfp4" in c.kernel_query for c in missing)
    assert all(dict(c.reasons)["tiled-dequant"] == "an Apple GPU has no float8" for c in missing)


def test_it_is_chosen_by_name_alone(apple: Callable[..., None]) -> None:
    assert choose_device("mps") == MPS
    assert choose_device("auto").type != "mps"
    assert choose_dtype("auto", MPS) is torch.bfloat16
    apple(is_macos_or_newer=False)
    assert choose_dtype("auto", MPS) is torch.float32


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"swap_space_bytes": 1 << 30}, "swap-space"),
        ({"kv_cache_dtype": "fp8"}, "fp8"),
        ({"window": 64, "attention_sinks": 4}, "attention-sinks"),
        ({"tensor_parallel_size": 2}, "tensor-parallel-size"),
    ],
)
def test_what_it_does_not_have_is_refused_by_name(options: dict[str, Any], name: str) -> None:
    EngineConfig(**options)
    with pytest.raises(BadInput, match=f"{name}.*is not for --device mps") as refused:
        EngineConfig(device="mps", **options)
    assert "\n" not in str(refused.value)


def test_there_is_one_of_them() -> None:
    with pytest.raises(BadInput, match="choose auto, cpu, cuda, mps or cuda:N"):
        EngineConfig(device="mps:1")


def test_steps_are_eager() -> None:
    assert graph_sizes(MPS, 16) == () != graph_sizes(torch.device("cpu"), 16)


def test_memory_is_what_metal_recommends(
    apple: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    apple(synchronize=None, empty_cache=None, driver_allocated_memory=3 << 30)
    memory = memory_of(MPS)
    assert memory is not None and memory.free_and_total() == (13 << 30, 16 << 30)
    allocated = iter([1 << 30, 4 << 30])
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: next(allocated))
    assert memory.peak_of(lambda: None) == 3 << 30


def test_doctor_shows_it(apple: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "--json", "--no-self-test"])
    found = json.loads(capsys.readouterr().out)
    assert stop.value.code == 0 and found["mps"] == {"memory_bytes": 16 << 30}
    assert {section["device"] for section in found["kernels"]} >= {"cpu", "mps"}


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="there is an Apple GPU")
def test_without_one_it_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["serve-local", "stories260K", "--device", "mps"])
    said = capsys.readouterr().err.strip()
    assert stop.value.code == 2 and "is built without MPS" in said and "take cpu" in said
    assert "Traceback" not in said
