"""One benchmark from options to a run folder: load, warm up, measure, score, place, write."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.step_trace import StepRecorder
from ..quant.models import resolve_model
from ..quant.open import open_checkpoint
from ..quant.progress import Progress, Silent
from . import result as record
from .ceilings import measure_ceilings
from .cost import cost_part
from .datasets import build_workload, settled, warmup_workload
from .energy import EnergyMeter
from .environment import (
    describe,
    peak_memory_bytes,
    restart_peak_memory,
)
from .eval_tasks import prepare_tasks, run_tasks
from .identity import identity, speculation_part
from .inprocess import InProcessTarget, WithAdapter
from .interrupt import interrupts_held
from .layer_errors import recorded_layer_errors
from .load import Load, drive
from .machine_load import CpuTimes, other_load
from .machine_state import machine_state
from .options import BenchOptions
from .plan_residuals import plan_for_folder, residuals
from .quality import EVALUATION_TEXT, Passage, log_probabilities, read_passage, score
from .result import BenchRun
from .roofline import roofline_part
from .slow_sampler import slow_sampler
from .steady import steady_state
from .step_split import step_split
from .step_trace import STEPS_NAME, in_pass, step_trace_part, write_steps
from .trace import LoadPass
from .workload import Workload

if TYPE_CHECKING:
    import torch

    from ..engine.engine import Engine
    from .http_session import HttpSession

# Enough cache for one window of text at a time.
SCORING_SEQUENCES = 1


class BenchSession:
    """A model that is loaded and warmed up, to be measured pass by pass.

    Several sessions may live at once and take turns, so that what the machine does meanwhile hits all
    of them alike. `arms` is then the same text in each: their results are compared pass by pass.
    Sessions that follow each other may share the `engine` of the first.

    Raises:
        BadInput: the model, the data set or an option is unusable.
    """

    def __init__(
        self,
        options: BenchOptions,
        progress: Progress | None = None,
        *,
        arms: str | None = None,
        engine: Engine | None = None,
    ) -> None:
        self._options = options
        self._progress = progress or Silent()
        self._arms = arms
        self._model = resolve_model(options.model)
        self._plan = plan_for_folder(options.plan, self._model) if options.plan else None
        self._tasks = prepare_tasks(options.tasks) if options.tasks else None
        restart_peak_memory()
        self._engine = engine or load_engine(options, self._model)
        tokenizer = self._engine.tokenizer
        self._workload = build_workload(options, tokenizer, self._engine.max_model_len)
        options = self._options = settled(options, self._workload)
        self._load = Load(options.rate, options.burstiness, options.concurrency)
        self._target = InProcessTarget(
            self._engine,
            ignore_eos=options.ignore_eos,
            temperature=options.temperature,
            seed=options.seed,
            slowdown=options.slowdown if options.slowdown_where == "step" else 1.0,
            loras=tuple(options.lora),
        )
        if options.slowdown_where == "sampler" and options.slowdown > 1.0:
            slow_sampler(self._engine, options.slowdown)
        device = str(self._engine.device)
        self._energy = EnergyMeter(device)
        self._state_before = machine_state(device)
        self._passes: list[LoadPass] = []
        self._hit_rates: list[float] = []
        self._other_loads: list[float | None] = []
        warmup = warmup_workload(self._workload, options.warmups, tokenizer, seed=options.seed)
        if warmup is not None and self._drive(warmup, f"{self.name}, warm-up").interrupted:
            raise KeyboardInterrupt

    @property
    def name(self) -> str:
        """How the record and its reports call what is measured."""
        return self._options.name or self._options.label or self._model.name

    def say_notes(self) -> None:
        """Tell the person what to know about the workload."""
        for note in self._workload.notes:
            self._progress.note(f"{self._workload.name}: {note}")

    @property
    def engine(self) -> Engine:
        """The engine that is measured."""
        return self._engine

    @property
    def workload(self) -> Workload:
        """What every pass sends."""
        return self._workload

    @property
    def passes(self) -> Sequence[LoadPass]:
        """The passes so far."""
        return self._passes

    @property
    def hit_rates(self) -> Sequence[float | None]:
        """Of each pass, the share of prompt tokens that the prefix cache gave."""
        return self._hit_rates

    def score_quality(options: BenchOptions, engine: Engine, progress: Progress) -> dict[str, Any]:
    """Perplexity of the model, and its distance from the reference where one was given."""
    passage = read_passage(
        engine.tokenizer,
        max_model_len=engine.max_model_len,
        num_tokens=options.quality_tokens,
        path=options.quality_text or EVALUATION_TEXT,
    )
    scored = WithAdapter(engine, next(iter(options.lora), None))
    own = log_probabilities(scored, passage, progress=progress, what=options.name or "model")
    if options.reference is None:
        return score(passage, own).as_dict()
    reference = resolve_model(options.reference)
    theirs = reference_log_probabilities(options, reference, passage, progress)
    return score(passage, own, theirs, options.reference).as_dict()


def reference_log_probabilities(
    options: BenchOptions, reference: Path, passage: Passage, progress: Progress
) -> list[torch.Tensor]:
    """The reference model's distributions, from an engine of its own with a small cache."""
    engine = load_engine(
        options,
        reference,
        max_num_seqs=SCORING_SEQUENCES,
        kv_cache_memory_bytes=None,
        kv_cache_dtype="auto",
        window=None,
        attention_sinks=0,
        loras={},
        tensor_parallel_size=1,
        speculation=None,
    )
    return log_probabilities(engine, passage, progress=progress, what="reference")


def place_on_roofline(
    engine: Engine, model: Path, passes: Sequence[LoadPass]
) -> dict[str, Any] | None:
    """Measured roofs and points; None for a model whose shape the planner does not know."""
    from ..engine.planner.shapes import ModelShape
    from ..quant.errors import BadInput

    try:
        shape = ModelShape.from_config(open_checkpoint(model).config)
    except BadInput:
        return None
    memory = engine.memory
    # A tied embedding is the output head too, and the planner counts it once, as read.
    weight_bytes = memory.weight_bytes_per_step if shape.tied else memory.weight_bytes
    return roofline_part(
        [step for one in passes for step in one.steps],
        shape,
        measure_ceilings(engine.device, engine.dtype, weight_bytes),
        weight_bytes=weight_bytes,
        kv_bytes_per_element=engine.memory.kv_bytes_per_token / shape.kv_bytes_per_token(1),
        unquantized_bytes=engine.dtype.itemsize,
    )


def write_run(run: BenchRun, target: Path, *, with_csv: bool = False) -> Path:
    """Write the run folder `target`, whole or not at all; returns it."""
    with interrupts_held():
        from .report import write_report
        from .run_folder import whole_folder

        with whole_folder(target) as folder:
            (folder / record.RESULT_NAME).write_text(record.to_json(run.result), encoding="utf-8")
            (folder / "environment.json").write_text(
                record.to_json(run.result["llmopt"]["environment"]), encoding="utf-8"
            )
            record.write_requests(folder / record.REQUESTS_NAME, run.passes)
            write_steps(folder / STEPS_NAME, run.passes)
            if with_csv:
                record.write_requests_csv(folder / record.REQUESTS_CSV_NAME, run.passes)
            write_report(run.result, run.passes, folder)
        return target
