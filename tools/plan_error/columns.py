"""Columns of the measured configurations that a fit works on: loads, roofs and loops as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from llmopt.engine.planner.expected import (
    Loop,
    LoopTimes,
    LoopWorks,
    closed_loop,
    loop_works,
    throughput,
)
from llmopt.engine.planner.step_model import (
    Loads,
    Roofs,
    StepModel,
    deployed_as,
    generation,
    operator_seconds,
)
from llmopt.engine.planner.step_parameters import Deployed, StepParameters

from .rows import Row

Column = np.ndarray
MOST_DRAFTS = 3
MEMORY_SHARE = 0.92
RESERVED_BYTES = 3e9
"""Memory of activations, graphs and communication that a server keeps from its cache. Assumed."""


class Predicted(NamedTuple):
    """Predicted columns."""

    ttft: Column
    tpot: Column
    throughput: Column


@dataclass(frozen=True)
class Columns:
    """Rows as columns, with the tags of each."""

    rows: tuple[Row, ...]
    tags: tuple[frozenset[str], ...]
    loads: tuple[Loads, Loads, Loads]
    prompts: Column
    roofs: Roofs
    loop: Loop
    drafts: Column
    wait_steps: Column
    measured: Predicted

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Columns:
        """The columns of these rows."""
        models = [_step_model(row) for row in rows]
        loops = [_loop(row, model) for row, model in zip(rows, models, strict=True)]
        works = [row_works(row, loop) for row, loop in zip(rows, loops, strict=True)]
        steps = [(work.decode, work.mixed, work.packed) for work in works]
        loads = tuple(
            _stacked(Loads, [m.loads(s[part]) for m, s in zip(models, steps, strict=True)])
            for part in range(3)
        )
        loop = _stacked(Loop, loops)
        ttft = np.array([row.ttft_seconds for row in rows])
        tpot = np.array([row.tpot_seconds for row in rows])
        told = np.array([row.throughput for row in rows])
        return cls(
            tuple(rows),
            tuple(frozenset(deployed(row).tags) for row in rows),
            loads,  # type: ignore[arg-type]
            np.array([work.packed_prompts for work in works], float),
            _stacked(Roofs, [model.roofs for model in models]),
            loop,
            np.array([row.drafts for row in rows], float),
            np.array([row.wait_steps for row in rows], float),
            Predicted(ttft, tpot, np.where(np.isnan(told), throughput(loop, ttft, tpot), told)),
        )

    @property
    def targets(self) -> tuple[Column, Column, Column]:
        """What is fitted: TPOT and TTFT, and throughput where there is no TPOT."""
        tpot, ttft, together = self.measured.tpot, self.measured.ttft, self.measured.throughput
        return tpot, ttft, np.where(np.isnan(tpot), together, np.nan)

    def take(self, mask: Column) -> Columns:
        """The rows that a mask keeps."""
        chosen = np.flatnonzero(mask)
        part = lambda columns: type(columns)(*(column[chosen] for column in columns))  # noqa: E731
        return Columns(
            tuple(self.rows[i] for i in chosen),
            tuple(self.tags[i] for i in chosen),
            tuple(map(part, self.loads)),  # type: ignore[arg-type]
            self.prompts[chosen],
            part(self.roofs),
            part(self.loop),
            self.drafts[chosen],
            self.wait_steps[chosen],
            part(self.measured),
        )

    def predict(self, p: dict[str, Any]) -> tuple[Column, Column]:
        """TTFT and TPOT of each row with these parameters, without corrections."""
        step, mixed, packed = self.step_seconds(p)
        accepted = p["draft.acceptance"]
        token = step / sum(accepted**n * (self.drafts >= n) for n in range(MOST_DRAFTS + 1))
        times = LoopTimes(token, token + mixed - step, packed)
        ttft, tpot = closed_loop(self.loop, times, p)
        waited = p["load.steps"] * (step - token) + p["load.wait"] * self.wait_steps * step
        return ttft + waited, tpot

    def step_seconds(self, p: dict[str, Any]) -> LoopTimes:
        """Times of each row's steps with these parameters."""
        seconds = (sum(operator_seconds(x, self.roofs, p).values()) for x in self.loads)
        decode, mixed, packed = seconds
        return LoopTimes(decode, mixed, packed / self.prompts)


def row_works(row: Row, loop: Loop) -> LoopWorks:
    """Steps of a row's loop: a decode step verifies the draft tokens of each sequence too."""
    works = loop_works(loop, row.chunk_tokens)
    decode, mixed = (
        work._replace(decode_sequences=work.decode_sequences * (1 + row.drafts))
        for work in (works.decode, works.mixed)
    )
    return works._replace(decode=decode, mixed=mixed)


def deployed(row: Row) -> Deployed:
    """A row as the parameters see it."""
    return deployed_as(row.planned.shape, row.recipe, row.device, row.engine, row.version)


def kv_bytes(row: Row) -> float:
    """Bytes per cached element, which rows of the packaged file do not state: TensorRT-LLM's default for
    quantized weights is fp8, and the dated runs on Blackwell ask for it."""
    if told := row.names.get("kv_dtype"):
        return 1.0 if told.startswith("fp8") else 2.0
    is_dated = "auto-gap-analysis" not in row.names["silicon_data_source"]
    fp8 = row.engine == "trtllm" or (generation(row.device) == "blackwell" and is_dated)
    return 1.0 if fp8 and row.weights not in ("", "int4_wo") else 2.0


def _step_model(row: Row) -> StepModel:
    return StepModel.build(
        row.planned.shape,
        row.recipe,
        row.device,
        engine=row.engine,
        parallel=row.parallel,
        kv_bytes_per_element=kv_bytes(row),
        parameters=StepParameters({}),
    )


def _resident_sequences(model: StepModel, prompt: int, output: int) -> float:
    """Sequences whose KV cache fits at once, when each holds its prompt and half of its answer, with the
    memory share and reserve that servers commonly leave."""
    weights, ranks = model.weights, model.parallel.attention_dp
    loaded = weights.linear_bytes + 2 * weights.head_bytes + weights.expert_bytes
    free = model.device.memory_bytes * MEMORY_SHARE - RESERVED_BYTES - loaded
    context = prompt + output / 2
    cached = sum(min(context, window) * elements for window, elements in model.cache)
    size = cached * model.kv_bytes_per_element + model.shape.state_bytes / model.parallel.tp
    return max(1.0, free / size) * ranks if size else float("inf")


def _loop(row: Row, model: StepModel) -> Loop:
    resident = _resident_sequences(model, row.prompt, row.output)
    most = model.parallel.attention_dp * (1024 if row.device.memory_bytes >= 70 << 30 else 256)
    resident = min(row.concurrency, resident, most)
    return Loop(row.prompt, row.output, row.concurrency, resident, row.cached)


def _stacked(kind: Any, items: Sequence[Any]) -> Any:
    return kind(*np.array(items, float).T)
