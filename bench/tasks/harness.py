"""lm-eval tasks (EleutherAI harness) on a backend; needs `pip install 'llmopt[eval]'`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ...quant.base.errors import BadInput, first_line
from ..options.options import BenchOptions
from .items import TaskItems, items_of
from .scorer import TaskBackend, TaskScorer

WINDOWS = "tokens and windows as in lm-eval's hf model"


@dataclass(frozen=True, slots=True)
class TaskSet:
    """Resolved tasks with their data loaded."""

    specs: tuple[str, ...]
    manager: Any
    version: str


@dataclass(frozen=True, slots=True)
class TaskScores:
    """The record of the tasks of a run (`llmopt.tasks`), and the scores per item (`tasks.parquet`)."""

    record: dict[str, Any]
    items: TaskItems


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


def lm_eval_model(scorer: TaskScorer) -> Any:
    """The scorer as an `lm_eval.api.model.LM`."""
    base: Any = import_module("lm_eval.api.model").LM

    class ScorerModel(base):
        tokenizer_name = scorer.tokenizer_name

        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            return scorer.loglikelihoods([request.args for request in requests])

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            return scorer.rolling_loglikelihoods([request.args[0] for request in requests])

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            return scorer.generate([request.args for request in requests])

        def chat_template(self, chat_template: bool | str = False) -> str:
            return scorer.chat_template or ""

        def apply_chat_template(
            self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
        ) -> str:
            return scorer.apply_chat_template(
                chat_history, add_generation_prompt=add_generation_prompt
            )

    return ScorerModel()


def check_template(options: BenchOptions, backend: TaskBackend) -> None:
    """Refuse, before anything is measured, tasks whose conversations could not be rendered.

    Raises:
        BadInput: a chat template is asked for and there is none, or the other way round for chats.
    """
    if backend.sends_messages:
        if not options.apply_chat_template:
            raise BadInput(
                "--tasks over --backend openai-chat sends conversations: add --apply-chat-template, or take "
                "--backend openai"
            )
    elif options.apply_chat_template and not backend.tokenizer.chat_template:
        raise BadInput(
            f"--apply-chat-template: the tokenizer of {backend.tokenizer.name_or_path} has no chat template"
        )


def run_tasks(tasks: TaskSet, backend: TaskBackend, options: BenchOptions) -> TaskScores:
    """Metrics with standard errors, versions, sample counts, and the scores per item.

    A failing task does not lose the measurements before it: `error` of the record then holds the reason.
    """
    record: dict[str, Any] = {
        "lm_eval_version": tasks.version,
        "protocol": protocol_words(options, backend),
        "limit": options.tasks_limit,
        "chat_template": options.apply_chat_template,
        "error": None,
        "metrics": [],
    }
    evaluator = import_module("lm_eval.evaluator")
    try:
        with redirect_stdout(sys.stderr):
            outcome = evaluator.simple_evaluate(
                model=lm_eval_model(TaskScorer(backend, options.seed)),
                tasks=list(tasks.specs),
                task_manager=tasks.manager,
                limit=options.tasks_limit,
                num_fewshot=options.num_fewshot,
                apply_chat_template=options.apply_chat_template,
                fewshot_as_multiturn=options.apply_chat_template and options.fewshot_as_multiturn,
                system_instruction=options.system_instruction,
                log_samples=True,
            )
    except Exception as error:  # a task's own code and templates may raise anything
        reason = f"{type(error).__name__}: {first_line(error)}"
        return TaskScores(record | {"error": reason}, TaskItems())
    rows = metric_rows(outcome)
    return TaskScores(record | {"metrics": rows}, items_of(outcome["samples"], rows))


def protocol_words(options: BenchOptions, backend: TaskBackend) -> str:
    """How the tasks were asked, for reports and comparisons."""
    if backend.sends_messages:
        template = "conversations sent as messages: the server applies its chat template"
    elif options.apply_chat_template:
        template = "the tokenizer's chat template"
    else:
        template = "no chat template"
    words = [WINDOWS, template]
    if options.apply_chat_template and options.fewshot_as_multiturn:
        words.append("shots as turns of the conversation")
    shots = options.num_fewshot
    words.append("the task's own shots" if shots is None else f"{shots} shots")
    if options.system_instruction is not None:
        words.append(f"system instruction {options.system_instruction!r}")
    return "; ".join(words)


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
