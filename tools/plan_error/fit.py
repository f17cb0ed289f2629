"""Robust fit of the step model's parameters, in logarithms, shrunk towards the shared physics.

Least squares of the logarithmic errors of TPOT and TTFT under the pseudo-Huber loss, by Levenberg and
Marquardt. A prior holds each value near a physical one and each tag's factor near one; its strength was
chosen by cross-validation inside the fitting half, grouped by deployment. Then corrections: what remains of a
model in an engine and weight format, and of a version of it, by ridge regression on the residuals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from llmopt.engine.planner.expected import throughput
from llmopt.engine.planner.step_model import weight_dtype

from .columns import Column, Columns, Predicted, deployed
from .rows import Row

PRIOR_WEIGHT = 0.5
FACTOR_SPREAD = 0.4
"""Prior spread of a factor's logarithm, in parts of its value's."""
WIDE = (
    "widened",
    "int4",
    "vllm v0",
    "trtllm 1.0",
    "llama.cpp",
    "ampere",
    "ada",
    "consumer blackwell",
)
"""Tags whose factors are spread like a value: physics of their own that few rows show."""
TPOT_SCALE, TTFT_SCALE = 0.08, 0.1
"""Errors beyond which the loss grows linearly."""
SMALLEST_FACTOR = 0.02
"""A factor whose logarithm stays below this is dropped, and the rest are fitted again."""
CORRECTION_ROWS = {"tpot": 2.0, "ttft": 5.0}
"""Rows of no error that a correction is shrunk by."""
MOST_CORRECTIONS = {"tpot": 40, "ttft": 20}
OF_ROWS = ("draft.acceptance", "load.wait")
"""Parameters that only measured rows have: a plan is told the acceptance of its draft tokens, and its server
lets no prompt wait."""

SOURCE = (
    "python -m tools.plan_error --fit, on the fitting half of silicon_sample.csv (aiconfigurator-core "
    "0.12.0, Apache-2.0) and on deployments.csv, rows of public sources collected on 2026-11-28"
)

_ENGINES = ("vllm", "sglang", "trtllm", "llama.cpp")
_ERAS = (*_ENGINES, "trtllm 1.0")
_GENERATIONS = ("blackwell", "consumer blackwell", "ada", "ampere")
_COMMON = (*_ENGINES, *_GENERATIONS)
_ATTENTION = ("latent", "linear attention")
_BANDWIDTH = "share of the data sheet's bandwidth"
_PEAK = "share of the data sheet's peak"
_LINK = "share of a link's bandwidth, one direction"


class Prior(NamedTuple):
    """Where a parameter starts, how far its logarithm may move, its tags, and its unit."""

    value: float
    spread: float
    tags: tuple[str, ...]
    unit: str


PRIORS = {
    "linear.bandwidth": Prior(0.7, 0.2, (*_GENERATIONS, "int4", "int8", "llama.cpp"), _BANDWIDTH),
    "linear.compute": Prior(0.6, 0.4, (*_GENERATIONS, "widened", "int4", "llama.cpp"), _PEAK),
    "experts.bandwidth": Prior(0.6, 0.3, ("blackwell",), _BANDWIDTH),
    "experts.compute": Prior(
        0.4, 0.5, ("blackwell", "fp8", "fp4", "widened", "int4", "llama.cpp"), _PEAK
    ),
    "experts.padding": Prior(16, 0.7, (), "rows that a multiplication of an active expert pads"),
    "experts.narrow": Prior(100, 0.7, (), "columns that an expert's width on a rank is short of"),
    "experts.skew": Prior(0.2, 0.7, (), "work of the busiest expert-parallel rank beyond the mean"),
    "experts.spread": Prior(0.8, 0.3, (), "tokens that routing is as even as"),
    "attention.bandwidth": Prior(0.6, 0.3, ("blackwell",), _BANDWIDTH),
    "attention.compute": Prior(0.3, 0.3, (), _PEAK),
    "prefill.compute": Prior(0.4, 0.6, (), _PEAK),
    "states.bandwidth": Prior(0.5, 0.3, (), _BANDWIDTH),
    "activations.bandwidth": Prior(0.05, 0.7, ("blackwell",), _BANDWIDTH),
    "all_reduce.latency": Prior(8e-6, 0.7, (), "seconds per message"),
    "all_reduce.bandwidth": Prior(0.5, 0.3, ("blackwell",), _LINK),
    "all_to_all.latency": Prior(15e-6, 0.7, (), "seconds per message"),
    "all_to_all.bandwidth": Prior(0.4, 0.4, (), _LINK),
    "layer.seconds": Prior(
        30e-6, 0.7, (*_COMMON, *_ATTENTION), "seconds of the launches of a dense bf16 layer"
    ),
    "mixture_layer.seconds": Prior(
        24e-6,
        0.7,
        (*_COMMON, "fp8", "fp4"),
        "seconds of the launches of a layer's bf16 experts",
    ),
    "host.step": Prior(5e-4, 1.0, ("vllm v0",), "seconds per step"),
    "host.sequence": Prior(5e-6, 1.0, ("vllm v0",), "seconds per sequence of a rank's step"),
    "draft.acceptance": Prior(0.7, 0.3, (), "probability that a draft token is accepted"),
    "load.wait": Prior(
        0.5, 1.0, ("sglang", "trtllm"), "steps that a prompt waits, of those that a setting allows"
    ),
    "load.interference": Prior(1.0, 0.2, (), "prefills that a decode waits for"),
    "load.queue": Prior(0.5, 1.0, (), "prefills of an M/D/1 queue"),
    "load.burst": Prior(0.1, 1.5, _ERAS, "share of the requests in the first burst"),
    "load.fixed": Prior(0.015, 1.5, _ERAS, "seconds per request"),
    "load.arrival": Prior(1e-4, 1.0, _ERAS, "seconds per other client"),
    "load.prompt": Prior(1.0, 0.5, _ERAS, "prefills per prompt"),
    "load.steps": Prior(1.0, 1.0, _ERAS, "decode steps that a prompt waits for"),
}

Slot = tuple[str, str]
"""A parameter and a tag; the empty tag is the value itself."""


@dataclass(frozen=True)
class Fit:
    """Logarithms of the fitted values and factors, with standard errors, and the corrections."""

    slots: tuple[Slot, ...]
    logs: Column
    errors: Column
    corrections: Mapping[str, Mapping[str, tuple[float, float]]]
    num_rows: int
    models: tuple[str, ...]
    gpus: tuple[str, ...]

    def parameters(self, columns: Columns) -> dict[str, Column]:
        """Parameters of each row."""
        return _resolved(self.slots, self.logs, _indicators(self.slots, columns))

    def predict(self, columns: Columns) -> Predicted:
        """Predictions for rows, with the corrections that are known of them."""
        ttft, tpot = columns.predict(self.parameters(columns))
        ttft = ttft * np.exp([self._correction("ttft", row) for row in columns.rows])
        tpot = tpot * np.exp([self._correction("tpot", row) for row in columns.rows])
        loop = columns.loop
        total = ttft + (loop.output - 1) * tpot
        return Predicted(ttft, tpot, loop.concurrency * loop.output / total)

    def _correction(self, measure: str, row: Row) -> float:
        known = self.corrections[measure]
        return sum(known[key][0] for key in deployed(row).keys if key in known)


def model_key(row: Row) -> str:
    """Key of a model in an engine and a weight format."""
    return f"{row.engine}|{row.model}|{weight_dtype(row.recipe)}"


def fit(columns: Columns) -> Fit:
    """Fit the rows: once with every factor, and from there with those that were needed."""
    slots = [(name, tag) for name, prior in PRIORS.items() for tag in ("", *prior.tags)]
    logs, _ = _solve(slots, columns, {})
    found = dict(zip(slots, logs, strict=True))
    kept = [slot for slot in slots if not slot[1] or abs(found[slot]) > SMALLEST_FACTOR]
    logs, errors = _solve(kept, columns, found)
    ttft, tpot = columns.predict(_resolved(kept, logs, _indicators(kept, columns)))
    corrections = {
        "tpot": _corrections("tpot", columns, np.log(columns.measured.tpot / tpot), TPOT_SCALE),
        "ttft": _corrections("ttft", columns, np.log(columns.measured.ttft / ttft), TTFT_SCALE),
    }
    models = tuple(sorted(set(map(model_key, columns.rows))))
    gpus = tuple(sorted({row.device.name for row in columns.rows}))
    return Fit(tuple(kept), logs, errors, corrections, len(columns.rows), models, gpus)


def _resolved(slots: Sequence[Slot], logs: Column, indicators: Column) -> dict[str, Column]:
    sums = {name: np.zeros(indicators.shape[1]) for name in PRIORS}
    for (name, _), log, indicator in zip(slots, logs, indicators, strict=True):
        sums[name] += log * indicator
    return {name: np.exp(total) for name, total in sums.items()}


def _indicators(slots: Sequence[Slot], columns: Columns) -> Column:
    """A row of ones and noughts for each slot: the deployments that have its tag."""
    return np.array([[not tag or tag in tags for tags in columns.tags] for _, tag in slots], float)


def _solve(
    slots: list[Slot], columns: Columns, known: Mapping[Slot, float]
) -> tuple[Column, Column]:
    """Logarithms at the optimum, and their standard errors; the search starts at what is known."""
    start = np.array([0.0 if tag else np.log(PRIORS[name].value) for name, tag in slots])
    spread = [
        PRIORS[name].spread * (FACTOR_SPREAD if tag and tag not in WIDE else 1.0)
        for name, tag in slots
    ]
    stiffness = PRIOR_WEIGHT / np.array(spread)
    scales = np.repeat([TPOT_SCALE, TTFT_SCALE, TPOT_SCALE], len(columns.rows))
    measured = np.log(np.concatenate(columns.targets))
    known_only = np.isfinite(measured)
    indicators = _indicators(slots, columns)
    members = np.tile(indicators, 3)

    def errors(parameters: dict[str, Column]) -> Column:
        ttft, tpot = columns.predict(parameters)
        together = throughput(columns.loop, ttft, tpot)
        raw = np.log(np.concatenate([tpot, ttft, together])) - measured
        return np.where(known_only, raw, 0.0)

    def residuals(logs: Column) -> Column:
        raw = errors(_resolved(slots, logs, indicators))
        return np.concatenate([_huber(raw, scales), stiffness * (logs - start)])

    def jacobian(logs: Column) -> Column:
        parameters = _resolved(slots, logs, indicators)
        raw, step = errors(parameters), 1e-4
        slope = _huber_slope(raw, scales)
        moved = {
            name: (errors({**parameters, name: value * np.exp(step)}) - raw) / step * slope
            for name, value in parameters.items()
        }
        rows = [moved[name] * member for (name, _), member in zip(slots, members, strict=True)]
        return np.concatenate([np.array(rows).T, np.diag(stiffness)])

    first = np.array([known.get(slot, at) for slot, at in zip(slots, start, strict=True)])
    logs = levenberg_marquardt(residuals, jacobian, first)
    slopes = jacobian(logs)
    variance = 2 * np.median(np.abs(residuals(logs)[: len(scales)][known_only])) ** 2
    return logs, np.sqrt(variance * np.diag(np.linalg.inv(slopes.T @ slopes)))


def _huber(errors: Column, scales: Column) -> Column:
    """Signed root of the pseudo-Huber loss."""
    return np.sign(errors) * scales * np.sqrt(2 * (np.hypot(1, errors / scales) - 1))


def _huber_slope(errors: Column, scales: Column) -> Column:
    root = _huber(errors, scales)
    small = np.abs(errors) < 1e-9
    return np.where(small, 1, errors / np.hypot(1, errors / scales) / np.where(small, 1, root))


def levenberg_marquardt(
    residuals: Callable[[Column], Column],
    jacobian: Callable[[Column], Column],
    start: Column,
    steps: int = 60,
) -> Column:
    """Least squares from `start`, until a step gains less than one part in 100,000."""
    x, damping = start, 1e-2
    at = residuals(x)
    cost = at @ at
    for _ in range(steps):
        slopes = jacobian(x)
        normal, gradient = slopes.T @ slopes, slopes.T @ at
        for _ in range(8):
            scaled = normal + damping * np.diag(np.diag(normal) + 1e-6)
            trial = x + np.clip(np.linalg.solve(scaled, -gradient), -1, 1)
            found = residuals(trial)
            if found @ found < cost:
                break
            damping *= 4
        else:
            return x
        gained = cost - found @ found
        x, at, cost, damping = trial, found, cost - gained, max(damping / 5, 1e-9)
        if gained < 1e-5 * cost:
            break
    return x


def _corrections(
    measure: str, columns: Columns, residual: Column, scale: float
) -> dict[str, tuple[float, float]]:
    """Corrections by key, and their standard errors: ridge regression, reweighted against outliers, of the
    keys that explain most."""
    known = np.isfinite(residual)
    keys = [
        deployed(row).keys for row, is_known in zip(columns.rows, known, strict=True) if is_known
    ]
    names = sorted({key for row in keys for key in row})
    while True:
        design = np.array([[name in row for name in names] for row in keys], float)
        found, errors = _ridge(design, residual[known], CORRECTION_ROWS[measure], scale)
        gains = found**2 * design.sum(0)
        if len(names) <= MOST_CORRECTIONS[measure]:
            return dict(zip(names, zip(found, errors, strict=True), strict=True))
        kept = np.sort(np.argsort(-gains)[: max(MOST_CORRECTIONS[measure], int(0.8 * len(names)))])
        names = [names[index] for index in kept]


def _ridge(design: Column, residual: Column, shrink: float, scale: float) -> tuple[Column, Column]:
    weights, found = np.ones(len(residual)), np.zeros(design.shape[1])
    inverse = np.eye(design.shape[1])
    for _ in range(8):
        weighted = design * weights[:, None]
        inverse = np.linalg.inv(weighted.T @ design + shrink * np.eye(len(found)))
        found = inverse @ (weighted.T @ residual)
        weights = 1 / np.hypot(1, (residual - design @ found) / scale)
    spread = 1.48 * np.median(np.abs(residual - design @ found))
    return found, spread * np.sqrt(np.diag(inverse))


def as_json(found: Fit) -> dict[str, Any]:
    """The content of the planner's `step_parameters.json`."""
    parameters: dict[str, dict[str, Any]] = {}
    for (name, tag), log, error in zip(found.slots, found.logs, found.errors, strict=True):
        entry = {"value": _rounded(np.exp(log)), "standard_error": _rounded(error)}
        if tag:
            parameters[name].setdefault("factors", {})[tag] = entry
        else:
            parameters[name] = {**entry, "unit": PRIORS[name].unit}
    return {
        "source": SOURCE,
        "fitted_configurations": found.num_rows,
        "fitted_models": found.models,
        "fitted_gpus": found.gpus,
        "standard_errors": "of the natural logarithm of a value, a factor or a correction",
        **{name: parameters.pop(name) for name in OF_ROWS},
        "parameters": parameters,
        "corrections": {
            measure: {
                key: {"value": _rounded(value), "standard_error": _rounded(error)}
                for key, (value, error) in known.items()
            }
            for measure, known in found.corrections.items()
        },
    }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
