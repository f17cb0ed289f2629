"""`llmopt kv-plan` as a test calls it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llmopt.cli.main import main


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["kv-plan", *arguments])
    return stop.value.code  # type: ignore[return-value]


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert call(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)
