"""Runs of `llmopt bench` as a plan takes them: roofs that were measured, shares of them, and rows.

A run that was held against a plan (`bench --plan`) is a row: a load of one deployment with its mean times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import exp, inf, log
from pathlib import Path
from statistics import fmean
from typing import Any

from ...base.errors import BadInput
from ...quant.model.checkpoint import check_kinds, read_json
from ...recipes import MODELS
from .catalog import PlannedModel, find_model
from .devices import Device, find_device
from .expected import Expectation, Loop
from .load import Prediction
from .memory import Deployment
from .setup import Setup
from .speed import Efficiency
from .step_parameters import OwnRows, level, shared_value

Deployable = tuple[str, str]
"""Names of a model and of its weights."""
GPU_SCHEMA = "llmopt-gpu/1"
RECORDS = Path(__file__).resolve().parents[2] / "docs" / "measured"
"""Records of `llmopt doctor --gpu` that were sent in, in a folder for each GPU; a wheel has none."""


@dataclass(frozen=True, slots=True)
class OwnRow:
    """A closed loop that a run measured: mean times in milliseconds, and the most sequences at once. `path`
    is where the run had its model, whose weights were as stored."""

    model: str
    path: str
    weights: str
    gpu: str
    engine: str
    kv_bytes_per_element: float
    block_size: int
    prompt_tokens: int
    output_tokens: int
    clients: int
    resident: int
    ttft_ms: float
    tpot_ms: float

    @property
    def deployed(self) -> Deployable:
        return self.model, self.weights

    @property
    def loop(self) -> tuple[int, int, int]:
        return self.prompt_tokens, self.output_tokens, self.clients

    def predicted(self, model: PlannedModel, device: Device, setup: Setup) -> Prediction:
        """Expected means of its loop on a device."""
        recipe = setup.run_recipe(model.as_stored(), model.shape, device)
        deployment = Deployment(model.shape, recipe, self.kv_bytes_per_element, self.block_size)
        expected = Expectation.of(deployment, device, model.name, setup)
        return expected.loaded(Loop(*self.loop, self.resident))

    def request_seconds(self, ttft_seconds: float, tpot_seconds: float) -> float:
        return ttft_seconds + (self.output_tokens - 1) * tpot_seconds


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run's measured roofline ceilings (bandwidth, FLOP/s), the MBU and MFU that it reached, and its row,
    if it was held against a plan."""

    machine: str
    bandwidth: float
    flops: float
    efficiency: Efficiency
    is_cpu: bool
    row: OwnRow | None = None
    gpu: str | None = None

    def device(self, host: Device) -> Device:
        """`host` with the measured ceilings; one peak is used for every dtype that it has none of."""
        peaks = {**(host.peaks or {}), "bf16": self.flops, "float32": self.flops}
        source = f"measured on {self.machine}"
        return replace(host, bandwidth=self.bandwidth, peaks=peaks, source=source)


def read_runs(path: Path, planned: Deployable, *, on_cpu: bool) -> tuple[MeasuredRun, ...]:
    """Read a run's folder or its `result.json`, or a folder of runs: the runs with a row on a CPU or on a
    GPU, and only those of the planned model, if there are any. Raises BadInput: there is no such result, it
    has no roofline points for both phases, or runs are of several machines."""
    if not path.is_dir() or (path / "result.json").exists():
        return (read_run(path, planned[1]),)
    with_rows = [file for file in sorted(path.glob("*/result.json")) if _row(_parts(file))]
    runs = [run for run in map(read_run, with_rows) if run.is_cpu == on_cpu]
    if not runs:
        where = "a CPU" if on_cpu else "a GPU"
        raise BadInput(
            f"{path} holds no run of `llmopt bench --plan` on {where}: give a run's folder"
        )
    if len(machines := sorted({run.machine for run in runs})) > 1:
        raise BadInput(f"{path} has runs of {' and '.join(machines)}: name one run, or part them")
    return tuple([run for run in runs if run.row and run.row.deployed == planned] or runs)


