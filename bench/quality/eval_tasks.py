"""lm-eval tasks (EleutherAI harness) on the engine; needs `pip install 'llmopt[eval]'`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...quant.base.errors import BadInput, first_line
from ...quant.base.progress import Progress
from ..page.page import Table
from .eval_scoring import EngineScorer

if TYPE_CHECKING:
    from ...engine.engine import Engine

PROTOCOL = "tokens and windows as in lm-eval's hf model; no chat template; the task's own shots"


@dataclass(frozen=True, slots=True)
class TaskSet:
    """Resolved tasks with their data loaded."""

    specs: tuple[str, ...]
    manager: Any
    version: str


def prepare_tasks(words: Sequence[str]) -> TaskSet:
    """Resolve tasks and load their data, before anything is measured.

    A word is the name or pattern of bundled lm-eval tasks, or the path of a task's YAML file. Data sets on
    the hub are downloaded unless cached.

    Raises:
        BadInput: lm-eval is missing, or a task or its data is.
    """
    try:
        package, tasks = import_module("lm_eval"), import_module("lm_eval.tasks")
    except ImportError as error:
        raise BadInput(
            f"--tasks needs lm-eval ({first_line(error)}): pip install 'llmopt[eval]'"
        ) from error
    paths = [word for word in words if word.endswith((".yaml", ".yml"))]
    for path in paths:
        if not Path(path).is_file():
            raise BadInput(f"task {path} is not a file")
    # Indexing the thousands of tasks bundled with lm-eval takes seconds.
    manager = tasks.TaskManager(include_defaults=len(paths) < len(words))
    specs: list[str] = []
    for word in words:
        names = [word] if word in paths else manager.match_tasks([word])
        if not names:
            raise BadInput(
                f"lm-eval {package.__version__} has no task {word!r}; see lm-eval ls tasks"
            )
        specs += names
    try:
        with redirect_stdout(sys.stderr):
            manager.load(specs)
    except Exception as error:  # templates, data sets and the network raise many exception types
        raise BadInput(f"cannot load {', '.join(words)}: {first_line(error)}") from error
    return TaskSet(tuple(specs), manager, package.__version__)


def engine_model(scorer: EngineScorer) -> Any:
    """The scorer as an `lm_eval.api.model.LM`."""
    base: Any = import_module("lm_eval.api.model").LM

    class EngineModel(base):
        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            return scorer.loglikelihoods([request.args for request in requests])

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            return scorer.rolling_loglikelihoods([request.args[0] for request in requests])

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            return scorer.generate([request.args for request in requests])

    return EngineModel()


def run_tasks(
    tasks: TaskSet,
    engine: Engine,
    *,
    limit: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The record of the tasks: metrics with standard errors, versions, sample counts.

    A failing task does not lose the measurements before it: `error` then holds the reason.
    """
    record: dict[str, Any] = {
        "lm_eval_version": tasks.version,
        "protocol": PROTOCOL,
        "limit": limit,
        "error": None,
        "metrics": [],
    }
    evaluator = import_module("lm_eval.evaluator")
    try:
        with redirect_stdout(sys.stderr):
            outcome = evaluator.simple_evaluate(
                model=engine_model(EngineScorer(engine, progress, seed)),
                tasks=list(tasks.specs),
                task_manager=tasks.manager,
                limit=limit,
                log_samples=False,
            )
    except Exception as error:  # a task's own code and templates may raise anything
        return record | {"error": f"{type(error).__name__}: {first_line(error)}"}
    return record | {"metrics": metric_rows(outcome)}


def metric_rows(outcome: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per metric of the results of `simple_evaluate`; groups follow their tasks."""
    rows = []
    groups = outcome.get("groups", {})
    for task, values in {**outcome["results"], **groups}.items():
        for key, value in values.items():
            metric, comma, kept = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = values.get(f"{metric}_stderr,{kept}")
            rows.append(
                {
                    "task": task,
                    "is_group": task in groups,
                    "version": outcome["versions"].get(task),
                    "num_fewshot": outcome["n-shot"].get(task),
                    "num_samples": outcome["n-samples"].get(task, {}).get("effective"),
                    "metric": metric,
                    "filter": kept,
                    "value": value,
                    "stderr": stderr if isinstance(stderr, int | float) else None,
                    "higher_is_better": outcome["higher_is_better"].get(task, {}).get(metric),
                }
            )
    return rows


def score_words(row: Mapping[str, Any]) -> str:
    """`0.4250 ± 0.0350`; a standard error only where lm-eval gives one."""
    stderr = row["stderr"]
    return f"{row['value']:.4f}" + (f" ± {stderr:.4f}" if stderr is not None else "")


def metric_name(row: Mapping[str, Any]) -> str:
    """The metric's name, with its filter unless that is lm-eval's default."""
    return row["metric"] if row["filter"] == "none" else f"{row['metric']} ({row['filter']})"


def task_tables(results: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """Task scores of one or several runs, aligned by metric."""
    parts = {
        name: part for name, result in results.items() if (part := result["llmopt"].get("tasks"))
    }
    if not parts:
        return []
    keyed = [(row["task"], metric_name(row)) for part in parts.values() for row in part["metrics"]]
    order = {key: place for place, key in enumerate(dict.fromkeys(keyed))}
    rows = [(name, row) for name, part in parts.items() for row in part["metrics"]]
    rows.sort(key=lambda pair: order[pair[1]["task"], metric_name(pair[1])])
    cells = [
        [
            row["task"],
            metric_name(row),
            name,
            score_words(row),
            {True: "higher", False: "lower"}.get(row["higher_is_better"], ""),
            "" if row["num_samples"] is None else f"{row['num_samples']:,}",
            "" if row["num_fewshot"] is None else str(row["num_fewshot"]),
            "" if row["version"] is None else str(row["version"]),
        ]
        for name, row in rows
    ]
    versions = ", ".join(dict.fromkeys(part["lm_eval_version"] for part in parts.values()))
    caption = f"lm-eval {versions}: {PROTOCOL}. Value ± standard error."
    for name, part in parts.items():
        if part["limit"] is not None:
            caption += f" {name}: at most {part['limit']} samples a task."
        if part["error"] is not None:
            caption += f" {name} failed: {part['error']}."
    header = ["task", "metric", "model", "value", "better", "samples", "shots", "version"]
    return [Table(header, cells, caption=caption)]
