"""Defaults of the engine's config that depend on the machine."""

from __future__ import annotations

from llmopt.engine.config.config import EngineConfig


def test_steps_are_scheduled_asynchronously_where_a_device_would_wait_for_the_host() -> None:
    assert [EngineConfig().overlaps(device) for device in ("cuda", "cpu", "mps")] == [1, 0, 0]
    for chosen in (True, False):
        config = EngineConfig(async_scheduling=chosen)
        assert [config.overlaps(device) for device in ("cuda", "cpu")] == [chosen, chosen]
