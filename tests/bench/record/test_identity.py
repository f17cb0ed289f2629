"""The identity of a run on an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from llmopt.bench.options.options import BenchOptions
from llmopt.bench.record import run_record
from llmopt.engine.config.config import EngineConfig
from llmopt.quant.source.models import resolve_model


@pytest.mark.parametrize(
    ("asked", "device", "recorded"),
    [(None, "cpu", False), (False, "cpu", False), (True, "cpu", True), (None, "cuda", True)],
)
def test_async_scheduling_is_recorded_as_it_ran(
    monkeypatch: pytest.MonkeyPatch, asked: bool | None, device: str, recorded: bool
) -> None:
    def taken(*_: Any, **parts: Any) -> dict[str, Any]:
        return parts

    monkeypatch.setattr(run_record, "identity_part", taken)
    monkeypatch.setattr(run_record, "hardware_facts", lambda device: {})
    monkeypatch.setattr(run_record, "machine_name", lambda device: "")
    engine: Any = SimpleNamespace(
        config=EngineConfig(async_scheduling=asked),
        device=SimpleNamespace(type=device),
        dtype="torch.float32",
        max_model_len=8,
        activation_bits=16,
    )
    options, workload = BenchOptions(async_scheduling=asked), SimpleNamespace()
    made: Any = run_record.engine_identity(options, engine, resolve_model("stories260K"), workload)  # pyright: ignore[reportArgumentType]
    assert made["engine"].get("overlapped_loop", False) is recorded
    assert "async_scheduling" not in made["engine"]