def together(runs: Sequence[MeasuredRun]) -> MeasuredRun:
    """One run with the means of the ceilings and shares of several."""
    first, shares = runs[0], [run.efficiency for run in runs]
    if len(runs) == 1:
        return first
    efficiency = replace(
        first.efficiency,
        bandwidth=fmean(share.bandwidth for share in shares),
        compute=fmean(share.compute for share in shares),
        source=f"measured in {len(runs)} runs",
    )
    bandwidth, flops = fmean(r.bandwidth for r in runs), fmean(r.flops for r in runs)
    return replace(first, bandwidth=bandwidth, flops=flops, efficiency=efficiency)


def own_rows(
    runs: Sequence[MeasuredRun],
    planned: Deployable,
    devices: Sequence[Device],
    engine: str,
    cpu_plain_bytes: int | None = None,
) -> OwnRows | None:
    """The rows on one of the devices by the engine, against predictions at the shares of all runs: one for
    each load of the planned model, or one for each other model. Rows of models that were moved are left out.
    `cpu_plain_bytes` is that of the plan."""
    known = {device.name: device for device in devices if device.bandwidth and device.peaks}
    rows = [run.row for run in runs if run.row is not None]
    rows = [row for row in rows if row.engine == engine and row.gpu in known]
    rows = [row for row in rows if row.gpu == rows[0].gpu]
    of_model = any(row.deployed == planned for row in rows)
    shares = together(runs).efficiency
    setup = Setup(engine=engine, measured=shares, cpu_plain_bytes=cpu_plain_bytes)
    alike: dict[tuple[object, ...], list[tuple[OwnRow, Prediction]]] = {}
    for row in rows:
        if (model := _model_of(row)) is not None:
            key = row.loop if of_model else row.deployed
            predicted = row.predicted(model, known[row.gpu], setup)
            alike.setdefault(key, []).append((row, predicted))
    return _ratios(list(alike.values()), of_model) if alike else None


def _ratios(groups: Sequence[Sequence[tuple[OwnRow, Prediction]]], of_model: bool) -> OwnRows:
    """Measured / predicted of groups of rows; a group counts once, with its mean."""

    def means(log_ratio: Any) -> tuple[float, ...]:
        return tuple(fmean(log_ratio(*pair) for pair in group) for group in groups)

    ttft = means(lambda row, state: log(row.ttft_ms / 1e3 / state.ttft_seconds))
    tpot = means(lambda row, state: log(row.tpot_ms / 1e3 / state.tpot_seconds))
    moved = exp(level(ttft)), exp(level(tpot))

    def throughput(row: OwnRow, state: Prediction) -> float:
        expected = row.request_seconds(moved[0] * state.ttft_seconds, moved[1] * state.tpot_seconds)
        return log(expected / row.request_seconds(row.ttft_ms / 1e3, row.tpot_ms / 1e3))

    first = groups[0][0][0]
    return OwnRows(first.gpu, first.engine, tpot, ttft, means(throughput), of_model)


def lost_models(runs: Sequence[MeasuredRun]) -> list[str]:
    """Paths at which rows had models that are no longer there: `own_rows` leaves those rows out."""
    rows = [run.row for run in runs if run.row is not None]
    return sorted({row.path for row in rows if _model_of(row) is None})


def _model_of(row: OwnRow) -> PlannedModel | None:
    """The model of a row; None where it is no longer there: a missing path is no name for the hub."""
    if not Path(row.path).exists() and not (MODELS / row.path).exists():
        return None
    try:
        return find_model(row.path)
    except BadInput:
        return None


def _parts(file: Path) -> Mapping[str, Any]:
    parts = read_json(file).get("llmopt")
    return parts if isinstance(parts, dict) else {}


def _row(parts: Mapping[str, Any]) -> Mapping[str, Any] | None:
    plan = parts.get("plan")
    return plan.get("row") if isinstance(plan, dict) else None


def _number(file: Path, values: Mapping[str, Any], name: str) -> Any:
    """A positive, finite number: it is divided by, or its logarithm is taken."""
    value = values.get(name)
    if not isinstance(value, int | float) or not 0 < value < inf:
        raise BadInput(
            f"{file}: {name} is {value!r}, not a number above 0: give the result of a llmopt bench run"
        )
    return value


def _efficiency(file: Path, decode: Any, prefill: Any, source: str) -> Efficiency:
    latency = shared_value("all_reduce.latency")
    return Efficiency(_number(file, *decode), _number(file, *prefill), 0.0, latency, source)


