"""A recorded run, and fake environments whose `llmopt bench` writes it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llmopt.bench.options.options import BenchOptions
from llmopt.bench.session.run_sessions import run_bench, write_run

FAKE = Path(__file__).with_name("fake_start.py")


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = {"model": "stories260K", "num_prompts": 8, "output_len": 4, "num_threads": 1}
    options = BenchOptions.model_validate({**given, "quality": False, "report": False})
    folder = tmp_path_factory.mktemp("recorded") / "run"
    return write_run(run_bench(options), folder, with_report=False)


@pytest.fixture
def environments(tmp_path: Path) -> tuple[Path, Path]:
    """Two virtual environments with nothing but a `llmopt`."""
    folders = (tmp_path / "base-env", tmp_path / "new-env")
    for folder in folders:
        (folder / "bin").mkdir(parents=True)
        script = folder / "bin" / "llmopt"
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -S {FAKE} "$@"\n')
        script.chmod(0o755)
    return folders


@pytest.fixture
def behave(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Callable[[], list[str]]]:
    """Sets what the fake starts do; returns a function that lists the names of those that ran."""
    file, log = tmp_path / "behaviour.json", tmp_path / "starts.log"
    monkeypatch.setenv("FAKE_STARTS", str(file))

    def set_behaviour(**behaviour: Any) -> Callable[[], list[str]]:
        file.write_text(json.dumps({**behaviour, "template": str(template), "log": str(log)}))
        log.unlink(missing_ok=True)
        return lambda: [json.loads(line)["name"] for line in log.read_text().splitlines()]

    return set_behaviour
