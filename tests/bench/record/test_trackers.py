"""MLflow and W&B: what a run becomes there, with stand-ins for the libraries, and what happens without them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from llmopt.bench.record.tracking import (
    TrackedRun,
    TrackingOptions,
    log_run,
    of_result,
    of_sweep,
)
from llmopt.cli.main import main

FAST = ["--num-prompts", "4", "--num-runs", "1", "--output-len", "4", "--num-threads", "1"]


class FakeMlflow(ModuleType):
    """The calls of `MlflowClient` that are made, noted."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.noted: dict[str, Any] = {"metrics": [], "params": []}
        self.largest = 0
        noted = self.noted
        module = self

        class Client:
            def __init__(self, tracking_uri: str) -> None:
                if tracking_uri == "bad":
                    raise ValueError("no such\nstore")
                noted["uri"] = tracking_uri

            def get_experiment_by_name(self, name: str) -> None:
                noted["experiment"] = name

            def create_experiment(self, name: str) -> str:
                return f"id of {name}"

            def create_run(self, experiment: str, run_name: str) -> Any:
                noted["run"] = (experiment, run_name)
                return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

            def log_batch(self, run_id: str, metrics: list[Any], params: list[Any]) -> None:
                noted["metrics"] += metrics
                noted["params"] += params
                module.largest = max(module.largest, len(metrics), len(params))

            def log_artifacts(self, run_id: str, folder: str) -> None:
                noted["artifacts"] = sorted(path.name for path in Path(folder).iterdir())

            def set_terminated(self, run_id: str) -> None:
                noted["ended"] = run_id

        self.MlflowClient = Client


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMlflow:
    fake = FakeMlflow()
    entities: Any = ModuleType("mlflow.entities")
    entities.Metric = lambda key, value, timestamp, step: (key, value)
    entities.Param = lambda key, value: (key, value)
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return fake


def llmopt(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, words)))
    code = ended.value.code
    assert isinstance(code, int)
    return code


def test_a_run_is_logged(
    mlflow: FakeMlflow, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--mlflow-uri", "store", "--mlflow-experiment", "speed"]
    out = tmp_path / "run"
    assert llmopt("bench", *FAST, "--no-quality", *where, "--output", out, "--json") == 0
    said = capsys.readouterr()
    result = json.loads(said.out)
    assert "logged to MLflow: run r1 at store" in said.err
    noted, metrics = mlflow.noted, dict(mlflow.noted["metrics"])
    assert noted["run"] == ("id of speed", "stories3M") and noted["ended"] == "r1"
    assert metrics["output_throughput"] == result["output_throughput"]
    assert metrics["memory.weight_bytes"] == result["llmopt"]["memory"]["weight_bytes"]
    assert dict(noted["params"])["load.max_concurrency"] == "8" and mlflow.largest <= 100
    assert {"result.json", "report.html", "requests.parquet"} <= set(noted["artifacts"])


def test_a_missing_package_ends_before_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    runs = tmp_path / "runs"
    assert llmopt("bench", *FAST, "--mlflow-uri", "x", "--result-dir", runs) == 2
    error = capsys.readouterr().err.strip()
    assert "\n" not in error and "pip install 'llmopt[mlflow]'" in error
    assert not runs.exists()


def test_an_unusable_store_ends_before_the_benchmark(
    mlflow: FakeMlflow, capsys: pytest.CaptureFixture[str]
) -> None:
    assert llmopt("bench", *FAST, "--mlflow-uri", "bad") == 2
    assert "--mlflow-uri bad: no such store" in capsys.readouterr().err


def test_a_failing_tracker_keeps_the_run(
    mlflow: FakeMlflow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    tracker = TrackingOptions(mlflow_uri="store").tracker()
    run = TrackedRun("a run/1", {}, {"x": 1.0}, tmp_path)

    def full(*_: Any, **__: Any) -> None:
        raise OSError("disk\nfull")

    monkeypatch.setattr(mlflow.MlflowClient, "create_run", full)
    log_run(tracker, run, lines.append)
    assert lines == [f"not logged to MLflow: disk full; the run is in {tmp_path}"]


def test_numbers_are_finite_and_params_are_text(tmp_path: Path) -> None:
    identity = {"model": "m", "load": {"request_rate": "inf", "max_concurrency": None}}
    ours = {"name": "n", "run_id": "1", "identity": identity, "energy": {"cpu_reason": "none"}}
    result = {"output_throughput": 3, "bad": float("inf"), "yes": True, "llmopt": ours}
    run = of_result(result, tmp_path)
    assert run.params == {"model": "m", "load.request_rate": "inf", "run_id": "1"}
    assert run.metrics == {"output_throughput": 3.0}
    point = {"rate": 2.0, "output_throughput": 7.0}
    sweep = {"name": "s", "kind": "rate", "knee": 2.0, "points": [point], "identity": identity}
    assert of_sweep(sweep, tmp_path).metrics["knee.output_throughput"] == 7.0