def sent_in(gpu: Device) -> Path | None:
    """The record of a check of a GPU, among the records that come with the source, if there is one."""
    for path in sorted(RECORDS.glob("*/gpu.json")):
        name = str(read_json(path)["environment"]["gpu"]["name"])
        if _table_name(name) == gpu.name:
            return path
    return None


def _table_name(gpu: str) -> str:
    """The planner's name of a GPU; its own where the table does not have it."""
    try:
        return find_device(gpu).name
    except BadInput:
        return gpu


_GPU_RECORD = {
    "date": str,
    "environment": {"gpu": (None, {"name": str}), "libraries": {"*": (str, None)}},
    "roofs": {"*": (int, float)},
    "shares": {"*": {"*": (int, float)}},
    "stages": [dict],
}
_STAGE = {"name": str, "ended": str, "seconds": (int, float), "findings": [dict]}
_FINDING = {"what": str, "expected": str, "seen": str, "met": (bool, None), "numbers": dict}


def _check_part(file: Path, part: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    if missing := [key for key in kinds if key not in part]:
        raise BadInput(
            f"{file} is damaged ({missing[0]} is missing): run llmopt doctor --gpu again"
        )
    check_kinds(file, part, kinds)


def read_gpu_record(file: Path, record: Mapping[str, Any], weights: str) -> MeasuredRun:
    """A record of `llmopt doctor --gpu`: its roofs, and the shares of them that these weights reached.

    Where they were not measured, the shares are those of weights of as many bits, or else of bf16. Raises
    BadInput: it is damaged, or of no model."""
    _check_part(file, record, _GPU_RECORD)
    for stage in record["stages"]:
        _check_part(file, stage, _STAGE)
        for finding in stage["findings"]:
            _check_part(file, finding, _FINDING)
    shares, roofs = record["shares"], record["roofs"]
    alike = (name for name in shares if name.split(" ")[0] == weights.split(" ")[0])
    chosen = weights if weights in shares else next(alike, "bf16")
    if chosen not in shares:
        raise BadInput(f"{file} measured no model: run llmopt doctor --gpu again")
    gpu = record["environment"].get("gpu")
    source = f"measured in {chosen} in {file}"
    return MeasuredRun(
        machine=str(record["environment"].get("machine")),
        bandwidth=_number(file, roofs, "bandwidth"),
        flops=_number(file, roofs, "flops"),
        efficiency=_efficiency(
            file, (shares[chosen], "decode"), (shares[chosen], "prefill"), source
        ),
        is_cpu=gpu is None,
        gpu=None if gpu is None else _table_name(gpu["name"]),
    )


def read_run(path: Path, weights: str = "bf16") -> MeasuredRun:
    """Read a run folder or its `result.json`; or the record of a check of a GPU, for a plan of these weights.
    Raises BadInput: there is no such result, or it has no roofline points for both phases."""
    file = path / "result.json" if path.is_dir() else path
    whole = read_json(file)
    if whole.get("schema") == GPU_SCHEMA:
        return read_gpu_record(file, whole, weights)
    result = _parts(file)
    try:
        roofline = result["roofline"]
        ceilings = roofline["ceilings"]
        points = {point["phase"]: point for point in roofline["points"]}
        efficiency = _efficiency(
            file, (points["decode"], "mbu"), (points["prefill"], "mfu"), f"measured in {file}"
        )
        own_row = None
        if (row := _row(result)) is not None:
            values: dict[str, Any] = {
                f.name: str(row[f.name]) if f.type == "str" else _number(file, row, f.name)
                for f in fields(OwnRow)
            }
            own_row = OwnRow(**values)
        return MeasuredRun(
            machine=str(result["environment"]["machine"]),
            bandwidth=_number(file, ceilings, "bandwidth"),
            flops=_number(file, ceilings, "flops"),
            efficiency=efficiency,
            is_cpu=str(result["identity"]["device"]).startswith("cpu"),
            row=own_row,
        )
    except (KeyError, TypeError) as error:
        raise BadInput(
            f"{file} holds no roofline with both phases ({error}): give the result of a llmopt bench run"
        ) from error
